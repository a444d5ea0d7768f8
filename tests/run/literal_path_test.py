"""Paths of runs: whatever a file system allows is taken literally, or refused at the start."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from valkyrie import main
from valkyrie.checkpoint.manager import Checkpoints, open_to_read
from valkyrie.distributed import compilation_cache
from valkyrie.errors import ConfigurationError
from valkyrie.storage.run_directory import opened

NAMES = (
  'lr=[1e-3]', '[!a]', 'a*b', 'a**b', 'a?b', '{a,b}', 'back\\slash', 'gs:', 's3:', '~', '$HOME',
  '100%25', 'a#b', ' a ', 'new\nline', '-dash', 'é', 'e\u0301', '\'"', 'a|b;c&d', '...', 'x' * 255,
  'a.__lock', 'ocdbt.process_0', '1.unfinished', '1', '\x01',
)  # fmt: skip


@pytest.mark.parametrize('name', NAMES)
def test_a_run_is_saved_and_restored_in_a_folder_of_any_name(tmp_path, name):
  run = tmp_path / name / 'run'
  state = {'w': jnp.arange(300.0), 'b': {'c': jnp.ones((2, 3), jnp.bfloat16)}}
  with Checkpoints(patience=0).open(run) as checkpoints:
    checkpoints.save(1, state, {})
  sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  target = jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), state
  )
  with open_to_read(run) as checkpoints:
    restored = checkpoints.restore(target)
  jax.tree.map(np.testing.assert_array_equal, restored, state)
  assert os.listdir(tmp_path) == [name]


def test_a_pattern_finds_no_other_run(tmp_path):
  # Orbax merged what it found in the folders that the path matches.
  other = tmp_path / 'axb' / 'checkpoints' / '1.unfinished' / 'state.orbax-checkpoint-tmp'
  (other / 'ocdbt.process_9').mkdir(parents=True)
  (other / 'ocdbt.process_9' / 'manifest.ocdbt').write_text('of another run')
  with Checkpoints(patience=0).open(tmp_path / 'a?b') as checkpoints:
    checkpoints.save(1, {'w': jnp.arange(300.0)}, {})


@pytest.mark.parametrize(
  'path, message',
  [
    ('a\udcffb', r"contains '\\udcff', but a path must be UTF-8"),
    ('a\0b', r"contains '\\x00', but a path must be UTF-8 without null characters"),
    ('runs/a://b', 'is the address of storage that cannot be used'),
    ('s3://bucket/run', 'only --model_dir may also be in a bucket'),
    ('/'.join(['x' * 250] * 15), 'bytes, but 3,584 are the most'),
  ],
)
def test_a_path_at_which_no_run_can_be_is_refused(tmp_path, monkeypatch, path, message):
  monkeypatch.chdir(tmp_path)
  for use in opened, open_to_read, Checkpoints().open:
    with pytest.raises(ConfigurationError, match=message):
      use(path)
  assert not os.listdir(tmp_path)


def test_such_a_path_ends_a_command_before_gin_is_read(capsys, monkeypatch):
  for mode in main.RUN_MODES:
    flags = ['--output=new'] if mode == 'export' else []
    assert main.main([f'--run_mode={mode}', '--model_dir=a\udcff', *flags]) == 78
    assert 'must be UTF-8' in capsys.readouterr().err


@pytest.mark.parametrize('cache', ['a\udcff', 'gs://bucket/cache'])
def test_a_cache_at_such_a_path_ends_a_command_before_it_trains(
  capsys, monkeypatch, tmp_path, cache
):
  monkeypatch.setenv('VALKYRIE_CACHE', cache)
  assert main.main(['--gin_file=gin/tiny_cpu.gin', f'--model_dir={tmp_path / "run"}']) == 78
  assert 'VALKYRIE_CACHE=' in capsys.readouterr().err
  assert not os.listdir(tmp_path)


def test_programs_are_not_cached_in_a_bucket_by_mistake(monkeypatch):
  name = 'jax_compilation_cache_dir'
  before = getattr(jax.config, name)
  monkeypatch.setenv('VALKYRIE_CACHE', '/gs/bucket')
  jax.config.update(name, None)
  try:
    assert 'jax takes /gs/bucket/compiled' in str(compilation_cache.enable())
  finally:
    jax.config.update(name, before)
  assert not os.path.exists('/gs/bucket')


def test_the_home_is_one_folder_for_all_files_of_a_run(tmp_path, monkeypatch):
  monkeypatch.setenv('HOME', str(tmp_path))
  assert opened('~/run') == str(tmp_path / 'run')
