"""Growth of a process that saves and restores: `python -m faults.growth FOLDER TIMES`.

A process of its own, so that nothing but saves and restores can grow it.
"""

import contextlib
import ctypes
import gc
import json
import os
import pathlib
import resource
import sys
import threading

import jax

from valkyrie.checkpoint.manager import Checkpoints

FIRST = 10  # saves that fill caches


def growth(run: pathlib.Path, times: int) -> dict[str, int]:
  """The growth in files, threads, steps and KiB between the first saves and the last one."""
  state = {'w': jax.random.normal(jax.random.key(0), (512, 512)), 'n': jax.numpy.int32(3)}
  target = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
  )
  before = {}
  with Checkpoints(keep=2).open(run) as checkpoints:
    for step in range(1, FIRST + times + 1):
      checkpoints.save(step, state, {'step': step})
      checkpoints.wait()
      checkpoints.restore(target)
      if step == FIRST:
        before = _in_use(run)
    after = _in_use(run)
  return {name: after[name] - before[name] for name in after}


def _in_use(run: pathlib.Path) -> dict[str, int]:
  gc.collect()
  with contextlib.suppress(AttributeError):  # only glibc has it
    ctypes.CDLL(None).malloc_trim(0)
  pages = int(pathlib.Path('/proc/self/statm').read_text().split()[1])
  return {
    'files': len(os.listdir('/proc/self/fd')),
    'threads': threading.active_count(),
    'steps': len(list((run / 'checkpoints').iterdir())),
    'KiB': pages * resource.getpagesize() // 1024,
  }


if __name__ == '__main__':
  print(json.dumps(growth(pathlib.Path(sys.argv[1]), int(sys.argv[2]))))
