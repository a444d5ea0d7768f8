"""Saves and restores of a train state: the same bits, the retention policy, and refusals."""

import contextlib
import errno
import json
import os
import re
import resource
import subprocess
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np
import pytest

from valkyrie.checkpoint import state_files
from valkyrie.checkpoint.manager import Checkpoints, open_to_read
from valkyrie.checkpoint.manifest import DiskFiles
from valkyrie.checkpoint.state_files import StateFiles
from valkyrie.distributed import heartbeat
from valkyrie.distributed.preemption import Preemption
from valkyrie.errors import ConfigurationError, Diverged, StorageError


class State(NamedTuple):
  step: Any
  params: Any
  carry: Any


def sharding(*axes):
  return NamedSharding(Mesh(np.asarray(jax.devices()), ('data',)), PartitionSpec(*axes))


def make_state(*axes):
  kernel = jnp.arange(64, dtype=jnp.float32).reshape(16, 4) / 3
  layers = {
    'model/~/block': {
      'w': jax.device_put(kernel.at[0, :3].set([-0.0, 1e-45, 3e38]), sharding(*axes)),
      'b': jax.device_put(jnp.linspace(-1, 1, 16, dtype=jnp.bfloat16), sharding(*axes)),
    },
    'empty': {},
  }
  carry = (
    jnp.full((2, 3), 0xDEADBEEF, jnp.uint32),
    None,
    (),
    [jnp.ones(2, jnp.complex64) * 1j],
    jnp.zeros((2, 0, 3), jnp.bfloat16),  # like a carry without document starts
  )
  return State(jnp.int32(7), layers, carry)


def abstract(state, *axes):
  def of_leaf(leaf):
    fits = axes if leaf.shape and leaf.shape[0] % 8 == 0 else ()
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding(*fits))

  return jax.tree.map(of_leaf, state)


def assert_same_bits(found, expected):
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    assert a.dtype == b.dtype
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def save_steps(model_dir, *steps, state=None, **options):
  with Checkpoints(**options).open(model_dir) as checkpoints:
    for step in steps:
      checkpoints.save(step, make_state() if state is None else state, {'position': step * 100})


def test_state_and_record_are_restored_bit_for_bit_in_their_types(tmp_path):
  record = {'position': 2**40, 'phase': 1, 'versions': {'jax': '0.12'}, 'list': [1, 'é', None, 0.1]}
  with Checkpoints().open(tmp_path) as checkpoints:
    checkpoints.save(7, make_state(), record)
  with Checkpoints().open(tmp_path) as checkpoints:
    assert checkpoints.latest_record() == record
    state = checkpoints.restore(abstract(make_state()))
  assert_same_bits(state, make_state())
  assert isinstance(state, State)
  assert isinstance(state.carry, tuple)


def test_a_state_is_restored_in_another_sharding(tmp_path):
  save_steps(tmp_path, 1, state=make_state('data'))
  with open_to_read(tmp_path) as checkpoints:
    whole = checkpoints.restore(abstract(make_state()))
    split = checkpoints.restore(abstract(make_state(), 'data'))
  assert_same_bits(whole, make_state())
  assert_same_bits(split, make_state())
  assert len(split.params['model/~/block']['w'].sharding.device_set) == len(jax.devices())
  assert not split.params['model/~/block']['w'].sharding.is_fully_replicated


def test_a_part_of_a_state_is_restored(tmp_path):
  save_steps(tmp_path, 5)
  expected = abstract(make_state())
  with open_to_read(tmp_path) as checkpoints:
    part = checkpoints.restore({'params': expected.params}, partial=True)
    assert_same_bits(part, {'params': make_state().params})
    evaluated = checkpoints.restore_evaluated(expected.params)
    assert_same_bits(evaluated, make_state().params)
    smaller = {'model/~/block': {'w': expected.params['model/~/block']['w']}, 'empty': {}}
    with pytest.raises(ConfigurationError, match='params/model/~/block/b: found bfloat16'):
      checkpoints.restore({'params': smaller}, partial=True)


def test_a_state_may_be_donated_while_it_is_being_saved(tmp_path):
  state = {'w': jax.random.normal(jax.random.key(0), (512, 512))}
  before = np.array(state['w'])
  advance = jax.jit(lambda s: {'w': s['w'] * 0}, donate_argnums=0)
  with Checkpoints().open(tmp_path) as checkpoints:
    checkpoints.save(1, state, {})
    jax.block_until_ready(advance(state))
    restored = checkpoints.restore(abstract({'w': jnp.zeros((512, 512))}))
  np.testing.assert_array_equal(restored['w'], before)


def test_the_newest_steps_and_multiples_of_the_period_are_kept(tmp_path):
  with Checkpoints().open(tmp_path) as checkpoints:
    with pytest.raises(ConfigurationError, match='has no checkpoint'):
      checkpoints.restore(abstract(make_state()))
    assert checkpoints.latest_step() is None
  save_steps(tmp_path, 1, 2, 4, 5, 6, keep=2, keep_period=4)
  assert sorted(p.name for p in (tmp_path / 'checkpoints').iterdir()) == ['4', '5', '6']


# Public report google/orbax#526: best steps that push out the newest.
def test_the_steps_of_the_lowest_validation_loss_are_kept(tmp_path):
  losses = {1: 2.5, 2: 2.0, 3: None, 4: 2.2, 5: float('nan'), 6: 'x', 7: 2.7}
  with Checkpoints(keep=1, keep_best=2).open(tmp_path) as checkpoints:
    for step, loss in losses.items():
      checkpoints.save(step, make_state(), {'validation_loss': loss})
  assert sorted(p.name for p in (tmp_path / 'checkpoints').iterdir()) == ['2', '4', '7']


def test_a_best_step_that_cannot_be_read_is_not_deleted(tmp_path, monkeypatch):
  unreadable = set()
  read = DiskFiles.read

  def refuse(files, name):
    if files._place.name in unreadable:
      raise OSError(errno.ESTALE, 'Stale file handle')
    return read(files, name)

  monkeypatch.setattr(DiskFiles, 'read', refuse)
  with Checkpoints(keep=1, keep_best=1).open(tmp_path) as checkpoints:
    for step, loss in {1: 2.0, 2: 2.5, 3: 2.5}.items():
      checkpoints.save(step, make_state(), {'validation_loss': loss})
    checkpoints.wait()
    unreadable.add('1')
    checkpoints.save(4, make_state(), {'validation_loss': 2.5})
    checkpoints.wait()
    assert '1' in {place.name for place in (tmp_path / 'checkpoints').iterdir()}
    with pytest.raises(StorageError, match=r'record of step 1 .* cannot be read: Stale'):
      open_to_read(tmp_path, 'best')
    unreadable.clear()
    checkpoints.save(5, make_state(), {'validation_loss': 2.5})
  assert sorted(place.name for place in (tmp_path / 'checkpoints').iterdir()) == ['1', '5']


@pytest.mark.parametrize('step', [4, 5])
def test_a_step_that_is_not_later_is_refused(tmp_path, step):
  with Checkpoints().open(tmp_path) as checkpoints:
    checkpoints.save(5, make_state(), {'position': 1})
    with pytest.raises(StorageError, match=f'Step {step} cannot be saved .* step 5 is there'):
      checkpoints.save(step, make_state(), {'position': 2})
    assert checkpoints.latest_record() == {'position': 1}


def test_a_checkpoint_of_another_model_is_refused_with_its_leaves_and_kept(tmp_path):
  save_steps(tmp_path, 1)
  expected = abstract(make_state())
  block = expected.params['model/~/block']
  wider = jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=sharding())
  cast = jax.ShapeDtypeStruct((16,), jnp.float32, sharding=sharding())
  with Checkpoints().open(tmp_path) as checkpoints:
    other = expected._replace(params={'model/~/block': {'w': wider, 'b': cast, 'scale': cast}})
    with pytest.raises(ConfigurationError) as refusal:
      checkpoints.restore(other)
    message = str(refusal.value)
    assert 'params/model/~/block/w: found float32[16, 4], expected float32[16, 8]' in message
    assert 'params/model/~/block/b: found bfloat16[16], expected float32[16]' in message
    assert 'params/model/~/block/scale: found nothing, expected float32[16]' in message
    assert '--model_dir' in message
    renamed = expected._replace(params={'model/~/other': block, 'empty': {}})
    with pytest.raises(ConfigurationError, match='model/~/other/w: found nothing'):
      checkpoints.restore(renamed)
    state = checkpoints.restore(expected)
  assert_same_bits(state, make_state())


def test_an_error_of_closing_does_not_hide_the_first_error(tmp_path):
  state = {'w': jax.random.normal(jax.random.key(0), (256, 256))}
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  try:
    with pytest.raises(ZeroDivisionError) as error, Checkpoints().open(tmp_path) as checkpoints:
      resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
      checkpoints.save(1, state, {})
      raise ZeroDivisionError
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  assert 'The last save has failed: step 1' in error.value.__notes__[0]


def test_a_relative_path_is_made_absolute(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with Checkpoints().open('runs/here') as checkpoints:
    monkeypatch.chdir('/')
    checkpoints.save(1, make_state(), {})
  assert (tmp_path / 'runs' / 'here' / 'checkpoints' / '1' / 'state').is_dir()


def test_a_save_says_its_size_and_how_long_the_run_waited(tmp_path):
  lines = []
  with Checkpoints().open(tmp_path, lines.append) as checkpoints:
    checkpoints.save(1, make_state(), {})
  (line,) = lines
  found = re.fullmatch(
    r'saved step 1: ([0-9.]+) MiB in ([0-9.]+) s; the run waited ([0-9.]+) s', line
  )
  assert found and float(found[3]) <= float(found[2]) + 0.1


def test_opening_read_only_writes_nothing(tmp_path):
  with open_to_read(tmp_path / 'none') as checkpoints:
    assert checkpoints.latest_step() is None
    with pytest.raises(StorageError, match='was opened to be read'):
      checkpoints.save(1, make_state(), {})
  assert not os.listdir(tmp_path)


def test_impossible_retention_policies_are_refused():
  with pytest.raises(ConfigurationError, match='keep = 0'):
    Checkpoints(keep=0)
  with pytest.raises(ConfigurationError, match='keep_period = 0'):
    Checkpoints(keep_period=0)
  with pytest.raises(ConfigurationError, match='keep_best = -1'):
    Checkpoints(keep_best=-1)


def test_a_state_that_is_not_finite_is_not_saved(tmp_path):
  state = make_state()
  infinite = state._replace(carry=([], {'s5': jnp.array([1, jnp.nan * 1j])}))
  with Checkpoints().open(tmp_path) as checkpoints:
    checkpoints.save(1, state, {})
    with pytest.raises(Diverged, match=r'step 2 .* in carry/1/s5\. .*/1\. .*=configuration'):
      checkpoints.save(2, infinite, {})
    checkpoints.save(2, state, {})


def test_the_stage_is_save_only_while_the_run_waits_for_a_save(tmp_path, monkeypatch):
  reader, writer = os.pipe()
  monkeypatch.setenv(heartbeat.VARIABLE, heartbeat.address(writer))
  with Checkpoints().open(tmp_path) as checkpoints:
    checkpoints.save(1, make_state(), {})
    checkpoints.save_now(2, make_state(), {})
  os.close(writer)
  with open(reader) as lines:
    stages = [line['stage'] for line in map(json.loads, lines) if 'stage' in line]
  # The first save continues in the background; then the run waits for it, and for the second.
  assert stages == ['save', 'step', 'save', 'save']


def test_orbax_logs_nothing_and_imports_no_tensorflow(tmp_path):
  script = f"""
import sys
from absl import logging
logging.set_verbosity(logging.INFO)
import jax.numpy as jnp
from valkyrie.checkpoint.manager import Checkpoints
with Checkpoints().open({str(tmp_path)!r}) as checkpoints:
  checkpoints.save(1, {{'w': jnp.ones(3)}}, {{}})
  checkpoints.restore({{'w': jnp.ones(3)}})
assert 'tensorflow' not in sys.modules
"""
  done = subprocess.run([sys.executable, '-c', script], capture_output=True, text=True, check=True)
  assert done.stderr + done.stdout == ''


@pytest.mark.parametrize('around', [contextlib.nullcontext, Preemption])
def test_answers_after_a_failed_read_print_no_traceback(monkeypatch, around):
  class Late:
    def __init__(self, message):
      self.message = message

    def __del__(self):
      raise RuntimeError(self.message)

  shown = []
  monkeypatch.setattr(sys, 'unraisablehook', lambda found: shown.append(str(found.exc_value)))
  state_files._hide_closed_loops.cache_clear()
  with around():  # the answers may come after its end
    StateFiles().close()
  Late('Event loop is closed')
  Late('another')
  assert shown == ['another']
  state_files._hide_closed_loops.cache_clear()
