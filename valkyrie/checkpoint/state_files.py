"""Files of a train state: written and read by Orbax, checked before a save and after it.

Orbax and tensorstore do not take every path of a file system literally. They read `*`, `?` and `[`
as a pattern, a backslash as a slash, and `gs:` or a folder /gs, /s3, /az or /hf of this machine as
a bucket. A path through a file descriptor has no such characters.

Orbax also reports success for a state that nobody can open, for example after it has skipped the
merge of the indexes of its processes. Its arrays are therefore opened, and the values of the first
state are compared with those that were to be written.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
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
from typing import Any, NamedTuple

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from valkyrie import errors
from valkyrie.checkpoint import state_forms
from valkyrie.checkpoint.stored_arrays import StoredArray, open_array
from valkyrie.models.parts import is_of_model
from valkyrie.storage.bucket import is_bucket
from valkyrie.types import leaves_by_path

_DESCRIPTORS = '/proc/self/fd'  # of Linux; elsewhere the path itself is used
_READERS = 4  # threads: hashing releases Python's lock
_CACHE_BYTES = 100_000_000  # of the index that all arrays share

# Tensorstore reports errors of files as ValueError and RuntimeError.
checkpoint_errors = functools.partial(errors.storage_errors, also=(ValueError, RuntimeError))


class _Piece(NamedTuple):
  """The piece of an array that a process writes.

  path: the path of the array; index: the slices of the piece; digest: the hash of the values.
  """

  path: str
  index: tuple[slice, ...]
  digest: str


class StateFiles:
  """Writes one state at a time in the background; each process writes the shards of its devices."""

  def __init__(self):
    _hide_closed_loops()
    logging.getLogger('absl').addFilter(_is_shown)
    # With named processes Orbax uses no collective of the devices as its barrier. Collectives must
    # be dispatched in the same order by all processes, which a separate thread cannot guarantee.
    active = None
    if jax.process_count() > 1:
      process_count = jax.process_count()
      active = set(range(process_count))
    processes = ocp.options.MultiprocessingOptions(active_processes=active)
    self._handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=processes)
    self._orbax = ocp.AsyncCheckpointer(self._handler, multiprocessing_options=processes)
    # The state that is written:
    self._path: Any = None  # for Orbax, valid as long as the folder is open
    self._folder = contextlib.ExitStack()
    self._written: dict[str, jax.ShapeDtypeStruct] = {}  # its leaves
    self._pieces: list[_Piece] = []
    self._is_first = True  # no state was compared yet

  def write(self, place: pathlib.Path, state: Any) -> None:
    """Copies a pytree of jax arrays to the host, and starts to write it."""
    item = state_forms.without_empty_arrays(state)
    shapes = state_forms.shapes(item)
    self._written = leaves_by_path(shapes)
    self._pieces = []
    if self._is_first:
      self._pieces = _pieces(item)
    self._folder.close()
    self._path = self._folder.enter_context(literal(place))
    args = ocp.args.PyTreeSave(item)
    self._orbax.save(self._path, args=args)

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
      stored = {}
      for leaf, array in arrays.items():
        dtype = array.dtype.numpy_dtype
        stored[leaf] = jax.ShapeDtypeStruct(array.shape, dtype)
      different = state_forms.differences(stored, self._written)
      if not different:
        different = _changed(arrays, self._pieces)
    except Exception as error:  # Orbax does not validate the files it reads
      reason = f'what was written cannot be opened ({_reason(error)})'
      raise OSError(errno.EIO, reason) from error
    if different:
      listed = '; '.join(different)
      raise OSError(errno.EIO, f'what was written differs in {listed}')
    self._is_first = False

  def read(self, place: pathlib.Path, target: Any, partial: bool) -> Any:
    """Reads the state in the directory `place`; otherwise like `CheckpointDirectory.restore`."""
    with _readable(place) as path:
      item = state_forms.without_empty_arrays(target)
      stored, partial = self._stored(path, target, partial)
      state_forms.check_same(place, stored, item)
      restore_args = ocp.checkpoint_utils.construct_restore_args(item)
      args = ocp.args.PyTreeRestore(item, restore_args=restore_args, partial_restore=partial)
      restored = self._orbax.restore(path, args=args)

    def with_empty_arrays(leaf: jax.ShapeDtypeStruct, array: Any) -> Any:
      if leaf.size:
        return array
      return jnp.zeros_like(leaf, device=leaf.sharding)

    return jax.tree.map(with_empty_arrays, target, restored)

  def arrays(self, place: pathlib.Path, target: Any, partial: bool) -> Any:
    """As `read`, but each array is a `StoredArray`, which is read when it is asked for."""
    with _readable(place) as path:
      stored, _ = self._stored(path, target, partial)
      state_forms.check_same(place, stored, state_forms.without_empty_arrays(target))

    def array_of(path: Any, leaf: jax.ShapeDtypeStruct) -> StoredArray:
      read = functools.partial(np.zeros, leaf.shape, leaf.dtype)
      if leaf.size:
        keys = [entry.key for entry in path]
        name = '.'.join(keys)
        read = functools.partial(_read_array, place, name)
      return StoredArray(leaf.shape, leaf.dtype, read)

    return jax.tree_util.tree_map_with_path(array_of, target)

  def differences(self, place: pathlib.Path, target: Any, partial: bool) -> list[str]:
    """A line for each of the first leaves for which `read` would refuse the target."""
    with _readable(place) as path:
      stored, _ = self._stored(path, target, partial)
      return state_forms.differences(stored, state_forms.without_empty_arrays(target))

  def _stored(self, path: Any, target: Any, partial: bool) -> tuple[Any, bool]:
    """The shapes of a state that a target is compared with, and whether it reads only a part."""
    metadata = self._handler.metadata(path)
    stored = state_forms.shapes(dict(metadata.tree))
    if partial:
      return _part_of(stored, target), True
    if hasattr(target, '_asdict'):  # an earlier version may lack a field that is empty here
      for field, value in target._asdict().items():
        if value is None and field not in stored:
          stored[field] = None
          partial = True
    return stored, partial

  def fields(self, place: pathlib.Path) -> set[str]:
    """The fields of a state that have arrays."""
    with _readable(place) as path:
      metadata = self._handler.metadata(path)
      stored = dict(metadata.tree)
      return {name for name in stored if jax.tree.leaves(stored[name])}

  def shapes(self, place: pathlib.Path, field: str) -> Any:
    """The shapes and dtypes of a field of a state of any model."""
    with _readable(place) as path:
      metadata = self._handler.metadata(path)
      return state_forms.shapes(metadata.tree[field])

  def read_to_host(self, place: pathlib.Path, field: str) -> Any:
    """Reads a field of a state of any model to the host."""
    shapes = {field: self.shapes(place, field)}
    with _readable(place) as path:
      to_host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), shapes)
      args = ocp.args.PyTreeRestore(shapes, restore_args=to_host, partial_restore=True)
      restored = self._orbax.restore(path, args=args)
      return restored[field]

  def close(self) -> None:
    """Ends the threads of Orbax."""
    self._orbax.close()
    self._folder.close()


def _part_of(stored: Mapping[str, Any], target: Mapping[str, Any]) -> dict[str, Any]:
  """The fields of a state that a target asks for, without parameters of others."""
  part = {field: tree for field, tree in stored.items() if field in target}
  for field in part.keys() & {'params', 'average'}:
    modules = part[field] or {}
    part[field] = _of_model_or_asked(modules, target[field])
  return part


def _of_model_or_asked(modules: Mapping[str, Any], asked: Any) -> dict[str, Any]:
  """The modules of the model, and of the terms of the objective that a target asks for."""
  chosen = {}
  for name, leaves in modules.items():
    if name in asked or is_of_model(name):
      chosen[name] = leaves
  return chosen


def not_finite(state: Any) -> list[str]:
  """The paths of the leaves that hold an infinity or a NaN; waits for the state."""
  inexact = {}
  for path, leaf in leaves_by_path(state).items():
    if jnp.issubdtype(leaf.dtype, jnp.inexact):
      inexact[path] = leaf
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
  below = pathlib.Path(place).relative_to(folder)
  try:
    folder_of_descriptor = epath.Path(_DESCRIPTORS) / str(descriptor)
    yield folder_of_descriptor / below
  finally:
    os.close(descriptor)


def problem_of(write: Callable[..., None], *arguments: Any) -> str:
  """The reason if `write` fails, or ''. Tensorstore raises ValueError and RuntimeError, too."""
  try:
    write(*arguments)
  except (OSError, ValueError, RuntimeError) as error:
    return _without_descriptors(errors.reason_of(error))
  return ''


def _without_descriptors(message: str) -> str:
  """A message of Orbax or tensorstore with paths relative to the folder of the steps."""
  return re.sub(rf'{_DESCRIPTORS}/\d+/', '', message)


@contextlib.contextmanager
def _readable(place: pathlib.Path) -> Iterator[epath.Path]:
  """A `literal` path. Most errors inside are a StorageError: Orbax does not validate what it reads.

  An error of the devices, or of the memory of this machine, says nothing about the files.
  """
  try:
    with literal(place) as path:
      yield path
  except (errors.ValkyrieError, jax.errors.JaxRuntimeError, MemoryError):
    raise
  except Exception as error:
    errors.raise_outage(f'{place} cannot be read', error)
    raise errors.StorageError(
      f'{place} matches its manifest, but cannot be read ({_reason(error)}). Use the versions of '
      'record.json there, restore the step from a copy, or move it away to continue from the one '
      'before.'
    ) from error


def _reason(error: Exception) -> str:
  cause = error.__cause__ or error  # more specific if Orbax has wrapped it
  text = f'{type(cause).__name__}: {cause}'
  first_line = text.splitlines()[0]
  return _without_descriptors(first_line)[:300]


def _opened(place: epath.Path) -> dict[str, Any]:
  """{path of a leaf: its tensorstore} of a state; raises if one cannot be opened or lacks a chunk.

  `PyTreeCheckpointHandler.metadata` would describe them, too, but leaks 6 KiB for each array.
  """
  text = (place / '_METADATA').read_text()
  metadata = json.loads(text)
  keys = []
  for leaf in metadata['tree_metadata'].values():
    is_array = leaf['value_metadata']['value_type'] == 'jax.Array'
    if is_array:
      keys_of_path = leaf['key_metadata']
      keys.append([key['key'] for key in keys_of_path])
  context = tensorstore.Context({'cache_pool': {'total_bytes_limit': _CACHE_BYTES}})
  # All are opened at once, then all are queried at once.
  opening = {}
  for key in keys:
    leaf = '/'.join(key)
    name = '.'.join(key)
    opening[leaf] = open_array(place, name, context)
  arrays = {leaf: array.result() for leaf, array in opening.items()}
  queries = {}
  for leaf, array in arrays.items():
    queries[leaf] = array.storage_statistics(query_fully_stored=True)
  for leaf, query in queries.items():
    statistics = query.result()
    if not statistics.fully_stored:
      raise ValueError(f'a part of {leaf} is missing')
  return arrays


def _read_array(place: pathlib.Path, name: str) -> np.ndarray:
  """The array with this name in a state; raises a StorageError if it cannot be read."""
  with _readable(place) as path:
    array = open_array(path, name).result()
    return array.read().result()


def _pieces(state: Any) -> list[_Piece]:
  """The pieces of a pytree of jax arrays that this process writes."""
  shards = []
  for path, leaf in leaves_by_path(state).items():
    for shard in leaf.addressable_shards:
      if shard.replica_id == 0:
        shards.append((path, shard))

  with ThreadPoolExecutor(_READERS) as threads:
    arrays = [shard.data for _, shard in shards]
    digests = list(threads.map(_digest, arrays))
  pieces = []
  for (path, shard), digest in zip(shards, digests, strict=True):
    piece = _Piece(path, shard.index, digest)
    pieces.append(piece)
  return pieces


def _changed(arrays: Mapping[str, Any], written: Sequence[_Piece]) -> list[str]:
  """The paths of the leaves whose pieces, read from opened arrays, have other values."""

  def is_changed(piece: _Piece) -> bool:
    stored = arrays[piece.path]
    values = stored[piece.index].read().result()
    return _digest(values) != piece.digest

  with ThreadPoolExecutor(_READERS) as threads:
    verdicts = list(threads.map(is_changed, written))
  changed = set()
  for piece, verdict in zip(written, verdicts, strict=True):
    if verdict:
      changed.add(piece.path)
  return sorted(changed)


def _digest(array: Any) -> str:
  values = np.ascontiguousarray(array).reshape(-1)
  content = values.view(np.uint8)
  return hashlib.sha256(content.data).hexdigest()


@functools.cache
def _hide_closed_loops() -> None:
  """Silences 'Event loop is closed', for tensorstore's replies after Orbax has failed."""
  others = sys.unraisablehook

  def show(unraisable: Any) -> None:
    if str(unraisable.exc_value) != 'Event loop is closed':
      others(unraisable)

  sys.unraisablehook = show


def _is_shown(record: logging.LogRecord) -> bool:
  """False for Orbax's messages except warnings: a dozen lines a save, and stacks of its errors."""
  return record.levelno == logging.WARNING or '/orbax/' not in record.pathname
