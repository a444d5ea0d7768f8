"""A train state as files: what Orbax writes and reads, and what it would not say."""

from collections.abc import Iterator
import contextlib
import logging
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from valkyrie.checkpoint.state_check import check_same_model
from valkyrie.errors import StorageError


@contextlib.contextmanager
def as_storage_error(message: str) -> Iterator[None]:
  """What goes wrong with files within it is a StorageError that begins with this message."""
  try:
    yield
  except (OSError, ValueError, RuntimeError) as error:  # tensorstore's errors are ValueErrors
    raise StorageError(f'{message}: {error}') from error


class StateFiles:
  """Writes one state at a time in the background; each process writes what its devices hold."""

  def __init__(self):
    _quiet_orbax()
    # Named, processes wait for each other without a collective of the devices, which must be
    # dispatched in the same order everywhere, and are not by a thread of its own.
    processes = ocp.options.MultiprocessingOptions(
      active_processes=set(range(jax.process_count())) if jax.process_count() > 1 else None
    )
    self._orbax = ocp.AsyncCheckpointer(
      ocp.PyTreeCheckpointHandler(multiprocessing_options=processes),
      multiprocessing_options=processes,
    )

  def write(self, place: pathlib.Path, state: Any) -> None:
    """Copies a pytree of jax arrays off the devices, and begins to write it."""
    self._orbax.save(place, args=ocp.args.PyTreeSave(_without_empty_arrays(state)))

  def wait(self) -> None:
    """Returns when all is written; raises what went wrong with it."""
    self._orbax.wait_until_finished()

  def read(self, place: pathlib.Path, target: Any, partial: bool) -> Any:
    """The state that was written, bit for bit, in the structure of `target`.

    Args:
      place: where it was written.
      target: a pytree of jax.ShapeDtypeStruct with shardings, which may be other ones than it was
        written with.
      partial: `target` is a dict of some of the state's fields; the others stay unread.

    Raises:
      ConfigurationError: where names, shapes or dtypes differ: a state of another model.
      StorageError: where the files cannot be read.
    """
    unreadable = f'{place} is what was saved, but cannot be read'
    with as_storage_error(unreadable):
      metadata: Any = self._orbax.metadata(place).item_metadata
    item = _without_empty_arrays(target)
    check_same_model(place.parent, metadata.tree, item, partial)
    with as_storage_error(unreadable):
      restored = self._orbax.restore(
        place,
        args=ocp.args.PyTreeRestore(
          item=item,
          restore_args=ocp.checkpoint_utils.construct_restore_args(item),
          partial_restore=partial,
        ),
      )
    return jax.tree.map(lambda leaf, found: found if leaf.size else _empty(leaf), target, restored)

  def close(self) -> None:
    """Ends the threads of it."""
    self._orbax.close()


def _without_empty_arrays(tree: Any) -> Any:
  """None in the place of arrays without elements, which Orbax refuses to save."""
  return jax.tree.map(lambda leaf: leaf if leaf.size else None, tree)


def _empty(leaf: jax.ShapeDtypeStruct) -> jax.Array:
  zeros = np.zeros(leaf.shape, leaf.dtype)
  if leaf.sharding is None:
    return jnp.asarray(zeros)
  return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: zeros[index])


def _quiet_orbax() -> None:
  """Lets only Orbax's warnings into a run's log.

  It tells of each save in a dozen lines, and prints four stacks for an error that it also raises.
  """
  logger = logging.getLogger('absl')
  if _is_worth_showing not in logger.filters:
    logger.addFilter(_is_worth_showing)


def _is_worth_showing(record: logging.LogRecord) -> bool:
  return record.levelno == logging.WARNING or '/orbax/' not in record.pathname
