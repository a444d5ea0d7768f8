"""What Orbax has written is opened before a step counts: arrays, chunks, and the first values."""

from faults import spoiled_arrays
import jax.numpy as jnp
import orbax.checkpoint as ocp
from orbax.checkpoint._src.serialization import ocdbt_utils
import pytest

from valkyrie.checkpoint.manager import Checkpoints, open_to_read
from valkyrie.errors import StorageError

STATE = {'w': jnp.arange(300.0), 'b': {'c': jnp.ones((2, 3), jnp.bfloat16)}}
REASONS = {
  'the index': 'what was written cannot be opened (ValueError: NOT_FOUND',
  'an array': 'what was written cannot be opened (ValueError: NOT_FOUND',
  'a chunk': 'what was written cannot be opened (ValueError: a part of b/c is missing)',
  'a bit': 'what was written differs in b/c;',
}


@pytest.fixture
def lose(monkeypatch):
  """Lets Orbax lose something of the next save."""

  def install(lost):
    name = 'merge_ocdbt_per_process_files'
    monkeypatch.setattr(ocdbt_utils, name, spoiled_arrays.losing(lost))

  return install


def check_failed(checkpoints, said, reason, before=None):
  """Asserts that the last save has failed, and that the next one succeeds."""
  checkpoints.wait()
  assert checkpoints.latest_step() == before and 'step 2 could not be saved in ' in said[-1]
  assert reason in said[-1]
  checkpoints.save_now(3, STATE, {})
  assert said[-1].startswith('saved step 3')


@pytest.mark.invariant(11)
@pytest.mark.parametrize('lost', spoiled_arrays.LOST)
def test_a_first_state_that_is_not_whole_does_not_count(tmp_path, lose, lost):
  said = []
  with Checkpoints().open(tmp_path, said.append) as checkpoints:
    lose(lost)
    checkpoints.save(2, STATE, {})
    check_failed(checkpoints, said, REASONS[lost])
  with open_to_read(tmp_path) as checkpoints:
    assert checkpoints.latest_step() == 3


@pytest.mark.invariant(11)
@pytest.mark.parametrize('lost', ['the index', 'an array', 'a chunk'])
def test_a_later_state_that_is_not_whole_does_not_count(tmp_path, lose, lost):
  said = []
  with Checkpoints().open(tmp_path, said.append) as checkpoints:
    checkpoints.save_now(1, STATE, {})
    lose(lost)
    checkpoints.save(2, STATE, {})
    check_failed(checkpoints, said, REASONS[lost], before=1)


@pytest.mark.invariant(11)
def test_the_values_are_read_until_a_state_was_whole(tmp_path, lose):
  said = []
  with Checkpoints().open(tmp_path, said.append) as checkpoints:
    lose('the index')
    checkpoints.save(1, STATE, {})
    checkpoints.wait()
    lose('a bit')
    with pytest.raises(StorageError):
      checkpoints.save_now(2, STATE, {}, patiently=False)
    check_failed(checkpoints, said, REASONS['a bit'])


@pytest.mark.invariant(11)
def test_a_state_with_other_arrays_does_not_count(tmp_path, monkeypatch):
  said, save = [], ocp.AsyncCheckpointer.save

  def save_less(self, place, args):
    save(self, place, args=ocp.args.PyTreeSave({'w': args.item['w'].astype(jnp.int32)}))

  with Checkpoints().open(tmp_path, said.append) as checkpoints:
    with monkeypatch.context() as patch:
      patch.setattr(ocp.AsyncCheckpointer, 'save', save_less)
      checkpoints.save(2, STATE, {})
      checkpoints.wait()
    differs = 'differs in w: found int32[300], expected float32[300]; b/c: found nothing'
    check_failed(checkpoints, said, differs)
