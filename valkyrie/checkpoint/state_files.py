"""Files of a train state, written and read by Orbax.

Orbax and tensorstore do not take every path of a file system literally. They read `*`, `?` and `[`
as a pattern, a backslash as a slash, and `gs:` or a folder /gs, /s3, /az or /hf of this machine as
a bucket. A path through a file descriptor has no such characters.
"""

from collections.abc import Iterator
import contextlib
import errno
import functools
import logging
import os
import pathlib
import re
import sys
from typing import Any

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from valkyrie.checkpoint import state_check
from valkyrie.errors import StorageError, ValkyrieError, storage_errors
from valkyrie.storage.bucket import is_bucket
from valkyrie.types import leaf_path

_DESCRIPTORS = '/proc/self/fd'  # of Linux; elsewhere the path itself is used

# Tensorstore reports errors of files as ValueError and RuntimeError.
checkpoint_errors = functools.partial(storage_errors, also=(ValueError, RuntimeError))


@contextlib.contextmanager
def _readable(place: pathlib.Path) -> Iterator[None]:
  """Raises a StorageError for any error inside: Orbax does not validate the files it reads."""
  try:
    yield
  except ValkyrieError:
    raise
  except Exception as error:
    raise StorageError(
      f'{place} matches its manifest, but cannot be read ({_reason(error)}). Use the versions of '
      'record.json there, restore the step from a copy, or move it away to continue from the one '
      'before.'
    ) from error


def _reason(error: Exception) -> str:
  cause = error.__cause__ or error  # more specific if Orbax has wrapped it
  return without_descriptors(f'{type(cause).__name__}: {cause}'.splitlines()[0])[:300]


class StateFiles:
  """Writes one state at a time in the background; each process writes the shards of its devices."""

  def __init__(self):
    _hide_closed_loops()
    logging.getLogger('absl').addFilter(_is_shown)
    # With named processes Orbax uses no collective of the devices as its barrier. Collectives must
    # be dispatched in the same order by all processes, which a separate thread cannot guarantee.
    processes = ocp.options.MultiprocessingOptions(
      active_processes=set(range(jax.process_count())) if jax.process_count() > 1 else None
    )
    self._handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=processes)
    self._orbax = ocp.AsyncCheckpointer(self._handler, multiprocessing_options=processes)
    # Of the state that is written: its path for Orbax, valid as long as its folder is open; leaves.
    self._path: Any = None
    self._folder = contextlib.ExitStack()
    self._written: dict[str, jax.ShapeDtypeStruct] = {}
    self._pieces: list[state_check.Piece] = []
    self._is_first = True  # no state was compared yet

  def write(self, place: pathlib.Path, state: Any) -> None:
    """Copies a pytree of jax arrays to the host, and starts to write it."""
    item = _without_empty_arrays(state)
    leaves = jax.tree_util.tree_leaves_with_path(_shapes(item))
    self._written = {leaf_path(path): leaf for path, leaf in leaves}
    self._pieces = state_check.pieces(item) if self._is_first else []
    self._folder.close()
    with _of_clients():
      self._path = self._folder.enter_context(literal(place))
      self._orbax.save(self._path, args=ocp.args.PyTreeSave(item))

  def wait(self) -> None:
    """Waits until the state is written; raises the error of the write."""
    with _of_clients():
      self._orbax.wait_until_finished()

  def finish(self) -> None:
    """Waits until the state is written, and opens its arrays, in process 0.

    For the first state, every process also reads back the values that it has written.

    Raises:
      OSError: the arrays cannot be opened, or differ.
    """
    self.wait()
    if jax.process_index() != 0 and not self._pieces:
      return
    try:
      arrays = state_check.opened(self._path)
      found = {
        leaf: jax.ShapeDtypeStruct(array.shape, array.dtype.numpy_dtype)
        for leaf, array in arrays.items()
      }
      different = state_check.differences(found, self._written)
      different = different or state_check.changed(arrays, self._pieces)
    except Exception as error:  # Orbax does not validate the files it reads
      reason = f'what was written cannot be opened ({_reason(error)})'
      raise OSError(errno.EIO, reason) from error
    if different:
      raise OSError(errno.EIO, f'what was written differs in {"; ".join(different)}')
    self._is_first = False

  def read(self, place: pathlib.Path, target: Any, partial: bool) -> Any:
    """Reads the state in the directory `place`; otherwise like `CheckpointDirectory.restore`."""
    with _readable(place), literal(place) as path:
      item = _without_empty_arrays(target)
      state_check.check_same_model(place.parent, _shapes(dict(self._metadata(path))), item, partial)
      restore_args = ocp.checkpoint_utils.construct_restore_args(item)
      args = ocp.args.PyTreeRestore(item, restore_args=restore_args, partial_restore=partial)
      restored = self._orbax.restore(path, args=args)

    def with_empty_arrays(leaf: jax.ShapeDtypeStruct, found: Any) -> Any:
      return found if leaf.size else jnp.zeros_like(leaf, device=leaf.sharding)

    return jax.tree.map(with_empty_arrays, target, restored)

  def fields(self, place: pathlib.Path) -> set[str]:
    """The fields of a state that have arrays."""
    with _readable(place), literal(place) as path:
      return {name for name, tree in dict(self._metadata(path)).items() if jax.tree.leaves(tree)}

  def read_to_host(self, place: pathlib.Path, field: str) -> Any:
    """Reads a field of a state of any model to the host."""
    with _readable(place), literal(place) as path:
      shapes = {field: _shapes(self._metadata(path)[field])}
      to_host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), shapes)
      args = ocp.args.PyTreeRestore(shapes, restore_args=to_host, partial_restore=True)
      return self._orbax.restore(path, args=args)[field]

  def _metadata(self, path: Any) -> Any:
    """The metadata of the stored arrays; Orbax opens each array to read it."""
    return self._handler.metadata(path).tree

  def close(self) -> None:
    """Ends the threads of Orbax."""
    self._orbax.close()
    self._folder.close()


@contextlib.contextmanager
def literal(place: Any) -> Iterator[epath.Path]:
  """A path to `place`, CHECKPOINTS/STEP/NAME, that is valid inside the context.

  Raises:
    OSError: the folder CHECKPOINTS cannot be opened.
  """
  if is_bucket(place) or not os.path.isdir(_DESCRIPTORS):
    yield epath.Path(place)
    return
  # The folder of the steps, since the other hosts may not see the folder of a new step yet.
  folder = place.parent.parent
  descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
  try:
    yield epath.Path(_DESCRIPTORS) / str(descriptor) / pathlib.Path(place).relative_to(folder)
  finally:
    os.close(descriptor)


def without_descriptors(message: str) -> str:
  """A message of Orbax or tensorstore with paths relative to the folder of the steps."""
  return re.sub(rf'{_DESCRIPTORS}/\d+/', '', message)


def _shapes(tree: Any) -> Any:
  return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


@contextlib.contextmanager
def _of_clients() -> Iterator[None]:
  """Converts bucket-client exceptions raised in the block to OSError; some are not OSErrors."""
  try:
    yield
  except Exception as error:
    if type(error).__module__.partition('.')[0] in ('aiohttp', 'gcsfs', 'google', 'requests'):
      raise OSError(errno.EIO, str(error)) from error
    raise


def _without_empty_arrays(tree: Any) -> Any:
  """Replaces arrays without elements, which Orbax refuses to save, by None."""
  return jax.tree.map(lambda leaf: leaf if leaf.size else None, tree)


@functools.cache
def _hide_closed_loops() -> None:
  """Silences tensorstore's 'Event loop is closed'.

  It is raised when a reply arrives after Orbax has already failed for another reason.
  """
  others = sys.unraisablehook

  def show(unraisable: Any) -> None:
    if str(unraisable.exc_value) != 'Event loop is closed':
      others(unraisable)

  sys.unraisablehook = show


def _is_shown(record: logging.LogRecord) -> bool:
  """False for all of Orbax's log messages except warnings.

  Orbax logs a dozen lines for each save, and four stacks for an error that it also raises.
  """
  return record.levelno == logging.WARNING or '/orbax/' not in record.pathname
