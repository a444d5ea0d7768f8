"""Too little memory is said before a step, and after it, with what the step takes."""

import contextlib
import os
import resource

import jax
import jax.numpy as jnp
import pytest

from valkyrie.errors import ConfigurationError
from valkyrie.monitoring import memory

GIB = 2**30


@contextlib.contextmanager
def one_gib_left():
  """An address space of one GiB more than this process has."""
  before = resource.getrlimit(resource.RLIMIT_AS)
  size = memory.of_process('VmSize')
  if size is None:
    pytest.skip('only Linux tells the size of a process')
  resource.setrlimit(resource.RLIMIT_AS, (size + GIB, before[1]))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_AS, before)


def test_the_room_is_that_of_the_smallest_limit():
  with one_gib_left():
    room = memory.room()
  assert 0 < room.left <= GIB and 'ulimit -v' in room.limit


@pytest.mark.parametrize('files', [('memory.max', 'memory.current'),
                                   ('memory.limit_in_bytes', 'memory.usage_in_bytes')])  # fmt: skip
def test_a_cgroup_limits_what_its_cache_leaves(tmp_path, monkeypatch, files):
  if not os.path.exists('/proc/self/cgroup'):
    pytest.skip('only Linux has cgroups')
  for folder in (tmp_path, tmp_path / 'memory'):
    folder.mkdir(exist_ok=True)
    for name, content in zip((*files, 'memory.stat'), ('9000', '8500', 'inactive_file 100\nx 1\n'),
                             strict=True):  # fmt: skip
      (folder / name).write_text(content)
  monkeypatch.setattr(memory, '_CGROUPS', tmp_path)
  assert memory.room() == (600, 'a cgroup of 8.8 KiB')
  for folder in (tmp_path, tmp_path / 'memory'):
    (folder / files[0]).write_text('max')
  assert memory.room().left > 9000


def test_a_step_that_does_not_fit_is_said_before_it_runs():
  large, small = (jax.jit(lambda n=n: jnp.zeros(n)).lower().compile() for n in (2**29, 2**20))
  with one_gib_left():
    warning, nothing = memory.shortage(large, 3) or '', memory.shortage(small, 3)
  assert 'takes 6.0 GiB more of memory, but' in warning
  assert 'the run may be killed' in warning and 'ulimit -v' in warning
  assert nothing is None


def test_memory_that_runs_out_is_explained():
  with (
    pytest.raises(ConfigurationError) as found,
    memory.explained(lambda: 'a step takes 9 B'),
  ):
    try:
      jnp.zeros(2**46).block_until_ready()
    except jax.errors.JaxRuntimeError as error:
      error.add_note('nothing was saved')
      raise
  message = str(found.value)
  assert 'The memory is too small for this run: RESOURCE_EXHAUSTED' in message
  assert 'a step takes 9 B; memory of this process: ' in message and ' left of ' in message
  assert found.value.__notes__ == ['nothing was saved']
  with pytest.raises(ConfigurationError, match='MemoryError'), memory.explained(str):
    raise MemoryError
  with pytest.raises(jax.errors.JaxRuntimeError), memory.explained(str):
    raise jax.errors.JaxRuntimeError('INTERNAL: something else')
