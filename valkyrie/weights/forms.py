"""Forms of tensors: the one of another program, and ours. Nothing is read before it is asked for.

Matrices are [outputs, inputs] there and [inputs, outputs] here, so the rows of their tensor are the
last axis of ours.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from valkyrie.weights.tensor_files import Tensor

Ranges = Sequence[tuple[int, int]]
_EVERY = slice(None)


class Form(NamedTuple):
  """The way between two forms of a tensor.

  read: their tensor -> ours.
  write: our tensor -> theirs.
  """

  read: Callable[[Tensor], Tensor]
  write: Callable[[Tensor], Tensor]


def _transposed(tensor: Tensor) -> Tensor:
  is_matrix = len(tensor.shape) == 2
  if is_matrix:
    return tensor.T
  return tensor


def wide(array: np.ndarray) -> np.ndarray:
  """An array in float32 or wider."""
  dtype = np.promote_types(array.dtype, np.float32)
  return array.astype(dtype)


def _filters(weight: Tensor) -> Tensor:
  """Weights [F, 1, k], whose last tap reads the current token -> filters [k, F], newest first."""
  is_of_convolution = len(weight.shape) == 3 and weight.shape[1] == 1
  if not is_of_convolution:
    return weight
  channels, _, taps = weight.shape

  def read(index: tuple[slice, ...]) -> np.ndarray:
    wanted_taps, wanted_channels = index
    part = weight.read((wanted_channels, _EVERY, _EVERY))
    newest_first = part[:, 0, ::-1].T
    return newest_first[wanted_taps]

  return weight._replace(shape=(taps, channels), read=read)


def _weights(filters: Tensor) -> Tensor:
  """Filters [k, F], newest first -> weights [F, 1, k]."""
  taps, channels = filters.shape

  def read(index: tuple[slice, ...]) -> np.ndarray:
    wanted_channels, *others = index
    part = filters.read((_EVERY, wanted_channels))
    oldest_first = part[::-1].T
    weights = oldest_first[:, None]
    return weights[(_EVERY, *others)]

  shape = (channels, 1, taps)
  return filters._replace(shape=shape, read=read)


def centred(factor: float = 1.0) -> Form:
  """Scales (1 + w) x `factor` here, in float32: it holds the digits that bfloat16 would lose."""

  def scales(weight: Tensor) -> Tensor:
    dtype = weight.dtype
    if dtype in ('F16', 'BF16'):
      dtype = 'F32'

    def read(index: tuple[slice, ...]) -> np.ndarray:
      part = wide(weight.read(index))
      scale = np.float32(1) + part
      return scale * factor

    return weight._replace(read=read, dtype=dtype)

  def weights(scale: Tensor) -> Tensor:
    def read(index: tuple[slice, ...]) -> np.ndarray:
      part = scale.read(index) / factor
      one = np.ones((), part.dtype)
      return part - one

    return scale._replace(read=read)

  return Form(scales, weights)


SAME = Form(lambda tensor: tensor, lambda tensor: tensor)
MATRIX = Form(_transposed, _transposed)
CENTRED = centred()
FILTERS = Form(_filters, _weights)


def columns(tensor: Tensor, ranges: Ranges) -> Tensor:
  """The tensor [..., F] at ranges of its last axis, side by side."""
  if not tensor.shape:
    return tensor
  *leading, width = tensor.shape
  is_whole = [*ranges] == [(0, width)]
  if is_whole:
    return tensor
  widths = [stop - start for start, stop in ranges]
  places, total = _places(widths)

  def read(index: tuple[slice, ...]) -> np.ndarray:
    *others, wanted = index
    first, last, _ = wanted.indices(total)
    parts = []
    for (start, stop), place in zip(ranges, places, strict=True):
      begin = start + max(first - place, 0)
      end = min(stop, start + last - place)
      # Without columns, one empty part tells the other sizes.
      if begin < end or not parts:
        end = max(begin, end)
        part = tensor.read((*others, slice(begin, end)))
        parts.append(part)
    return np.concatenate(parts, axis=-1)

  return tensor._replace(shape=(*leading, total), read=read)


def side_by_side(tensors: Sequence[Tensor]) -> Tensor:
  """The tensors, joined along their last axes in this order."""
  if len(tensors) == 1:
    return tensors[0]
  widths = [tensor.shape[-1] for tensor in tensors]
  places, total = _places(widths)

  def read(index: tuple[slice, ...]) -> np.ndarray:
    *others, wanted = index
    first, last, _ = wanted.indices(total)
    parts = []
    for tensor, width, place in zip(tensors, widths, places, strict=True):
      begin = min(max(first - place, 0), width)
      end = min(max(last - place, begin), width)
      part = tensor.read((*others, slice(begin, end)))
      parts.append(part)
    return np.concatenate(parts, axis=-1)

  dtypes = sorted({tensor.dtype for tensor in tensors})
  dtype = '+'.join(dtypes)
  *leading, _ = tensors[0].shape
  shape = (*leading, total)
  return tensors[0]._replace(shape=shape, read=read, dtype=dtype)


def _places(widths: Sequence[int]) -> tuple[list[int], int]:
  """(The first column of each of the parts with these widths side by side, all their columns)."""
  places = []
  total = 0
  for width in widths:
    places.append(total)
    total += width
  return places, total
