"""An export takes the memory of the largest array, and appears whole or not at all."""

import contextlib
import errno
import os
import signal
import subprocess
import sys

import gin
import pytest
from safetensors.numpy import load_file

from valkyrie import main
from valkyrie.weights import tensor_writer

ARRAYS = 6
ARRAY_MIB = 48
SHAPE = (4, 1024, 3072)  # layers of a stack in float32
SAVE = """
import sys
import jax.numpy as jnp
from valkyrie.checkpoint.manager import Checkpoints
params = {
  f'model/layers/block_{n}/~/mlp': {'out': jnp.full(%r, n, jnp.float32)} for n in range(%r)
}
with Checkpoints().open(sys.argv[1]) as directory:
  directory.save_now(1, {'params': params}, {'vocabulary': 'bytes', 'feed': {}})
"""
WRITE = """
import pathlib, re, sys
import jax, jax.numpy as jnp
from valkyrie.checkpoint.manager import open_to_read
from valkyrie.checkpoint.stored_arrays import keeping_last
from valkyrie.weights import named_tensors, tensor_writer
target = {
  f'model/layers/block_{n}/~/mlp': {'out': jax.ShapeDtypeStruct(%r, jnp.float32)}
  for n in range(%r)
}
def memory(field):
  return int(re.search(field + r':\\s+(\\d+) kB', open('/proc/self/status').read())[1]) // 1024
with open_to_read(sys.argv[1]) as directory:
  params = keeping_last(directory.restore_evaluated(target, lazily=True))
open('/proc/self/clear_refs', 'w').write('5')  # the peak begins again
before = memory('VmRSS')
tensor_writer.write_folder(pathlib.Path(sys.argv[2]), named_tensors.of_params(params))
print(memory('VmHWM') - before)
"""

READ = """
import pathlib, re, sys
import jax, jax.numpy as jnp
from valkyrie.weights import filled_arrays, named_tensors, tensor_folders
def memory(field):
  return int(re.search(field + r':\\s+(\\d+) kB', open('/proc/self/status').read())[1]) // 1024
params = {
  f'model/layers/block_{n}/~/mlp': {'out': jnp.full(%r, -1, jnp.float32)} for n in range(%r)
}
jax.block_until_ready(params)  # so that `before` counts them
tensors = tensor_folders.in_files(pathlib.Path(sys.argv[1])).tensors
open('/proc/self/clear_refs', 'w').write('5')
before = memory('VmRSS')
for leaf in named_tensors.leaves(params):
  old = params[leaf.module][leaf.name]
  chosen = [tensors[name] for name in leaf.tensors]
  params[leaf.module][leaf.name] = filled_arrays.filled(old, chosen, leaf.stacked)
  old.delete()
for n, group in enumerate(params.values()):
  assert (group['out'][:, :2] == n).all()
print(memory('VmHWM') - before)
"""


def child(program, *arguments):
  """The output of a program with one device, as a user's."""
  flags = {'XLA_FLAGS': '', 'PYTHONPATH': os.pathsep.join(sys.path)}
  command = [sys.executable, '-c', program % (SHAPE, ARRAYS), *map(str, arguments)]
  return subprocess.run(
    command, env={**os.environ, **flags}, check=True, capture_output=True, text=True
  ).stdout


@pytest.mark.skipif(not os.path.exists('/proc/self/clear_refs'), reason='only Linux resets a peak')
def test_the_memory_is_that_of_a_few_arrays(tmp_path):
  child(SAVE, tmp_path / 'run')
  (tmp_path / 'out').mkdir()
  used = int(child(WRITE, tmp_path / 'run', tmp_path / 'out'))
  size = (tmp_path / 'out' / 'model.safetensors').stat().st_size
  assert size > ARRAYS * ARRAY_MIB * 2**20
  assert used < 2.5 * ARRAY_MIB + 32  # as docs/export.md says, and blocks of 16 MiB
  assert int(child(READ, tmp_path / 'out')) < 2.5 * ARRAY_MIB + 32
  found = load_file(tmp_path / 'out' / 'model.safetensors')
  assert len(found) == ARRAYS * 4
  for name, array in found.items():
    layer = int(name.split('.')[1])
    assert array.shape == SHAPE[1:] and (array == layer % ARRAYS).all()


def export(run, folder):
  gin.clear_config(clear_constants=True)
  return main.main([f'--model_dir={run}', '--run_mode=export', f'--output={folder / "out"}'])


KILLED = """
import os, signal, sys
from valkyrie import main
from valkyrie.weights import tensor_writer
put = tensor_writer._put
def killed(file, content, place):
  put(file, content, place)
  if place > 10_000:
    os.kill(os.getpid(), signal.SIGKILL)
tensor_writer._put = killed
main.main(sys.argv[1:])
"""


def test_an_interrupted_export_leaves_nothing_under_its_name(
  trained, tmp_path, monkeypatch, capsys
):
  run = trained[1]
  arguments = [f'--model_dir={run}', '--run_mode=export', f'--output={tmp_path / "out"}']
  process = subprocess.run([sys.executable, '-c', KILLED, *arguments], check=False)
  assert process.returncode == -signal.SIGKILL
  litter = [*tmp_path.iterdir()]
  assert len(litter) == 1 and litter[0].name.startswith('.out.')

  put = tensor_writer._put

  def interrupted(file, content, place):
    put(file, content, place)
    if place > 10_000:
      raise KeyboardInterrupt

  def full(file, content, place):
    if place > 10_000:
      raise OSError(errno.ENOSPC, 'No space left on device')
    put(file, content, place)

  monkeypatch.setattr(tensor_writer, '_put', interrupted)
  with contextlib.suppress(KeyboardInterrupt):
    assert export(run, tmp_path) != 0
  assert not [*tmp_path.iterdir()]  # also what the killed export has left
  monkeypatch.setattr(tensor_writer, '_put', full)
  assert export(run, tmp_path) == 74
  assert 'No space left on device' in capsys.readouterr().err
  assert not [*tmp_path.iterdir()]
  monkeypatch.setattr(tensor_writer, '_put', put)
  assert export(run, tmp_path) == 0
  assert (tmp_path / 'out' / 'model.safetensors').exists()
