"""Hooks that kill their run at a point of a commit, or let commits fail."""

import errno
import os
import pathlib
import signal

import gin
from orbax.checkpoint._src.serialization import ocdbt_utils

from faults import spoiled_arrays
from valkyrie.checkpoint import manifest, steps
from valkyrie.checkpoint.steps import DiskSteps

_write_manifest = steps.write_manifest


def _half_a_manifest(place, step):
  _write_manifest(place, step)
  file = place / manifest.name(manifest.SHA256)
  os.truncate(file, file.stat().st_size // 2)


def _is_of_the_run(directory):
  return directory.name == 'checkpoints'


def _half_of_a_step(place, *_):
  if '.deleted-' not in place.name:
    return False
  next(path for path in sorted(place.rglob('*')) if path.is_file()).unlink()
  return True


# Points of a commit: (step, module or class, function to replace, action before the kill). The
# process is not killed if the action returns False.
MOMENTS = {
  'before the arrays': (8, DiskSteps, 'begin', lambda *_: True),
  'before the manifest': (8, steps, 'write_manifest', lambda *_: True),
  'with half a manifest': (8, steps, 'write_manifest', _half_a_manifest),
  'with a manifest and no number': (8, steps, 'write_manifest', _write_manifest),
  'before the new number is flushed': (8, steps, 'sync', _is_of_the_run),
  'before an old step is deleted': (16, DiskSteps, 'delete', lambda *_: True),
  'while an old step is deleted': (16, steps.owned, 'delete_recorded', _half_of_a_step),
}


@gin.configurable
class KillIn:
  """Kills the process at a point of a commit, unless the file `once` exists."""

  def __init__(self, moment, once):
    self._once = pathlib.Path(once)
    self._at, self._module, self._name, self._prepare = MOMENTS[moment]

  def __call__(self, step, state, metrics):
    if step != self._at - 1 or self._once.exists():
      return
    self._once.touch()
    original = getattr(self._module, self._name)

    def kill(*args, **kwargs):
      if self._prepare(*args) is False:
        return original(*args, **kwargs)
      os.kill(os.getpid(), signal.SIGKILL)

    setattr(self._module, self._name, kill)


@gin.configurable
class FailSaves:
  """Lets the first saves of a process fail as a broken disk would."""

  def __init__(self, times):
    self._left = times
    sync = steps.sync

    def fail(path):
      if self._left and _is_of_the_run(path):
        self._left -= 1
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
      sync(path)

    steps.sync = fail

  def __call__(self, step, state, metrics):
    pass


@gin.configurable
class SpoilSave:
  """Lets Orbax lose something of the first save of a process, see `spoiled_arrays.LOST`."""

  def __init__(self, lost):
    ocdbt_utils.merge_ocdbt_per_process_files = spoiled_arrays.losing(lost)

  def __call__(self, step, state, metrics):
    pass
