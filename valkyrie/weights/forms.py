"""Forms of tensors: the one of another program, and ours. Nothing is read before it is asked for.

Matrices are [outputs, inputs] there and [inputs, outputs] here, so the rows of their tensor are the
last axis of ours.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from valkyrie.weights.tensor_files import Tensor

Ranges = Sequence[tuple[int, int]]


class Form(NamedTuple):
  """The way between two forms of a tensor.

  read: their tensor -> ours.
  write: our tensor -> theirs.
  """

  read: Callable[[Tensor], Tensor]
  write: Callable[[Tensor], Tensor]


def _transposed(tensor: Tensor) -> Tensor:
  return tensor.T if len(tensor.shape) == 2 else tensor


def wide(array: np.ndarray) -> np.ndarray:
  """An array in float32 or wider."""
  return array.astype(np.promote_types(array.dtype, np.float32))


def _filters(weight: Tensor) -> Tensor:
  """Weights [F, 1, k], whose last tap reads the current token -> filters [k, F], newest first."""
  if len(weight.shape) != 3 or weight.shape[1] != 1:
    return weight

  def read(index: tuple[slice, ...]) -> np.ndarray:
    taps, channels = index
    part = weight.read((channels, slice(None), slice(None)))
    newest_first = part[:, 0, ::-1].T
    return newest_first[taps]

  return weight._replace(shape=(weight.shape[2], weight.shape[0]), read=read)


def _weights(filters: Tensor) -> Tensor:
  """Filters [k, F], newest first -> weights [F, 1, k]."""
  taps, channels = filters.shape

  def read(index: tuple[slice, ...]) -> np.ndarray:
    wanted, *others = index
    part = filters.read((slice(None), wanted))
    oldest_first = part[::-1].T[:, None]
    return oldest_first[(slice(None), *others)]

  return filters._replace(shape=(channels, 1, taps), read=read)


def centred(factor: float = 1.0) -> Form:
  """Scales (1 + w) x `factor` here, in float32: it holds the digits that bfloat16 would lose."""

  def scales(weight: Tensor) -> Tensor:
    dtype = 'F32' if weight.dtype in ('F16', 'BF16') else weight.dtype

    def read(index: tuple[slice, ...]) -> np.ndarray:
      return (np.float32(1) + wide(weight.read(index))) * factor

    return weight._replace(read=read, dtype=dtype)

  def weights(scale: Tensor) -> Tensor:
    def read(index: tuple[slice, ...]) -> np.ndarray:
      part = scale.read(index) / factor
      return part - np.ones((), part.dtype)

    return scale._replace(read=read)

  return Form(scales, weights)


SAME = Form(lambda tensor: tensor, lambda tensor: tensor)
MATRIX = Form(_transposed, _transposed)
CENTRED = centred()
FILTERS = Form(_filters, _weights)


def columns(tensor: Tensor, ranges: Ranges) -> Tensor:
  """The tensor [..., F] at ranges of its last axis, side by side."""
  if not tensor.shape or [*ranges] == [(0, tensor.shape[-1])]:
    return tensor
  starts = np.cumsum([0] + [stop - start for start, stop in ranges])

  def read(index: tuple[slice, ...]) -> np.ndarray:
    *others, wanted = index
    first, last, _ = wanted.indices(int(starts[-1]))
    parts = []
    for (start, stop), offset in zip(ranges, starts, strict=False):
      begin = start + max(first - offset, 0)
      end = min(stop, start + last - offset)
      if begin < end or not parts:
        parts.append(tensor.read((*others, slice(int(begin), int(max(begin, end))))))
    return np.concatenate(parts, axis=-1)

  return tensor._replace(shape=(*tensor.shape[:-1], int(starts[-1])), read=read)


def side_by_side(tensors: Sequence[Tensor]) -> Tensor:
  """One tensor whose last axis has those of the tensors in this order."""
  if len(tensors) == 1:
    return tensors[0]
  widths = [tensor.shape[-1] for tensor in tensors]
  starts = np.cumsum([0, *widths])

  def read(index: tuple[slice, ...]) -> np.ndarray:
    *others, wanted = index
    first, last, _ = wanted.indices(int(starts[-1]))
    parts = []
    for tensor, width, offset in zip(tensors, widths, starts, strict=False):
      begin = int(np.clip(first - offset, 0, width))
      end = int(np.clip(last - offset, begin, width))
      parts.append(tensor.read((*others, slice(begin, end))))
    return np.concatenate(parts, axis=-1)

  dtypes = sorted({tensor.dtype for tensor in tensors})
  shape = (*tensors[0].shape[:-1], int(starts[-1]))
  return tensors[0]._replace(shape=shape, read=read, dtype='+'.join(dtypes))
