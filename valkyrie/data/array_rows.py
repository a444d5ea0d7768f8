"""Rows of an .npy file, read a few at once. An array of objects, which need pickle, is refused."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from valkyrie import foreign
from valkyrie.errors import DataError

_AT_ONCE = 2**24  # bytes
_HEADERS = {
  (1, 0): np.lib.format.read_array_header_1_0,
  (2, 0): np.lib.format.read_array_header_2_0,
  # As 2.0 but for names of fields, which no array of numbers has.
  (3, 0): np.lib.format.read_array_header_2_0,
}


def npy_header(stream: Any) -> tuple[tuple[int, ...], bool, np.dtype]:
  """(shape, whether it is stored by columns, dtype) of an .npy file, read up to its array.

  Raises a ValueError if the file is damaged: numpy parses Python there, and raises many types.
  """
  try:
    version = np.lib.format.read_magic(stream)
    if version not in _HEADERS:
      major, minor = version
      raise ValueError(f'it has the version {major}.{minor} of the format, expected 1.0 to 3.0')
    return _HEADERS[version](stream)
  except OSError:
    raise
  except Exception as error:
    raise ValueError(f'its header is wrong: {foreign.reason(error)}') from error


def npy_rows(stream: Any, file: str, part: int, parts: int) -> Iterator[tuple[int, np.ndarray]]:
  """The rows of one of `parts` parts of an array, with their numbers in it from 0.

  Args:
    stream: the open file, which can seek.
    file: its name for messages.

  Raises:
    DataError: the array has not two dimensions, or is stored by columns.
    ValueError: the file is damaged.
  """
  shape, by_columns, dtype = npy_header(stream)
  if dtype.hasobject:
    raise ValueError('it has objects of Python')
  if len(shape) != 2 or by_columns:
    order = ' by columns' if by_columns else ''
    raise DataError(
      f'{file} has an array of the shape {shape}{order}, expected [rows, tokens] by rows. Save it '
      'again: numpy.save(FILE, numpy.ascontiguousarray(IDS.reshape(ROWS, TOKENS))).'
    )
  rows, columns = shape
  begin = stream.tell()
  row_bytes = columns * dtype.itemsize
  expected = begin + rows * row_bytes
  size = stream.seek(0, 2)
  if size != expected:
    raise ValueError(f'it has {size:,} bytes, and its shape {shape} needs {expected:,}')
  first = rows * part // parts
  end = rows * (part + 1) // parts
  place = begin + first * row_bytes
  stream.seek(place)
  at_once = _AT_ONCE // max(1, row_bytes)
  at_once = max(1, at_once)
  for number in range(first, end, at_once):
    count = min(at_once, end - number)
    content = stream.read(count * row_bytes)
    values = np.frombuffer(content, dtype)
    block = values.reshape(count, columns)
    yield from enumerate(block, number)
