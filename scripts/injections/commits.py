"""Hooks that kill their run at a point of a commit, or let commits fail."""

import errno
import os
import pathlib
import signal

import gin

from valkyrie.checkpoint import manifest, steps

_write_manifest = manifest.write


def _half_a_manifest(place, step):
  _write_manifest(place, step)
  size = (place / manifest.NAME).stat().st_size
  os.truncate(place / manifest.NAME, size // 2)


def _is_of_the_run(directory):
  return directory.name == 'checkpoints'


def _half_of_a_step(place):
  if place.suffix != '.deleted':
    return False
  next(path for path in sorted(place.rglob('*')) if path.is_file()).unlink()
  return True


# Points of a commit: (step, module, function that is replaced, action before the kill). The process
# is not killed if the action returns False.
MOMENTS = {
  'before the arrays': (8, steps, 'begin', lambda *_: True),
  'before the manifest': (8, manifest, 'write', lambda *_: True),
  'with half a manifest': (8, manifest, 'write', _half_a_manifest),
  'with a manifest and no number': (8, manifest, 'write', _write_manifest),
  'before the new number is flushed': (8, manifest, 'sync_directory', _is_of_the_run),
  'before an old step is deleted': (16, steps, 'delete', lambda *_: True),
  'while an old step is deleted': (16, steps.shutil, 'rmtree', _half_of_a_step),
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
    sync = manifest.sync_directory

    def fail(path):
      if self._left and _is_of_the_run(path):
        self._left -= 1
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
      sync(path)

    manifest.sync_directory = fail

  def __call__(self, step, state, metrics):
    pass
