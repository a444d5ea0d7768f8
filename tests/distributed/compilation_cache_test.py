"""Programs of earlier runs: found again, private, and used only unchanged."""

import math
import os
import pathlib
import stat
import subprocess
import sys
import time
from typing import Any

from held_ports import held_port
import jax
import jax.numpy as jnp
import pytest

from valkyrie.distributed import compilation_cache

SCRIPT = """
import jax
import jax.numpy as jnp
from jax._src import monitoring
from valkyrie.distributed import compilation_cache

hits = []
monitoring.register_event_listener(lambda name, **_: hits.append(name))
print(compilation_cache.enable())
jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)
x = jnp.ones((8, 8))
jax.jit(lambda x: jnp.tanh(x @ x) + jnp.linalg.inv(x + jnp.eye(8)))(x).block_until_ready()
print(hits.count('/jax/compilation_cache/cache_hits'))
"""

SCRIPT_OF_TWO = """
import sys
from typing import Any
import jax
import jax.numpy as jnp
from valkyrie.distributed import compilation_cache, processes
from valkyrie.distributed.consistency import fingerprint

address, process, may_compile = sys.argv[1:]
processes.join(processes.member(address, '2', int(process)), 60)
assert compilation_cache.enable() is None
compilation_cache._LEAST_SECONDS = 0
mesh = jax.make_mesh((2,), ('rows',), (jax.sharding.AxisType.Auto,))
split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('rows'))
x = jax.make_array_from_callback((8, 8), split, lambda at: jnp.arange(64.0).reshape(8, 8)[at])
step = jax.jit(lambda x: (jnp.tanh(x) * 2, x.sum()), donate_argnums=0)
lowered = step.lower(x)
if may_compile == 'no':
  lowered.compile = None
try:
  program, _ = compilation_cache.compiled(lowered, mesh.devices.flatten().tolist())
except TypeError:
  program = step
new, total = program(x)
where = 'compiled anew' if program is step else fingerprint(program)
print(where, float(total), float(new.addressable_data(0).sum()), x.is_deleted())
compilation_cache.seal()
processes.exchange('done', '')
processes.end(0)
"""


@pytest.fixture
def start(tmp_path):
  """Compiles in a new process -> (what `enable` said, the programs found)."""

  def run(**environment):
    found = subprocess.run(
      [sys.executable, '-c', SCRIPT],
      env={
        **os.environ,
        'VALKYRIE_CACHE': str(tmp_path),
        'JAX_COMPILATION_CACHE_DIR': '',
        **environment,
      },
      cwd=pathlib.Path(__file__).parents[2],
      capture_output=True,
      text=True,
      check=False,
    )
    assert found.returncode == 0, found.stderr
    said, hits = found.stdout.splitlines()
    return said, int(hits)

  return run


def programs(tmp_path):
  return sorted(tmp_path.glob('compiled/*/*-cache'))


def test_a_program_is_compiled_once(start, tmp_path):
  assert start() == ('None', 0)
  found = programs(tmp_path)
  assert found and all(file.with_name(f'{file.name}.sha256').exists() for file in found)
  for folder in (tmp_path / 'compiled', found[0].parent):
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
  assert start() == ('None', len(found))
  assert start(JAX_ENABLE_COMPILATION_CACHE='false') == ('None', 0)
  other = tmp_path / 'other'
  assert start(JAX_COMPILATION_CACHE_DIR=str(other))[1] == 0 and list(other.iterdir())


def test_a_changed_or_unsealed_program_is_not_used(start, tmp_path):
  start()
  found = programs(tmp_path)
  assert len(found) >= 3
  for number, file in enumerate(found):
    hashed = file.with_name(f'{file.name}.sha256')
    if number % 3 == 0:
      content = bytearray(file.read_bytes())
      content[len(content) // 2] ^= 1
      file.write_bytes(content)
    elif number % 3 == 1:
      hashed.unlink()
    else:  # the first is then no UTF-8
      bit = 1 << 7 - number // 3 % 8
      hashed.write_bytes(bytes([hashed.read_bytes()[0] ^ bit]) + hashed.read_bytes()[1:])
  assert start() == ('None', 0)
  assert start() == ('None', len(found))


def test_an_open_directory_is_closed_and_one_that_cannot_be_is_not_used(start, tmp_path):
  (tmp_path / 'compiled').mkdir(mode=0o777)
  (tmp_path / 'compiled').chmod(0o777)
  assert start()[0] == 'None'
  assert stat.S_IMODE((tmp_path / 'compiled').stat().st_mode) == 0o700
  linked = tmp_path / 'linked'
  linked.mkdir()
  (linked / 'compiled').symlink_to(tmp_path / 'compiled')
  said, hits = start(VALKYRIE_CACHE=str(linked))
  assert hits == 0 and said == (
    f'compiled programs are not kept: {linked / "compiled"} belongs to another user'
  )
  (tmp_path / 'file').write_text('')
  said, _ = start(VALKYRIE_CACHE=str(tmp_path / 'file'))
  assert said.startswith('compiled programs are not kept: ') and said.endswith('Not a directory')


def test_programs_that_another_process_deletes_meanwhile_do_not_matter(tmp_path, monkeypatch):
  for name in 'ab':
    (tmp_path / f'{name}-cache').write_bytes(b'damaged')
  listed = pathlib.Path.glob

  def delete_what_was_listed(directory, pattern):
    for file in [*listed(directory, pattern)]:
      file.unlink()
      yield file

  monkeypatch.setattr(pathlib.Path, 'glob', delete_what_was_listed)
  compilation_cache._clean(tmp_path)
  assert not [*tmp_path.iterdir()]


def test_a_start_leaves_alone_what_another_one_has_not_sealed_yet(start, tmp_path):
  program = SCRIPT.replace('print(hits', 'print("compiled", flush=True)\ninput()\nprint(hits')
  environment = {'JAX_COMPILATION_CACHE_DIR': '', 'VALKYRIE_CACHE': str(tmp_path)}
  with subprocess.Popen(
    [sys.executable, '-c', program.replace('tanh', 'sinh')],
    env={**os.environ, **environment},
    cwd=pathlib.Path(__file__).parents[2],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  ) as first:
    assert first.stdout is not None
    assert [first.stdout.readline() for _ in range(2)] == ['None\n', 'compiled\n']
    made = {file: file.stat().st_ino for file in programs(tmp_path)}
    assert made and not [*tmp_path.glob('compiled/*/*.sha256')]
    start()
    assert made.items() <= {file: file.stat().st_ino for file in programs(tmp_path)}.items()
    first.communicate('\n')
  assert not [*tmp_path.glob('compiled/*/.start*')]


def test_the_programs_of_a_killed_start_are_removed_by_the_next(start, tmp_path):
  program = f'{SCRIPT}\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)'
  environment = {'JAX_COMPILATION_CACHE_DIR': '', 'VALKYRIE_CACHE': str(tmp_path)}
  subprocess.run(
    [sys.executable, '-c', program],
    env={**os.environ, **environment},
    cwd=pathlib.Path(__file__).parents[2],
    check=False,
  )
  (left,) = tmp_path.glob('compiled/*/.start*')
  assert left.is_dir() and programs(tmp_path)
  assert start() == ('None', 0)
  assert not [*tmp_path.glob('compiled/*/.start*')]


@pytest.mark.skipif(os.geteuid() != 0, reason='only root can give a directory away')
def test_a_directory_of_another_user_is_not_used(start, tmp_path):
  start()
  os.chown(programs(tmp_path)[0].parent, 12345, -1)
  said, hits = start()
  assert hits == 0 and said.endswith('belongs to another user')


def test_the_programs_of_other_processes_are_kept_too(tmp_path):
  def start(may_compile):
    address = f'127.0.0.1:{held_port()}'
    flags = os.environ.get('XLA_FLAGS', '') + ' --xla_force_host_platform_device_count=1'
    environment = {'JAX_COMPILATION_CACHE_DIR': '', 'VALKYRIE_CACHE': str(tmp_path)}
    both = [
      subprocess.Popen(
        [sys.executable, '-c', SCRIPT_OF_TWO, address, str(process), may_compile[process]],
        env={**os.environ, 'XLA_FLAGS': flags, **environment},
        cwd=pathlib.Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
      )
      for process in range(2)
    ]
    said = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    # Above it stands a line of the library that connects the processes.
    return [text.splitlines()[-1] for text, _ in said], [errors for _, errors in said]

  first, errors = start(('yes', 'yes'))
  assert all(line.split()[1] == '2016.0' and line.endswith('True') for line in first), errors
  (kept,) = tmp_path.glob('compiled/*/process-*-cache')
  second, errors = start(('yes', 'no'))
  assert second == first, errors
  kept.write_bytes(kept.read_bytes()[:-1])
  second, errors = start(('yes', 'no'))
  assert 'compiled anew' in second[1], errors


@pytest.fixture
def cache(tmp_path, monkeypatch):
  """The folder of programs, which this process uses during the test."""
  name = 'jax_compilation_cache_dir'
  before = getattr(jax.config, name)
  monkeypatch.setenv('VALKYRIE_CACHE', str(tmp_path))
  jax.config.update(name, None)
  yield tmp_path / 'compiled'
  jax.config.update(name, before)


def test_a_precompiled_program_is_used_and_says_what_it_took(cache):
  # No run of the suite has this program in its cache: one that was read from there cannot be kept.
  scale = 2 + time.time_ns() % 1_000_000 * 1e-9
  step = jax.jit(lambda x: (jnp.tanh(x) * scale, x.sum()), donate_argnums=0)
  x, devices = jnp.arange(8.0), jax.devices()[:1]
  lowered = step.lower(x)
  kept = pathlib.Path(compilation_cache.keep(lowered.compile(), lowered, devices, 12.34))
  assert kept.parent == cache / 'precompiled' and stat.S_IMODE(kept.parent.stat().st_mode) == 0o700
  assert compilation_cache.enable() is None

  def found(x):
    again: Any = step.lower(x)
    again.compile = lambda: 'compiled anew'
    return compilation_cache.compiled(again, devices)

  program, seconds = found(x)
  new, total = program(x)
  assert seconds == 12.3 and float(total) == 28 and x.is_deleted()
  assert float(new[1]) == pytest.approx(scale * math.tanh(1))
  assert found(jnp.arange(9.0)) == ('compiled anew', None)  # another program
  kept.write_bytes(kept.read_bytes()[:-9])
  assert found(jnp.arange(8.0)) == ('compiled anew', None)  # cut off after it was checked
  assert compilation_cache.keep(lowered.compile(), lowered, devices, 1.0).startswith(
    'compiled programs are not'
  )


def test_a_precompiled_program_that_changed_is_deleted(cache):
  lowered, devices = jax.jit(jnp.tanh).lower(jnp.arange(8.0)), jax.devices()[:1]
  kept = pathlib.Path(compilation_cache.keep(lowered.compile(), lowered, devices, 1.0))
  content = bytearray(kept.read_bytes())
  content[len(content) // 2] ^= 1
  kept.write_bytes(content)
  assert compilation_cache.enable() is None and not kept.exists()
