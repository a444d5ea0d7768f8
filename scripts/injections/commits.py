"""A run that kills itself in a phase of a commit."""

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


def _is_of_all_steps(directory):
  return directory.name == 'checkpoints'


def _half_of_a_step(place):
  if place.suffix != '.deleted':
    return False
  next(path for path in sorted(place.rglob('*')) if path.is_file()).unlink()
  return True


# The phases of a commit: at which step, in the place of which function, and what is done before the
# process dies; where that is False it lives on.
MOMENTS = {
  'before the arrays': (8, steps, 'begin', lambda *_: True),
  'before the manifest': (8, manifest, 'write', lambda *_: True),
  'with half a manifest': (8, manifest, 'write', _half_a_manifest),
  'with a manifest and no number': (8, manifest, 'write', _write_manifest),
  'with a number that is not flushed': (8, manifest, 'sync_directory', _is_of_all_steps),
  'before an old step goes': (16, steps, 'delete', lambda *_: True),
  'with an old step half gone': (16, steps.shutil, 'rmtree', _half_of_a_step),
}


@gin.configurable
class DieIn:
  """Kills the process in a phase of a commit."""

  def __init__(self, moment, once):
    self._once = pathlib.Path(once)
    self._at, self._place, self._name, self._last = MOMENTS[moment]

  def __call__(self, step, state, metrics):
    if step != self._at - 1 or self._once.exists():
      return
    self._once.touch()
    original = getattr(self._place, self._name)

    def die(*args, **kwargs):
      if self._last(*args) is False:
        return original(*args, **kwargs)
      os.kill(os.getpid(), signal.SIGKILL)

    setattr(self._place, self._name, die)
