"""Files of a train state: written and read by Orbax, checked before a save and after it.

Orbax and tensorstore do not take every path of a file system literally. They read `*`, `?` and `[`
as a pattern, a backslash as a slash, and `gs:` or a folder /gs, /s3, /az or /hf of this machine as
a bucket. A path through a file descriptor has no such characters.

Orbax also reports success for a state that nobody can open, for example after it has skipped the
merge of the indexes of its processes. Its arrays are therefore opened, and the values of the first
state are compared with those that were to be written.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
import contextlib
import errno
import functools
import hashlib
import json
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
import tensorstore

from valkyrie import errors
from valkyrie.models.parts import is_of_model
from valkyrie.storage.bucket import SCHEME, is_bucket
from valkyrie.types import leaves_by_path

_DESCRIPTORS = '/proc/self/fd'  # of Linux; elsewhere the path itself is used
_SHOWN = 5  # leaves that differ
_READERS = 4  # threads: hashing releases Python's lock
_CACHE_BYTES = 100_000_000  # of the index that all arrays share

# Tensorstore reports errors of files as ValueError and RuntimeError.
checkpoint_errors = functools.partial(errors.storage_errors, also=(ValueError, RuntimeError))

# The piece of an array that a process writes: the array's path, the slices, the hash of the values.
_Piece = tuple[str, tuple[slice, ...], str]


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
    self._pieces: list[_Piece] = []
    self._is_first = True  # no state was compared yet

  def write(self, place: pathlib.Path, state: Any) -> None:
    """Copies a pytree of jax arrays to the host, and starts to write it."""
    item = _without_empty_arrays(state)
    self._written = leaves_by_path(_shapes(item))
    self._pieces = _pieces(item) if self._is_first else []
    self._folder.close()
    self._path = self._folder.enter_context(literal(place))
    self._orbax.save(self._path, args=ocp.args.PyTreeSave(item))

  def wait(self) -> None:
    """Waits until the state is written; raises the error of the write."""
    self._orbax.wait_until_finished()

  def finish(self) -> None:
    """Waits for the state; process 0 opens its arrays, and raises an OSError if they differ.

    For the first state, every process also reads back the values that it has written.
    """
    self.wait()
    if jax.process_index() != 0 and not self._pieces:
      return
    try:
      arrays = _opened(self._path)
      found = {
        leaf: jax.ShapeDtypeStruct(array.shape, array.dtype.numpy_dtype)
        for leaf, array in arrays.items()
      }
      different = _differences(found, self._written) or _changed(arrays, self._pieces)
    except Exception as error:  # Orbax does not validate the files it reads
      reason = f'what was written cannot be opened ({_reason(error)})'
      raise OSError(errno.EIO, reason) from error
    if different:
      raise OSError(errno.EIO, f'what was written differs in {"; ".join(different)}')
    self._is_first = False

  def read(self, place: pathlib.Path, target: Any, partial: bool) -> Any:
    """Reads the state in the directory `place`; otherwise like `CheckpointDirectory.restore`."""
    with _readable(place) as path:
      item = _without_empty_arrays(target)
      stored, partial = self._stored(path, target, partial)
      if different := _differences(stored, item):
        raise errors.ConfigurationError(
          f'{place.parent} is a checkpoint of another model. These leaves differ:\n  '
          + '\n  '.join(different)
          + '\nNothing was changed. Use another --model_dir, or the gin file of the checkpoint.'
        )
      restore_args = ocp.checkpoint_utils.construct_restore_args(item)
      args = ocp.args.PyTreeRestore(item, restore_args=restore_args, partial_restore=partial)
      restored = self._orbax.restore(path, args=args)

    def with_empty_arrays(leaf: jax.ShapeDtypeStruct, found: Any) -> Any:
      return found if leaf.size else jnp.zeros_like(leaf, device=leaf.sharding)

    return jax.tree.map(with_empty_arrays, target, restored)

  def differences(self, place: pathlib.Path, target: Any, partial: bool) -> list[str]:
    """A line for each of the first leaves for which `read` would refuse the target."""
    with _readable(place) as path:
      stored, _ = self._stored(path, target, partial)
      return _differences(stored, _without_empty_arrays(target))

  def _stored(self, path: Any, target: Any, partial: bool) -> tuple[Any, bool]:
    """The shapes of a state that a target is compared with, and whether it reads only a part."""
    stored = _shapes(dict(self._handler.metadata(path).tree))
    if partial:
      stored = {field: tree for field, tree in stored.items() if field in target}
      for field in stored.keys() & {'params', 'average'}:  # without terms that are not asked for
        modules, asked = (stored[field] or {}).items(), target[field]
        stored[field] = {name: of for name, of in modules if name in asked or is_of_model(name)}
    elif hasattr(target, '_asdict'):  # an earlier version may lack a field that is empty here
      fields = target._asdict().items()
      absent = {name: None for name, of in fields if of is None and name not in stored}
      stored, partial = {**stored, **absent}, bool(absent)
    return stored, partial

  def fields(self, place: pathlib.Path) -> set[str]:
    """The fields of a state that have arrays."""
    with _readable(place) as path:
      stored = dict(self._handler.metadata(path).tree)
      return {name for name in stored if jax.tree.leaves(stored[name])}

  def read_to_host(self, place: pathlib.Path, field: str) -> Any:
    """Reads a field of a state of any model to the host."""
    with _readable(place) as path:
      shapes = {field: _shapes(self._handler.metadata(path).tree[field])}
      to_host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), shapes)
      args = ocp.args.PyTreeRestore(shapes, restore_args=to_host, partial_restore=True)
      return self._orbax.restore(path, args=args)[field]

  def close(self) -> None:
    """Ends the threads of Orbax."""
    self._orbax.close()
    self._folder.close()


def not_finite(state: Any) -> list[str]:
  """The paths of the leaves that hold an infinity or a NaN; waits for the state."""
  leaves = leaves_by_path(state)
  inexact = {path: leaf for path, leaf in leaves.items() if jnp.issubdtype(leaf.dtype, jnp.inexact)}
  finite = jax.device_get(_are_finite(inexact))
  return [path for path in inexact if not finite[path]]


@jax.jit
def _are_finite(leaves):
  return {path: jnp.all(jnp.isfinite(leaf)) for path, leaf in leaves.items()}


@contextlib.contextmanager
def literal(place: Any) -> Iterator[epath.Path]:
  """A path to `place`, CHECKPOINTS/STEP/NAME, that is valid inside; OSError if there is none."""
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


@contextlib.contextmanager
def _readable(place: pathlib.Path) -> Iterator[epath.Path]:
  """A `literal` path. Any error inside is a StorageError: Orbax does not validate what it reads."""
  try:
    with literal(place) as path:
      yield path
  except errors.ValkyrieError:
    raise
  except Exception as error:
    raise errors.StorageError(
      f'{place} matches its manifest, but cannot be read ({_reason(error)}). Use the versions of '
      'record.json there, restore the step from a copy, or move it away to continue from the one '
      'before.'
    ) from error


def _reason(error: Exception) -> str:
  cause = error.__cause__ or error  # more specific if Orbax has wrapped it
  return without_descriptors(f'{type(cause).__name__}: {cause}'.splitlines()[0])[:300]


def _opened(place: epath.Path) -> dict[str, Any]:
  """{path of a leaf: its tensorstore} of a state; raises if one cannot be opened or lacks a chunk.

  `PyTreeCheckpointHandler.metadata` would describe them, too, but leaks 6 KiB for each array.
  """
  listed = json.loads((place / '_METADATA').read_text())['tree_metadata'].values()
  keys = [
    [key['key'] for key in leaf['key_metadata']]
    for leaf in listed
    if leaf['value_metadata']['value_type'] == 'jax.Array'
  ]
  base = {'driver': 'file', 'path': f'{place}/'}
  if is_bucket(place):
    bucket, _, folder = str(place).removeprefix(SCHEME).partition('/')
    base = {'driver': 'gcs', 'bucket': bucket, 'path': f'{folder}/'}
  context = tensorstore.Context({'cache_pool': {'total_bytes_limit': _CACHE_BYTES}})

  def open_array(name: str) -> Any:
    store = {'driver': 'ocdbt', 'base': base, 'path': f'{name}/'}
    return tensorstore.open({'driver': 'zarr', 'kvstore': store}, read=True, context=context)

  opening = {'/'.join(key): open_array('.'.join(key)) for key in keys}
  arrays = {leaf: array.result() for leaf, array in opening.items()}
  stored = {leaf: a.storage_statistics(query_fully_stored=True) for leaf, a in arrays.items()}
  for leaf, statistics in stored.items():
    if not statistics.result().fully_stored:
      raise ValueError(f'a part of {leaf} is missing')
  return arrays


def _pieces(state: Any) -> list[_Piece]:
  """The pieces of a pytree of jax arrays that this process writes."""
  shards = [
    (path, shard)
    for path, leaf in leaves_by_path(state).items()
    for shard in leaf.addressable_shards
    if shard.replica_id == 0
  ]
  with ThreadPoolExecutor(_READERS) as threads:
    digests = threads.map(lambda found: _digest(found[1].data), shards)
    return [(p, shard.index, digest) for (p, shard), digest in zip(shards, digests, strict=True)]


def _changed(arrays: Mapping[str, Any], written: Sequence[_Piece]) -> list[str]:
  """The paths of the leaves whose pieces, read from opened arrays, have other values."""

  def changed(piece: _Piece) -> set[str]:
    path, index, digest = piece
    return set() if _digest(arrays[path][index].read().result()) == digest else {path}

  with ThreadPoolExecutor(_READERS) as threads:
    return sorted(set().union(*threads.map(changed, written)))


def _digest(array: Any) -> str:
  content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
  return hashlib.sha256(content.data).hexdigest()


def _differences(stored: Any, target: Any) -> list[str]:
  """A line for each of the first leaves whose shapes or dtypes differ between two pytrees."""
  found, expected = _describe(stored), _describe(target)
  different = [path for path in found | expected if found.get(path) != expected.get(path)]
  lines = [
    f'{path}: found {found.get(path, "nothing")}, expected {expected.get(path, "nothing")}'
    for path in different
  ]
  return errors.first_of(lines, _SHOWN)


def _describe(tree: Any) -> dict[str, str]:
  """{'params/mlp/w': 'float32[4, 8]', ...}; a container without arrays is 'empty'."""

  def is_empty(node):
    return node is None or (isinstance(node, dict | list | tuple) and not node)

  return {
    path: 'empty' if is_empty(leaf) else f'{np.dtype(leaf.dtype).name}{list(leaf.shape)}'
    for path, leaf in leaves_by_path(tree, is_empty).items()
  }


def _shapes(tree: Any) -> Any:
  return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def _without_empty_arrays(tree: Any) -> Any:
  """Replaces arrays without elements, which Orbax refuses to save, by None."""
  return jax.tree.map(lambda leaf: leaf if leaf.size else None, tree)


@functools.cache
def _hide_closed_loops() -> None:
  """Silences 'Event loop is closed', for tensorstore's replies after Orbax has failed."""
  others = sys.unraisablehook

  def show(unraisable: Any) -> None:
    if str(unraisable.exc_value) != 'Event loop is closed':
      others(unraisable)

  sys.unraisablehook = show


def _is_shown(record: logging.LogRecord) -> bool:
  """False for Orbax's messages except warnings: a dozen lines a save, stacks of what it raises."""
  return record.levelno == logging.WARNING or '/orbax/' not in record.pathname
