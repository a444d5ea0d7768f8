"""What parts that gin chose one by one must have in common, checked before anything is compiled."""

from valkyrie.data.feed import TaskFeed
from valkyrie.errors import ConfigurationError
from valkyrie.models.language_model import Model
from valkyrie.partitioning import Partitioner
from valkyrie.training.curriculum import Curriculum


def check_vocabulary(model: Model, feed: TaskFeed) -> None:
  """Raises a ConfigurationError where the feed has tokens that the model has no embedding for."""
  if feed.vocabulary_size > model.vocabulary_size:
    raise ConfigurationError(
      f"The feed's vocabulary has {feed.vocabulary_size} tokens, but the model has only "
      f'{model.vocabulary_size}. Set LanguageModel.vocabulary_size = {feed.vocabulary_size}.'
    )


def check_grain(model: Model, curriculum: Curriculum, layout: Partitioner) -> None:
  """Raises a ConfigurationError where a planner's blocks are cut, by chunks or by the mesh."""
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
  if layout.axis_rules.get('time') is not None:
    raise ConfigurationError(
      f"Partitioner.axis_rules splits 'time' over {layout.axis_rules['time']!r}, but a planner "
      'makes its plans one after the other. Choose a layout that keeps rows whole, or set '
      'LanguageModel.planner = None.'
    )
