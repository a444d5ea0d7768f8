"""Configurables that do not fit the annotation of their parameter are refused."""

import ast
from collections.abc import Sequence
import dataclasses
import importlib
import math
import re
from typing import Annotated

import gin
from gin import config as gin_config
import haiku as hk
import jax
import numpy as np
import pytest

from valkyrie import main
from valkyrie.config import check, parse, paths, ranges, value_types
from valkyrie.config.load import load_gin
from valkyrie.config.ranges import PositiveInt, ProperFraction, Range, checked
from valkyrie.errors import ConfigurationError
from valkyrie.models import layers


def load(binding):
  gin.clear_config(clear_constants=True)
  modules = *main.CONFIGURABLE_MODULES, 'planner'
  load_gin(['gin/tiny_cpu.gin'], [f'--gin.{binding}'], modules=modules)


@pytest.mark.parametrize(
  ('binding', 'expected'),
  [
    ('local/Block.mixers=@S5', 'several in brackets, such as (@S5,), not @S5'),
    ('local/Block.mixers=(@S5, @Block)', 'another part than itself, not (@S5, @Block)'),
    ('LanguageModel.pattern=(@S5,)', 'Block, not (@S5,)'),
    ('Block.mlp=@S5', 'MLP or None, not @S5'),
    ('LanguageModel.insert=@S5', 'Insert (S5 has no '),
    ('local/Block.mixers=(@Planner,)', 'SequenceMixer (Planner has no '),
    ('Optimizer.algorithm=@S5', 'GradientTransformation, not @S5'),
    ('train.feed=@validation/S5', 'TaskFeed (S5 has no '),
    ('train.hooks=(@S5(),)', 'no instance of a Haiku module (write @S5), not (@S5(),)'),
    ('train.hooks=(3,)', 'Hook, such as @NAME(), not (3,)'),
    (
      'train.checkpoints=@Checkpoints',
      'an instance of Checkpoints (write @Checkpoints())',
    ),
    ('train.checkpoints=3.5', 'Checkpoints, such as @NAME(), not a number (3.5)'),
    ('train.initial_weights=@Checkpoints()', 'a string or None, not @Checkpoints()'),
    ('LanguageModel.d_model=@S5', 'an integer, not @S5'),
    (
      'StepSettings.objective=(@Prediction, @LanguageModel)',
      'a reference to Term or Term, not (@Prediction, @LanguageModel)',
    ),
    ('StepSettings.model=3.5', 'a reference to LanguageModel, not a number (3.5)'),
    ('StepSettings.model=None', 'a reference to LanguageModel, not None'),
    ('local/Block.mixers=(@S5, None)', 'a reference to SequenceMixer, not (@S5, None)'),
    ('train.checkpoints=(@Checkpoints(),)', 'Checkpoints, such as @NAME(), not (@Checkpoints(),)'),
    ('train.checkpoints=None', 'Checkpoints, such as @NAME(), not None'),
    ('train.profile_steps=10', '2 values in brackets or None, not an integer (10)'),
    ('train.profile_steps=(1, 2, 3)', '2 values in brackets or None, not (1, 2, 3)'),
    ('train.log_every=((1, 1), (5,))', 'an integer or 2 values in brackets, not ((1, 1), (5,))'),
    ("Partitioner.mesh=(('data', 'x'),)", "an integer, not (('data', 'x'),)"),
    (
      "Partitioner.axis_rules=(('embed', 1),)",
      "a string or several in brackets, each a string or None, not (('embed', 1),)",
    ),
    (
      "TaskFeed.options='column'",
      "values by name in braces, such as {'NAME': 1} or None, not a string ('column')",
    ),
    ('TaskFeed.options={1: 2}', 'a string or None, not {1: 2}'),
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
    'local/Block.mixers=(@LongformerAttention, @S5)',
    'Optimizer.algorithm=@optax.lion',
    'LanguageModel.insert=@Planner',
    'LanguageModel.insert=None',
    'LanguageModel.pattern=(@near/Block, @far/Block)',
  ],
)
def test_a_part_that_fits_is_accepted(binding):
  load(binding)


@pytest.mark.parametrize(
  'binding',
  [
    'GatedMLP.dropout=0.5',
    'SquaredReLUMLP.width=8',
    'Evaluator.terms=()',
    'RefusedSteps.skipped=3',
    "create_writers.name='mine'",
    'LanguageModel.kernel_lengths=()',
  ],
)
def test_what_the_program_gives_cannot_be_bound(binding):
  """A binding of it would have no effect."""
  name = binding.partition('=')[0].partition('.')[2]
  with pytest.raises(ConfigurationError, match=f"has no parameter '{name}' to bind"):
    load(binding)


# Numbers that have a check of their own.
OTHERWISE_CHECKED = {
  'TokenConsistency.rows', 'Partitioner.mesh', 'Sites.components', 'Distillation.match',
  'InitialWeights.step',
}  # fmt: skip
ZERO = {
  'seed', 'warmup_steps', 'keep_best', 'bad_documents', 'allowed', 'registers', 'document_start',
  'max_global_tokens', 'max_tokens', 'learning_rate', 'learning_rate_scale', 'dropout', 'epsilon',
  'norm_epsilon', 'share',
  'final_learning_rate_scale', 'z_loss', 'temperature', 'weights', 'low_turns',
  'high_turns', 'depths', 'min_p', 'cooldown', 'pass_carry', 'weight', 'ascents',
  'faithful_steps', 'coefficient', 'minimality', 'exponent', 'last_exponent', 'frequency',
  'faithfulness', 'source', 'match_weight', 'threshold', 'attacked_tokens', 'pattern_queries',
  'clustered', 'labeled', 'held_out', 'replication_tolerance', 'devices',
}  # fmt: skip
# A run of no steps keeps its first weights.
NO_STEPS = {
  'Decomposition.train_steps',
  'train.train_steps',
  'Optimizer.train_steps',
  'evaluate.last_step',
}
# At most 1.
UNIT = {
  'dropout',
  'epsilon',
  'norm_epsilon',
  'share',
  'depths',
  'min_p',
  'top_p',
  'cooldown',
  'average_decay',
  'pass_carry',
  'source',
  'threshold',
  'replication_tolerance',
}
ENDLESS = {
  'Optimizer.clip_norm', 'Group.clip_norm', 'Decomposition.clip_norm', 'LossSpikes.deviations',
  'Checkpoints.patience', 'create_writers.patience',
}  # fmt: skip
SELDOM = {
  'log_every',
  'eval_every',
  'checkpoint_every',
  'profile_every',
  'hbm_bytes',
}  # may exceed int32
SEVERAL = {'devices', 'dilations', 'depths', 'lengths', 'orders', 'profile_steps', 'weights'}


def numbers():
  """{name of a parameter of Valkyrie that people can bind to numbers: its inspect.Parameter}."""
  for module in main.CONFIGURABLE_MODULES:
    importlib.import_module(module)
  return {
    f'{gin_config._REGISTRY.minimal_selector(selector)}.{name}': parameter
    for selector, configurable in gin_config._REGISTRY.items()
    if configurable.wrapped.__module__.startswith('valkyrie.')
    for name, parameter in check.parameters_of(configurable.wrapped).items()
    if name not in (configurable.denylist or ())
    and re.search(r'\b(int|float)\b', str(parameter.annotation))
    and 'Callable' not in str(parameter.annotation)
  }


def accepts(binding):
  """Whether a value is accepted; another error than the package's fails the test."""
  effective = check.effective_bindings(parse.read_statements([], [f'--gin.{binding}']))
  try:
    value_types.check_parameter_types(effective)
  except ConfigurationError as error:
    assert binding.partition('=')[0] in str(error)
    return False
  return True


def test_every_number_has_a_range():
  without = {
    name for name, parameter in numbers().items() if not ranges.range_in(parameter.annotation)[1]
  }
  assert without == OTHERWISE_CHECKED


@pytest.mark.parametrize(
  'value',
  ['0', '-1', '-2.5', '1e400', '1e39', '-1e400', '1e30', '1.5', str(2**40), 'True', "'3'", 'None'],
)
def test_numbers_without_sense_are_refused(value):
  gin.clear_config(clear_constants=True)
  known = {name: p for name, p in numbers().items() if name not in OTHERWISE_CHECKED}
  assert len(known) > 90
  expected = set()
  for name, parameter in known.items():
    short = name.rpartition('.')[2]
    is_float = 'float' in str(parameter.annotation)
    number = None if value in ('True', "'3'", 'None') else float(value)
    fits = {
      'None': parameter.default is None,
      '0': short in ZERO or name in NO_STEPS,
      '1e400': name in ENDLESS,
      '1e30': is_float and short not in UNIT | {'grace_seconds'},
      '1.5': is_float and short not in UNIT,
      str(2**40): short in SELDOM or (is_float and short not in UNIT | {'grace_seconds'}),
    }.get(value, False)
    is_patience = name in ('Checkpoints.patience', 'create_writers.patience')
    fits = fits or (is_patience and number is not None and number >= 0)
    if fits:
      expected.add(name)
  form = {name: f'({value},)' for name in known if name.rpartition('.')[2] in SEVERAL}
  form['train.profile_steps'] = f'({value}, {value})'
  form['Mixture.weights'] = f"{{'a': {value}}}"
  if value == 'None':
    form = {}
  found = {name for name in known if accepts(f'{name}={form.get(name, value)}')}
  if value in ('True', "'3'"):
    found -= set(form)  # whose own checks look at their elements
  assert found - expected == set() and expected - found == set()


@pytest.mark.parametrize('binding', [
  'learning_rate=-1.0', 'learning_rate=1e400', 'train_steps=-3', 'seed=-1',
  f'seed={2**32}', 'batch_size=0', 'chunks=-1', 'log_every=0', 'warmup_steps=-1', 'eval_every=0',
  'Evaluator.chunks=0', 'validation/TaskFeed.batch_size=-4', 'Checkpoints.keep=0',
  'optax.adamw.b1=1.5', 'optax.adamw.b2=-0.1', 'optax.adamw.weight_decay=-0.1',
  'optax.adamw.eps=-1e-8', 'long_context.samples=0', 'long_context.depths=(0.5, 1.5)',
  'learning_rate=1e39', 'infer.temperature=1e39', 'optax.adamw.eps=1e39', 'Rotary.base=1e-39',
])  # fmt: skip
def test_a_flag_out_of_range_is_named_with_its_value_and_range(binding):
  name, value = binding.split('=')
  with pytest.raises(ConfigurationError, match='is out of range') as refusal:
    load(binding)
  message = str(refusal.value)
  assert f'--gin.{name}=' in message and re.search(r'in [\[(]-?[0-9.e-]+, \S+[\])]\.$', message)
  found = ast.literal_eval(value)
  assert f' = {found[-1] if isinstance(found, tuple) else found!r} is' in message


@pytest.mark.parametrize('binding', [
  'optax.contrib.reduce_on_plateau.factor=0.5', 'optax.contrib.reduce_on_plateau.cooldown=5',
  'optax.contrib.reduce_on_plateau.patience=0', 'optax.adamw.b1=0.0',
  'eval_every=99999999999', 'Optimizer.cooldown=0.0', 'Preemption.grace_seconds=0.5',
  'LongformerAttention.registers=0', 'Optimizer.clip_norm=2', 'train.patience=None',
  'log_every=((1, 1), (100, 99999999999))', 'train.log_every=((1, 1),)',
])  # fmt: skip
def test_numbers_with_a_sense_are_accepted(binding):
  load(binding)


@pytest.mark.parametrize('kind', [
  'PositiveFloat', 'NonNegativeFloat', 'Fraction', 'ProperFraction', 'Factor', 'Limit',
])  # fmt: skip
def test_a_number_in_range_is_in_the_range_of_float32(kind):
  """A finite one is finite there, and one that must not be 0 is not; seconds stay on the host."""
  _, permitted = ranges.range_in(getattr(ranges, kind))
  for value in (1e-46, 1.1e-38, 1.2e-38, 3.4e38, 3.5e38, 1e300):
    if value in permitted:
      assert np.float32(value) in permitted and np.isfinite(np.float32(value))
  assert (math.inf in permitted) == (kind == 'Limit')


def test_a_number_out_of_range_ends_before_anything_is_built(tmp_path, capsys):
  gin.clear_config(clear_constants=True)
  flags = ['--gin_file=gin/tiny_cpu.gin', '--gin.learning_rate=-1.0']
  assert main.main([*flags, f'--model_dir={tmp_path / "run"}']) == 78
  assert 'Optimizer.learning_rate = -1.0 is out of range' in capsys.readouterr().err
  assert not (tmp_path / 'run').exists()


@dataclasses.dataclass(eq=False)
class Scaled(layers.GatedMLP):
  """A module of a user: `factor` is also the name of a parameter of ours, in another range."""

  factor: float = 0.5
  window: int = 0
  sharpness: Annotated[float, Range('(0, 2]')] = 1.0
  steps: 'Sequence[PositiveInt] | None' = None
  later: 'Undefined | None' = None  # noqa: F821  (as of a name for the type checker alone)


@checked
def scaled(size: PositiveInt, *, factor: float = 0.5, dropout: ProperFraction = 0.0):
  return size * factor * dropout


USERS_NUMBERS = [
  ('sharpness', 0.0, 'Use a number in (0, 2].'),
  ('sharpness', 2.5, 'Use a number in (0, 2].'),
  ('dropout', 1.5, 'Use a number in [0, 1).'),
  ('width', 0, 'Use an integer in [1, 2147483647].'),
]


def make(**fields):
  return hk.transform(lambda: Scaled(**{'width': 8, **fields}).factor).init(jax.random.key(0))


def test_a_number_of_a_users_module_has_the_range_that_its_annotation_says():
  make(factor=0.25, window=-1, sharpness=2.0)
  for name, value, advice in USERS_NUMBERS:
    message = f'Scaled.{name} = {value} is out of range. {advice}'
    with pytest.raises(ConfigurationError, match=re.escape(message)):
      make(**{name: value})


def test_a_binding_of_a_users_module_has_the_range_that_its_annotation_says():
  with gin.unlock_config():
    gin.external_configurable(Scaled, module='mine')
  assert accepts('mine.Scaled.factor=0.25') and accepts('mine.Scaled.window=-1')
  for name, value, _ in USERS_NUMBERS:
    assert not accepts(f'mine.Scaled.{name}={value}')


def test_a_users_function_checks_its_arguments_where_it_is_decorated():
  assert scaled(8, factor=-0.5) == 0
  with pytest.raises(ConfigurationError, match=re.escape('scaled.size = 0 is out of range')):
    scaled(0)
  with pytest.raises(ConfigurationError, match=re.escape('scaled.dropout = 1 is out of range')):
    scaled(8, dropout=1)
  with pytest.raises(TypeError, match='missing 1 required positional argument'):
    scaled()


@pytest.mark.parametrize(
  ('value', 'fits'),
  [(1, True), (2**31 - 1, True), ([2, 3], True), (None, True), ((), False), ((2, 0), False),
   (2.0, False), (True, False), ('3', False), (float('nan'), False), (2**31, False)],
)  # fmt: skip
def test_a_range_anywhere_in_an_annotation_holds_for_every_number(value, fits):
  annotation = Sequence[PositiveInt] | None
  if fits:
    ranges.check('Mine.steps', value, annotation)
    return
  with pytest.raises(ConfigurationError, match=r'Mine\.steps = .* Use an integer in \[1, '):
    ranges.check('Mine.steps', value, annotation)


def parts_in_gin_files():
  """{(configurable, parameter): the file with a reference to a part in it}."""
  for module in main.CONFIGURABLE_MODULES:
    importlib.import_module(module)
  found = {}
  for file in sorted(paths.GIN.glob('*.gin')):
    effective = check.effective_bindings(parse.read_statements([str(file)]))
    for key, statement in effective.items():
      references = [
        v for v in parse.leaves(statement.parsed.value) if isinstance(v, parse.Reference)
      ]
      if references and 'gin.macro' not in key[1] and references[0].name != 'vocabulary_size':
        found.setdefault((key[1], key[2]), (file, key))
  return found


def flipped(value):
  """The value with calls instead of references, and the other way round."""
  if isinstance(value, parse.Reference):
    return parse.Reference(value.name, not value.evaluated)
  return type(value)(map(flipped, value)) if isinstance(value, list | tuple) else value


def test_a_call_in_place_of_a_class_and_a_class_in_place_of_a_call_name_the_right_form():
  """Of every part that a gin file names: settings, mixers, objective, optimizer, feeds, phases."""
  found = parts_in_gin_files()
  assert len(found) > 30
  for file, key in found.values():
    effective = check.effective_bindings(parse.read_statements([str(file)], ['--gin.seed=0']))
    statement = effective[key]
    wrong = flipped(statement.parsed.value)
    changed = statement._replace(parsed=statement.parsed._replace(value=wrong))
    right = next(v for v in parse.leaves(statement.parsed.value) if isinstance(v, parse.Reference))
    with pytest.raises(ConfigurationError, match=re.escape(f'(write {right})')):
      value_types.check_parameter_types({key: changed})


@pytest.mark.parametrize(
  ('binding', 'write'),
  [
    ('StepSettings.loss_spikes=@LossSpikes()', '@LossSpikes'),
    ('train.preemption=@Preemption()', '@Preemption'),
    ('Optimizer.groups=(@recurrence_group,)', '@recurrence_group()'),
    ('Curriculum.phases=@Phase', '@Phase()'),
    ('local/Block.mixers=@S5()', '@S5'),
    ('StepSettings.objective=@Prediction()', '@Prediction'),
    ('LanguageModel.ngrams=@NgramEmbedding()', '@NgramEmbedding'),
    ('Optimizer.algorithm=@optax.lion()', '@optax.lion'),
    ('train.hooks=(@TextSamples,)', '@TextSamples()'),
    ('Group.algorithm=@optax.lion()', '@optax.lion'),
  ],
)
def test_the_right_form_of_a_part_that_no_file_binds(binding, write):
  with pytest.raises(ConfigurationError, match=re.escape(f'(write {write})')):
    load(binding)
