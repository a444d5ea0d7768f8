"""Arrays of a checkpoint that stay in its files until they are asked for."""

from collections.abc import Callable
import functools
import math
from typing import Any

from etils import epath
import jax
import numpy as np
import tensorstore

from valkyrie.storage.bucket import SCHEME, is_bucket


class StoredArray:
  """An array that `np.asarray` reads.

  Attributes:
    shape, dtype: those of the array.
  """

  def __init__(self, shape: tuple[int, ...], dtype: Any, read: Callable[[], np.ndarray]):
    self.shape = shape
    self.dtype = np.dtype(dtype)
    self._read = read

  @property
  def nbytes(self) -> int:
    return math.prod(self.shape) * self.dtype.itemsize

  def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
    return np.asarray(self._read(), dtype)


class _LastRead:
  """The arrays that were read last, of at most so many bytes together.

  A stack of layers is read as a whole, and its layers are used one after the other.
  """

  def __init__(self, limit: int):
    self._limit = limit
    self._arrays: dict[int, np.ndarray] = {}  # by the number of the array, the newest last

  def read(self, number: int, array: StoredArray) -> np.ndarray:
    content = self._arrays.pop(number, None)
    if content is None:
      self._make_room(array.nbytes)
      content = np.asarray(array)
    self._arrays[number] = content
    return content

  def _make_room(self, size: int) -> None:
    sizes = [content.nbytes for content in self._arrays.values()]
    used = sum(sizes)
    for number in [*self._arrays]:
      if used + size <= self._limit:
        return
      oldest = self._arrays.pop(number)
      used -= oldest.nbytes


def keeping_last(arrays: Any) -> Any:
  """A pytree of stored arrays that keeps what it has read last, as much as the largest array."""
  leaves, structure = jax.tree.flatten(arrays)
  largest = max(array.nbytes for array in leaves)
  last = _LastRead(largest)
  kept = []
  for number, array in enumerate(leaves):
    read = functools.partial(last.read, number, array)
    stored = StoredArray(array.shape, array.dtype, read)
    kept.append(stored)
  return jax.tree.unflatten(structure, kept)


def open_array(place: epath.Path, name: str, context: Any = None) -> Any:
  """The future tensorstore of an array of a state; `place` is a path that Orbax takes literally."""
  base = {'driver': 'file', 'path': f'{place}/'}
  if is_bucket(place):
    path = str(place).removeprefix(SCHEME)
    bucket, _, folder = path.partition('/')
    base = {'driver': 'gcs', 'bucket': bucket, 'path': f'{folder}/'}
  store = {'driver': 'ocdbt', 'base': base, 'path': f'{name}/'}
  specification = {'driver': 'zarr', 'kvstore': store}
  return tensorstore.open(specification, read=True, context=context)
