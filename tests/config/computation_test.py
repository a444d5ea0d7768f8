"""The bindings that a resumed run must share, by declarations and references."""

import importlib

import gin
import pytest

from valkyrie import main
from valkyrie.config.computation import computation, may_change_on_resume, reached
from valkyrie.config.load import load_gin
from valkyrie.config.record import bindings
from valkyrie.data.feed import TaskFeed

for module in main.CONFIGURABLE_MODULES:
  importlib.import_module(module)


@gin.configurable
class Observer:
  def __init__(self, path='', tool=None):
    self.path, self.tool = path, tool


@gin.configurable
class Tool:
  def __init__(self, size=1, next_tool=None):
    self.size, self.next_tool = size, next_tool


@may_change_on_resume('place')
@gin.configurable
class DeclaredAbove:
  def __init__(self, size=1, place=''):
    self.size, self.place = size, place


@gin.configurable
@may_change_on_resume('place')
class DeclaredBelow(DeclaredAbove):
  def __init__(self, size=1, place='', **options):
    super().__init__(size, place, **options)


@may_change_on_resume('place')
@gin.configurable
def function_above(size=1, place=''):
  return size, place


@gin.configurable
@may_change_on_resume()
def function_below(size=1, place=''):
  return size, place


@gin.configurable
class LocalFeed(TaskFeed):
  """A subclass, which inherits the declaration."""


def counted(**bound):
  """The bindings that count, of these and of one that always does; names have __ for a dot."""
  bound = {name.replace('__', '.'): value for name, value in bound.items()}
  return set(computation({'StepSettings.seed': 0, **bound})) - {'StepSettings.seed'}


@pytest.mark.parametrize(
  'flag',
  [
    'precompile.hbm_bytes=16',
    'precompile.layouts=("gin/partition/data.gin",)',
    'train.preemption=@Preemption',
    'train.refused_steps=@RefusedSteps',
    'train.evaluator=@quick/Evaluator',
    'train.checkpoints=@few/Checkpoints()',
    'train.hooks=(@Observer(), @Tool())',
    'StepSettings.hunt_nan=True',
    'StepSettings.grad_norm_by_layer=True',
    'train_steps=7',
    'log_every=7',
    'eval_every=7',
    'checkpoint_every=7',
    'Checkpoints.keep=7',
    'Preemption.grace_seconds=7.0',
    'RefusedSteps.allowed=7',
    'Evaluator.chunks=7',
    'TokenConsistency.every=7',
    'evaluate.cuts=("state",)',
    'infer.temperature=0.5',
    'create_writers.tensorboard=False',
    'TaskFeed.data_dir="/elsewhere"',
    'train/TaskFeed.source="/elsewhere"',
    'validation/TaskFeed.split="test"',
    'validation/TaskFeed.batch_size=7',
  ],
)
def test_bindings_that_may_change(flag):
  assert changed_by(flag) == set()


@pytest.mark.parametrize(
  ('flag', 'names'),
  [
    ('StepSettings.seed=7', {'StepSettings.seed'}),
    ('learning_rate=7.0', {'Optimizer.learning_rate'}),
    ('local/Block.mixers=(@S5,)', {'local/Block.mixers'}),
    ('S5.state_size=64', {'S5.state_size'}),
    ('LossSpikes.window=7', {'LossSpikes.window'}),
    ('train/TaskFeed.split="test"', {'train/TaskFeed.split'}),
    ('TaskFeed.reset_at="never"', {'TaskFeed.reset_at'}),
    ('StepSettings.remat_chunks=True', {'StepSettings.remat_chunks'}),
  ],
)
def test_bindings_that_must_not_change(flag, names):
  assert changed_by(flag) == names


def changed_by(flag):
  """The names of the bindings of tiny_cpu.gin that count and are changed by a flag."""
  found = []
  for flags in ([], [f'--gin.{flag}']):
    gin.clear_config(clear_constants=True)
    load_gin(['gin/tiny_cpu.gin'], flags, modules=main.CONFIGURABLE_MODULES)
    found.append(computation(bindings()))
  before, after = found
  return {name for name in before | after if before.get(name) != after.get(name)}


@pytest.mark.parametrize('name', ['DeclaredAbove', 'DeclaredBelow', 'function_above'])
def test_a_declaration_above_or_below_gin_frees_the_named_parameters(name):
  assert counted(**{f'{name}__size': 2, f'a/{name}__place': 'b'}) == {f'{name}.size'}


def test_a_declaration_without_names_frees_every_parameter():
  assert counted(function_below__size=2, function_below__place='b') == set()


def test_a_subclass_inherits_the_declaration():
  assert counted(LocalFeed__data_dir='b', LocalFeed__split='c') == {'LocalFeed.split'}


def test_a_declaration_names_parameters_that_exist():
  with pytest.raises(ValueError, match='operate has no parameter plase'):

    @may_change_on_resume('plase')
    def operate(place):
      return place


def test_a_configurable_that_only_hooks_reference_is_left_out():
  hooks = {'train__hooks': ['@Observer()', '@mine/Observer()'], 'Observer__tool': '@Tool()'}
  assert counted(**hooks, Observer__path='a', **{'mine/Observer__path': 'b'}, Tool__size=3) == set()


def test_a_configurable_that_nothing_references_counts():
  assert counted(Tool__size=3) == {'Tool.size'}


def test_a_configurable_that_the_model_references_as_well_counts():
  model = {'LanguageModel__pattern': [{'deep': ['@Tool']}]}
  names = {'LanguageModel.pattern', 'Tool.size'}
  assert counted(train__hooks=['@Tool()'], Tool__size=3, **model) == names


@pytest.mark.parametrize('name', ['LossSpikes.window', 'Block.mlp_width'])
def test_a_default_in_code_that_hooks_reference_as_well_counts(name):
  bound = {'train.hooks': ['@LossSpikes', '@Block'], name: 3}
  assert counted(**bound) == {name}


def test_a_default_in_code_that_a_binding_replaces_is_no_reference():
  bound = {'train.hooks': ['@LossSpikes'], 'StepSettings.loss_spikes': None}
  assert counted(**bound, LossSpikes__window=3) == {'StepSettings.loss_spikes'}


def test_scopes_decide_which_references_a_binding_applies_to():
  references = {'train__hooks': ['@a/b/Tool()'], 'LanguageModel__insert': '@c/Tool'}
  bound = {f'{scope}Tool__size': 3 for scope in ('', 'a/', 'a/b/', 'b/', 'c/')}
  names = {'LanguageModel.insert', 'Tool.size', 'b/Tool.size', 'c/Tool.size'}
  assert counted(**references, **bound) == names


def test_configurables_that_only_reference_each_other_count():
  cycle = {'Tool__next_tool': '@a/Tool()', 'a/Tool__next_tool': '@Tool()'}
  assert counted(**cycle) == {'Tool.next_tool', 'a/Tool.next_tool'}


def test_a_string_that_begins_with_an_at_sign_is_no_error():
  assert counted(Tool__size='@ home', train__hooks=['@nobody()']) == {'Tool.size'}


def test_what_a_binding_reaches():
  bound = {
    'evaluate.model': '@LanguageModel',
    'evaluate.evaluator': '@Evaluator',
    'Evaluator.feed': '@validation/TaskFeed',
    'LanguageModel.block': '@Block',
    'Block.mixers': ['@S5'],
    'S5.horizon': 100,
    'RGLRU.blocks': 2,
    'TaskFeed.reset_at': 'never',
    'validation/TaskFeed.split': 'validation',
    'train/TaskFeed.split': 'train',
    'Optimizer.learning_rate': 1.0,
  }
  of_model = {'evaluate.model', 'LanguageModel.block', 'Block.mixers', 'S5.horizon'}
  assert reached(bound, ['evaluate.model']) == of_model
  assert reached(bound, ['evaluate.evaluator']) == {
    'evaluate.evaluator', 'Evaluator.feed', 'TaskFeed.reset_at', 'validation/TaskFeed.split'
  }  # fmt: skip
  assert reached(bound, ['infer.opened']) == set()
