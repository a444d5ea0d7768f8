"""Programs of earlier runs: found again, private, and used only unchanged."""

import os
import pathlib
import stat
import subprocess
import sys

import pytest

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


@pytest.fixture
def start(tmp_path):
  """Compiles in a new process -> (what `enable` said, the programs found)."""

  def run(**environment):
    found = subprocess.run(
      [sys.executable, '-c', SCRIPT],
      env={
        **os.environ,
        'VALKYRIE_CACHE': str(tmp_path),
        'JAX_ENABLE_COMPILATION_CACHE': 'true',
        **environment,
      },
      cwd=pathlib.Path(__file__).parents[1],
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
  for file in found[::2]:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
  for file in found[1::2]:
    file.with_name(f'{file.name}.sha256').unlink()
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


@pytest.mark.skipif(os.geteuid() != 0, reason='only root can give a directory away')
def test_a_directory_of_another_user_is_not_used(start, tmp_path):
  start()
  os.chown(programs(tmp_path)[0].parent, 12345, -1)
  said, hits = start()
  assert hits == 0 and said.endswith('belongs to another user')
