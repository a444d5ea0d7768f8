"""The record of a run, its comparison with the resuming run's, and the end of a run."""

import importlib
import math
import types
from typing import Any, NamedTuple

import pytest

from valkyrie import packages
from valkyrie.command_line import KINDS
from valkyrie.errors import ConfigurationError, StorageError
from valkyrie.run import resume
from valkyrie.run.lengths import Lengths


def record(**changes):
  return {
    'configuration': {'S5.hippo_blocks': 2, 'Block.mixers': ('@S5',)},
    'rows': 64,
    'versions': {'jax': '1', 'numpy': '2'},
    **changes,
  }


def test_equal_records_have_no_difference():
  saved = {**record(), 'configuration': {'S5.hippo_blocks': 2, 'Block.mixers': ['@S5']}}
  assert resume.check({**saved, 'validation_loss': 1.5}, record(), (), 'here') == []


def test_differences_are_refused_by_name_and_allowed_ones_are_returned():
  now = record(rows=128, versions={'jax': '3'}, configuration={'S5.hippo_blocks': 4})
  with pytest.raises(ConfigurationError) as refusal:
    resume.check(record(), now, ('versions',), 'runs/a/checkpoints/5')
  message = str(refusal.value)
  assert 'runs/a/checkpoints/5 was saved by a run that differs' in message
  assert "configuration: Block.mixers was ('@S5',), is not set" in message
  assert 'configuration: S5.hippo_blocks was 2, is 4' in message
  assert 'rows: was 64, is 128' in message
  assert 'versions:' not in message
  assert '--allow_changed=configuration,rows,versions.' in message
  assert resume.check(record(), now, KINDS, 'here')[-2:] == [
    "versions: jax was '1', is '3'",
    "versions: numpy was '2', is not set",
  ]


def test_the_advice_is_one_that_helps():
  """What is allowed already stays allowed; nothing is offered where it cannot help."""
  now = record(versions={'jax': '0'}, rows=99)
  with pytest.raises(ConfigurationError, match=r'--allow_changed=configuration,rows,versions\.'):
    resume.check(record(), now, ('versions',), 'here')
  with pytest.raises(ConfigurationError) as refusal:
    resume.check(record(), now, (), 'here', lambda: 'it has other arrays')
  assert 'It cannot continue: it has other arrays' in str(refusal.value)
  assert 'allow_changed' not in str(refusal.value)


def test_a_binding_of_the_default_is_as_none():
  importlib.import_module('valkyrie.data.feed')
  bare = record(configuration={})
  bound = record(configuration={'TaskFeed.reset_at': 'document', 'TaskFeed.learn_eos': False})
  assert resume.check(bare, bound, (), 'here') == []
  assert resume.check(bound, bare, (), 'here') == []
  # In a scope the binding without one counts; what has no default, or is unknown, always does.
  for name in ('validation/TaskFeed.reset_at', 'TaskFeed.task', 'Gone.reset_at'):
    with pytest.raises(ConfigurationError, match=f"{name} was not set, is 'document'"):
      resume.check(bare, record(configuration={name: 'document'}), (), 'here')


def test_what_may_change_is_left_out_of_the_record_of_an_earlier_version():
  tokenizer = {'vocabulary_size.vocabulary': 'a.json', 'TextSamples.every': 4}
  before = record(configuration={**tokenizer, 'LanguageModel.d_model': 8})
  assert resume.check(before, record(configuration={'LanguageModel.d_model': 8}), (), 'here') == []
  with pytest.raises(ConfigurationError, match='d_model was 8, is 16') as error:
    resume.check(before, record(configuration={'LanguageModel.d_model': 16}), (), 'here')
  assert 'vocabulary' not in str(error.value)


def test_a_record_without_a_kind_differs():
  with pytest.raises(ConfigurationError, match='rows: was None, is 64'):
    resume.check({}, record(), (), 'here')


def test_every_kind_of_difference_is_a_fact_of_a_record():
  mesh = types.SimpleNamespace(shape={'data': 8})
  setup = types.SimpleNamespace(
    settings=types.SimpleNamespace(batch_size=2), partitioner=types.SimpleNamespace(mesh=mesh)
  )
  vocabulary = types.SimpleNamespace(fingerprint='bytes')
  feed = types.SimpleNamespace(fingerprint='store', vocabulary=vocabulary)
  assert tuple(resume.facts(setup, feed, {})) == KINDS


def test_a_run_ends_after_its_steps_or_its_patience():
  lengths = Lengths(train_steps=9, eval_every=2, checkpoint_every=4, patience=2, target_loss=0.4)
  none: Any = None
  run = resume.RunState(none, none, lengths, none, 0, none)
  for step, loss in ((1, math.nan), (2, 1.0), (4, 1.5)):
    run.step = step
    run.note_loss(loss)
    assert run.done() is None
  assert run.lowest == (2, 1.0, 1)
  run.step = 8
  run.note_loss(math.nan)
  assert 'stopped early: 2 evaluations' in str(run.done())
  run.note_loss(0.5)
  assert run.lowest == (8, 0.5, 0) and run.done() is None
  run.note_loss(0.4)
  assert 'the validation loss 0.4000, after step 8, has reached' in str(run.done())
  run.step = 9
  assert run.done() == 'train_steps=9 are done'
  assert [step for step in range(1, 10) if lengths.is_due(4, step)] == [4, 8, 9]


def test_the_versions_are_those_of_this_process():
  import jax  # noqa: PLC0415

  assert packages.versions()['jax'] == jax.__version__


GOOD = {
  'position': 64,
  'rows': 2,
  'stretches': [[0, 0, 2]],
  'executable': {},
  'lowest': [3, 0.5, 1],
}


def test_the_form_of_a_record():
  resume.check_form(GOOD, 'runs/a/checkpoints/5')
  resume.check_form({**GOOD, 'lowest': None}, 'runs/a/checkpoints/5')


@pytest.mark.parametrize(
  'change',
  [
    {'position': 'x'}, {'rows': None}, {'stretches': [1]}, {'stretches': [[0, 'a', 2]]},
    {'executable': 3}, {'lowest': [1]}, {'lowest': 'no'}, {'position': -3}, {'position': 10**400},
    {'rows': 0}, {'rows': 2.0}, {'stretches': [[0, 0, 0]]}, {'stretches': [[0, float('inf'), 2]]},
    {'lowest': [3, 10**400]},
  ],
)  # fmt: skip
def test_a_record_of_another_form_is_a_storage_error(change):
  with pytest.raises(StorageError, match=r'checkpoints/5/record\.json is not the record of a run'):
    resume.check_form({**GOOD, **change}, 'runs/a/checkpoints/5')
  with pytest.raises(StorageError):
    resume.check_form([GOOD], 'here')


class State(NamedTuple):
  params: str = 'params'
  carry: str = 'carry'


def test_an_obstacle_is_a_reading_that_ends_or_another_array():
  def refuse():
    raise ConfigurationError('there is nothing left to read')

  other_weights = _Stored(['params/w: float32[3] there, float32[4] here'])
  assert resume.obstacle(GOOD, 2, State(), other_weights.differences, refuse) == (
    'there is nothing left to read'
  )
  for rows in (2, 3):
    assert resume.obstacle(GOOD, rows, State(), other_weights.differences, lambda: None) == (
      'the state of this run has other arrays. params/w: float32[3] there, float32[4] here.'
    )
  equal = _Stored([])
  assert resume.obstacle(GOOD, 2, State(), equal.differences, lambda: None) == ''


def test_weights_beside_another_form_of_the_carry_can_begin_another_run():
  """As of full attention in version 0.2.0; with other rows, a run resumes with an empty carry."""
  other_carry = _Stored([], carry=['carry/keys: found float32[4], expected nothing'])
  said = resume.obstacle(GOOD, 2, State(), other_carry.differences, lambda: None)
  assert said.startswith('the state of this run has other arrays. carry/keys: found float32[4]')
  assert '--gin.train.initial_weights=\'"MODEL_DIR"\'' in said
  assert resume.obstacle(GOOD, 3, State(), other_carry.differences, lambda: None) == ''
  setup: Any = types.SimpleNamespace(settings=types.SimpleNamespace(batch_size=2), state=State())
  for stored, is_advised in (
    (other_carry, True),
    (_Stored(['params/w: found nothing, expected float32[4]']), False),
  ):
    directory: Any = stored
    with pytest.raises(ConfigurationError) as caught:
      resume._restored_state(setup, directory, 2)
    assert ('train.initial_weights' in str(caught.value)) == is_advised


class _Stored:
  """A checkpoint whose fields differ from a state by these lines."""

  def __init__(self, others, carry=()):
    self._others = others
    self._carry = [*carry]

  def differences(self, target, partial=False):
    assert partial == isinstance(target, dict)
    return self._others if partial else self._others + self._carry

  def restore(self, target):
    lines = self.differences(target)
    raise ConfigurationError(f'a checkpoint of another model: {lines[0]}')


def test_weights_that_a_resumed_run_would_not_read_are_no_reason_to_go_on():
  """Allowing the change continues the checkpoint, without the weights that were meant."""
  bare = {'configuration': {}}
  given = {'configuration': {'train.initial_weights': 'other'}}
  said = resume.unread_weights(bare, given)
  assert "train.initial_weights = 'other' is read only where a run begins" in said
  assert not resume.unread_weights(given, given)
  assert not resume.unread_weights(given, bare)
  assert resume.unread_weights({'configuration': 3}, given)
