"""What parts that gin chose one by one must have in common, checked before anything is compiled."""

from valkyrie.data.feed import TaskFeed
from valkyrie.errors import ConfigurationError
from valkyrie.models.language_model import Model
from valkyrie.sharding.partitioner import Partitioner
from valkyrie.training.curriculum import Curriculum


def check_vocabulary(model: Model, feed: TaskFeed) -> None:
  """Raises a ConfigurationError where the feed has tokens that the model has no embedding for."""
  if feed.vocabulary_size > model.vocabulary_size:
    raise ConfigurationError(
      f"The feed's vocabulary has {feed.vocabulary_size} tokens, but the model has only "
      f'{model.vocabulary_size}. Set LanguageModel.vocabulary_size = {feed.vocabulary_size}.'
    )


def check_grain(model: Model, curriculum: Curriculum) -> None:
  """Raises a ConfigurationError where chunks would cut a planner's blocks."""
  grain = model.plan_block
  if grain is None:
    return
  for size in [phase.chunk_size for phase in curriculum.phases if phase.planner]:
    if size % grain:
      below, above = size // grain * grain, (size // grain + 1) * grain
      raise ConfigurationError(
        f'chunk_size={size} is not a multiple of Planner.plan_block={grain}, as chunks of training '
        'are. ' + (f'The nearest that are: {below} and {above}.' if below else f'Use {above}.')
      )


def check_whole_time(model: Model, layout: Partitioner) -> None:
  """Raises a ConfigurationError where time is split, but a part of the model needs all of it."""
  axes = layout.axes_of('time')
  if axes and model.whole_time:
    raise ConfigurationError(
      f"Partitioner.axis_rules splits 'time' over {axes}, but {' and '.join(model.whole_time)} "
      'must have all of a row on one device. Choose a layout that keeps rows whole, such as '
      'gin/partition/zero1.gin, or a model of parts that work on pieces of time: '
      'LongformerAttention, S5, or a mixer that says shards_of_time = True, in Block.mixers, and '
      'LanguageModel.planner = None.'
    )
