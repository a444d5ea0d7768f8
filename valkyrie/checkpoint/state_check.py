"""Checks of a train state: finite before a save, whole after it, and of the model of a restore.

Orbax also reports success for a state that nobody can open, for example after it has skipped the
merge of the indexes of its processes. Its arrays are therefore opened, and the values of the first
state are compared with those that were to be written.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
import hashlib
import json
import pathlib
from typing import Any, NamedTuple

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np
import tensorstore

from valkyrie.errors import ConfigurationError
from valkyrie.storage.bucket import SCHEME, is_bucket
from valkyrie.types import leaf_path

_SHOWN = 5
_READERS = 4  # threads: hashing releases Python's lock
_CACHE_BYTES = 100_000_000  # of the index that all arrays share


def not_finite(state: Any) -> list[str]:
  """The paths of the leaves that hold an infinity or a NaN; waits for the state."""
  leaves = {
    leaf_path(path): leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    if jnp.issubdtype(leaf.dtype, jnp.inexact)
  }
  finite = jax.device_get(_are_finite(leaves))
  return [path for path in leaves if not finite[path]]


@jax.jit
def _are_finite(leaves):
  return {path: jnp.all(jnp.isfinite(leaf)) for path, leaf in leaves.items()}


class Piece(NamedTuple):
  """The part of an array that a process writes from one of its devices.

  leaf: the path of the array in its state.
  index: the slices of the part.
  digest: the hash of its values.
  """

  leaf: str
  index: tuple[slice, ...]
  digest: str


def pieces(state: Any) -> list[Piece]:
  """The pieces of a pytree of jax arrays that this process writes."""

  def of_shard(path: str, shard: Any) -> Piece:
    return Piece(path, shard.index, _digest(shard.data))

  shards = [
    (leaf_path(path), shard)
    for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    for shard in leaf.addressable_shards
    if shard.replica_id == 0
  ]
  return _in_threads(of_shard, shards)


def opened(place: epath.Path) -> dict[str, Any]:
  """Opens the arrays of a state, and finds all of their chunks in the index.

  `PyTreeCheckpointHandler.metadata` would describe them, too, but leaks 6 KiB for each array.

  Args:
    place: the folder of the state, from `state_files.literal`.

  Returns:
    {path of a leaf: its tensorstore}.

  Raises:
    OSError, ValueError: an array cannot be opened, or lacks a chunk.
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


def changed(arrays: Mapping[str, Any], written: Sequence[Piece]) -> list[str]:
  """The paths of the leaves whose pieces, read from opened arrays, have other values."""

  def is_same(piece: Piece) -> bool:
    return _digest(arrays[piece.leaf][piece.index].read().result()) == piece.digest

  same = _in_threads(is_same, [(piece,) for piece in written])
  return sorted({piece.leaf for piece, is_so in zip(written, same, strict=True) if not is_so})


def _in_threads(function: Callable[..., Any], arguments: Iterable[tuple]) -> list[Any]:
  with ThreadPoolExecutor(_READERS) as threads:
    return list(threads.map(lambda one: function(*one), arguments))


def _digest(array: Any) -> str:
  """The hash of the bits of an array."""
  content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
  return hashlib.sha256(content.data).hexdigest()


def check_same_model(place: pathlib.Path, stored: Any, target: Any, partial: bool) -> None:
  """Raises ConfigurationError if names, shapes or dtypes of leaves differ; the message shows them.

  Args:
    place: the directory of the step.
    stored: a pytree of the metadata of the stored arrays.
    target, partial: as in `CheckpointDirectory.restore`.
  """
  if partial:
    stored = {field: tree for field, tree in stored.items() if field in target}
  if different := differences(stored, target):
    raise ConfigurationError(
      f'{place} is a checkpoint of another model. These leaves differ:\n  '
      + '\n  '.join(different)
      + '\nNothing was changed. Use another --model_dir, or the gin file of the checkpoint.'
    )


def differences(stored: Any, target: Any) -> list[str]:
  """A line for each of the first leaves whose shapes or dtypes differ between two pytrees."""
  found, expected = _describe(stored), _describe(target)
  different = [path for path in found | expected if found.get(path) != expected.get(path)]
  lines = [
    f'{path}: found {found.get(path, "nothing")}, expected {expected.get(path, "nothing")}'
    for path in different
  ]
  if len(lines) > _SHOWN:
    lines[_SHOWN:] = [f'and {len(lines) - _SHOWN} more']
  return lines


def _describe(tree: Any) -> dict[str, str]:
  """{'params/mlp/w': 'float32[4, 8]', ...}; a container without arrays is 'empty'."""

  def is_empty(node):
    return node is None or (isinstance(node, dict | list | tuple) and not node)

  return {
    leaf_path(path): 'empty' if is_empty(leaf) else f'{np.dtype(leaf.dtype).name}{list(leaf.shape)}'
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_empty)[0]
  }
