"""Files of a train state, written and read by Orbax."""

import logging
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from valkyrie.checkpoint.state_check import check_same_model
from valkyrie.errors import storage_errors

TENSORSTORE_ERRORS = (ValueError, RuntimeError)


class StateFiles:
  """Writes one state at a time in the background; each process writes the shards of its devices."""

  def __init__(self):
    _quiet_orbax()
    # With named processes Orbax uses no collective of the devices as its barrier. Collectives must
    # be dispatched in the same order by all processes, which a separate thread cannot guarantee.
    processes = ocp.options.MultiprocessingOptions(
      active_processes=set(range(jax.process_count())) if jax.process_count() > 1 else None
    )
    self._orbax = ocp.AsyncCheckpointer(
      ocp.PyTreeCheckpointHandler(multiprocessing_options=processes),
      multiprocessing_options=processes,
    )

  def write(self, place: pathlib.Path, state: Any) -> None:
    """Copies a pytree of jax arrays to the host, and starts to write it."""
    self._orbax.save(place, args=ocp.args.PyTreeSave(_without_empty_arrays(state)))

  def wait(self) -> None:
    """Waits until the state is written; raises the error of the write."""
    self._orbax.wait_until_finished()

  def read(self, place: pathlib.Path, target: Any, partial: bool) -> Any:
    """Reads a state bit for bit, in the structure of `target`.

    Args:
      place: the directory of the state.
      target: a pytree of jax.ShapeDtypeStruct; its shardings may differ from those of the save.
      partial: `target` is a dict of some fields of the state; the others are not read.

    Raises:
      ConfigurationError: names, shapes or dtypes differ: the state is of another model.
      StorageError: the files cannot be read.
    """
    message = f'{place} matches its manifest, but cannot be read'
    with storage_errors(message, also=TENSORSTORE_ERRORS):
      metadata: Any = self._orbax.metadata(place).item_metadata
    item = _without_empty_arrays(target)
    check_same_model(place.parent, metadata.tree, item, partial)
    with storage_errors(message, also=TENSORSTORE_ERRORS):
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
    """Ends the threads of Orbax."""
    self._orbax.close()


def _without_empty_arrays(tree: Any) -> Any:
  """Replaces arrays without elements, which Orbax refuses to save, by None."""
  return jax.tree.map(lambda leaf: leaf if leaf.size else None, tree)


def _empty(leaf: jax.ShapeDtypeStruct) -> jax.Array:
  zeros = np.zeros(leaf.shape, leaf.dtype)
  if leaf.sharding is None:
    return jnp.asarray(zeros)
  return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: zeros[index])


def _quiet_orbax() -> None:
  """Hides all of Orbax's log messages except warnings.

  Orbax logs a dozen lines for each save, and four stacks for an error that it also raises.
  """
  logger = logging.getLogger('absl')
  if _is_shown not in logger.filters:
    logger.addFilter(_is_shown)


def _is_shown(record: logging.LogRecord) -> bool:
  return record.levelno == logging.WARNING or '/orbax/' not in record.pathname
