"""An Orbax that reports success for a state that it has not written whole."""

from collections.abc import Callable
from typing import Any

import numpy as np
from orbax.checkpoint._src.serialization import ocdbt_utils
import tensorstore

merge = ocdbt_utils.merge_ocdbt_per_process_files  # Orbax's last act before it reports success


def _lose_chunk(store: Any) -> None:
  chunk = next(key for key in store.list().result() if not key.endswith(b'/.zarray'))
  store.delete_range(tensorstore.KvStore.KeyRange(chunk, chunk + b'\0')).result()


def _lose_array(store: Any) -> None:
  name = store.list().result()[0].rpartition(b'/')[0]
  store.delete_range(tensorstore.KvStore.KeyRange(name + b'/', name + b'0')).result()


def _flip_bit(store: Any) -> None:
  name = store.list().result()[0].rpartition(b'/')[0].decode()
  array = tensorstore.open(
    {'driver': 'zarr', 'kvstore': store.spec().to_json() | {'path': f'{name}/'}}
  )
  values = array.result().read().result()
  content = bytearray(values.tobytes())
  content[len(content) // 2] ^= 1
  array.result().write(np.frombuffer(content, values.dtype).reshape(values.shape)).result()


_SPOIL = {'a chunk': _lose_chunk, 'an array': _lose_array, 'a bit': _flip_bit}
LOST = ('the index', *_SPOIL)


def losing(lost: str, times: int = 1) -> Callable:
  """A merge for Orbax that loses `lost`, one of `LOST`, in its first `times` calls."""
  left = [times]

  async def merge_and_lose(directory, *arguments, **options):
    left[0] -= 1
    if left[0] >= 0 and lost == 'the index':
      return
    await merge(directory, *arguments, **options)
    if left[0] >= 0:
      base = {'driver': 'file', 'path': f'{directory}/'}
      _SPOIL[lost](tensorstore.KvStore.open({'driver': 'ocdbt', 'base': base}).result())

  return merge_and_lose
