"""Files of a train state, written and read by Orbax."""

from collections.abc import Iterator
import contextlib
import errno
import functools
import logging
import pathlib
import sys
from typing import Any

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from valkyrie.checkpoint.state_check import check_same_model
from valkyrie.errors import StorageError, ValkyrieError, storage_errors

# Tensorstore reports errors of files as ValueError and RuntimeError.
checkpoint_errors = functools.partial(storage_errors, also=(ValueError, RuntimeError))


@contextlib.contextmanager
def _readable(place: pathlib.Path) -> Iterator[None]:
  """Raises a StorageError for any error inside: Orbax checks the form of no file."""
  try:
    yield
  except ValkyrieError:
    raise
  except Exception as error:
    cause = error.__cause__ or error  # which says more where Orbax has wrapped it
    reason = f'{type(cause).__name__}: {cause}'.splitlines()[0]
    raise StorageError(
      f'{place} matches its manifest, but cannot be read ({reason:.300}). Use the versions of '
      'record.json there, restore the step from a copy, or move it away to continue from the one '
      'before.'
    ) from error


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

  def write(self, place: pathlib.Path, state: Any) -> None:
    """Copies a pytree of jax arrays to the host, and starts to write it."""
    with _of_clients():
      self._orbax.save(place, args=ocp.args.PyTreeSave(_without_empty_arrays(state)))

  def wait(self) -> None:
    """Waits until the state is written; raises the error of the write."""
    with _of_clients():
      self._orbax.wait_until_finished()

  def read(self, place: pathlib.Path, target: Any, partial: bool) -> Any:
    """Reads the state in the directory `place`; otherwise like `CheckpointDirectory.restore`."""
    with _readable(place):
      item = _without_empty_arrays(target)
      check_same_model(place.parent, self._stored(place), item, partial)
      restore_args = ocp.checkpoint_utils.construct_restore_args(item)
      args = ocp.args.PyTreeRestore(item, restore_args=restore_args, partial_restore=partial)
      restored = self._orbax.restore(place, args=args)

    def with_empty_arrays(leaf: jax.ShapeDtypeStruct, found: Any) -> Any:
      return found if leaf.size else jnp.zeros_like(leaf, device=leaf.sharding)

    return jax.tree.map(with_empty_arrays, target, restored)

  def fields(self, place: pathlib.Path) -> set[str]:
    """The fields of a state that have arrays."""
    return {name for name, tree in self._stored(place).items() if jax.tree.leaves(tree)}

  def read_to_host(self, place: pathlib.Path, field: str) -> Any:
    """Reads a field of a state, of whatever model, to the host."""
    with _readable(place):
      shapes = {field: self._stored(place)[field]}
      to_host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), shapes)
      args = ocp.args.PyTreeRestore(shapes, restore_args=to_host, partial_restore=True)
      return self._orbax.restore(place, args=args)[field]

  def _stored(self, place: pathlib.Path) -> Any:
    """The shapes and dtypes of the stored arrays."""
    with _readable(place):
      tree = dict(self._handler.metadata(epath.Path(place)).tree)
      return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)

  def close(self) -> None:
    """Ends the threads of Orbax."""
    self._orbax.close()


@contextlib.contextmanager
def _of_clients() -> Iterator[None]:
  """Raises an OSError for an error of a bucket's client inside, of which some are none."""
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
  """Hides a traceback of tensorstore, whose answers may come after Orbax has failed for another."""
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
