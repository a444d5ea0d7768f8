"""Configurables that do not fit the annotation of their parameter are refused."""

import gin
import pytest

from valkyrie import main
from valkyrie.config.load import load_gin
from valkyrie.errors import ConfigurationError


def load(binding):
  gin.clear_config(clear_constants=True)
  load_gin(['gin/tiny_cpu.gin'], [f'--gin.{binding}'], modules=main.CONFIGURABLE_MODULES)


@pytest.mark.parametrize(
  ('binding', 'expected'),
  [
    ('Block.mixers=@S5', 'several in brackets, such as (@S5,), not @S5'),
    ('Block.mixers=(@S5, @Block)', 'another part than itself, not (@S5, @Block)'),
    ('LanguageModel.pattern=(@S5,)', 'a Block, not (@S5,)'),
    ('LanguageModel.planner=@S5', 'a Planner (S5 has no '),
    ('Block.mixers=(@Planner,)', 'a SequenceMixer (Planner has no '),
    ('Optimizer.algorithm=@S5', 'a GradientTransformation, not @S5'),
    ('train.feed=@validation/S5', 'a TaskFeed (S5 has no '),
    ('train.hooks=(@S5(),)', 'no instance of a Haiku module (write @S5), not (@S5(),)'),
    ('train.hooks=(3,)', 'a Hook, such as @NAME(), not (3,)'),
    (
      'train.checkpoints=@Checkpoints',
      'an instance of Checkpoints (write @Checkpoints())',
    ),
    ('train.checkpoints=3.5', 'a Checkpoints, such as @NAME(), not a number (3.5)'),
    ('train.initial_weights=@Checkpoints()', 'a string or None, not @Checkpoints()'),
    ('LanguageModel.d_model=@S5', 'an integer, not @S5'),
    ('StepSettings.model=3.5', 'a reference to a LanguageModel, not a number (3.5)'),
  ],
)
def test_a_part_of_another_type_is_refused(binding, expected):
  name = binding.partition('=')[0]
  with pytest.raises(ConfigurationError) as refusal:
    load(binding)
  assert f'{name} takes {expected}' in str(refusal.value)


@pytest.mark.parametrize(
  'binding',
  [
    'Block.mixers=(@LongformerAttention, @S5)',
    'Optimizer.algorithm=@optax.lion',
    'LanguageModel.planner=@Planner',
    'LanguageModel.planner=None',
    'LanguageModel.pattern=(@near/Block, @far/Block)',
  ],
)
def test_a_part_that_fits_is_accepted(binding):
  load(binding)
