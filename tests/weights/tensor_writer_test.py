"""Files of tensors that are written block by block."""

import errno
import json
import os

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from valkyrie.weights import tensor_files, tensor_folders, tensor_writer
from valkyrie.weights.tensor_files import Tensor

ARRAYS = {
  'narrow': np.full(3, -0.0, ml_dtypes.bfloat16),
  'wide': np.arange(12, dtype=np.float32).reshape(3, 4).T,
  'one': np.array(np.nan, np.float32),
  'none': np.zeros((0, 5), np.float32),
  'numbers': np.arange(7),
}


def test_a_file_has_the_bits_of_its_tensors(tmp_path, monkeypatch):
  monkeypatch.setattr(tensor_writer, '_BLOCK_BYTES', 40)
  tensors = tensor_writer.of_arrays(ARRAYS)
  tensor_writer.write_file(tmp_path / 'a.safetensors', tensors, {'a': 'b'})
  file = tensor_files.TensorFile(tmp_path / 'a.safetensors')
  assert file.metadata == {'a': 'b'} and file.tensors.keys() == ARRAYS.keys()
  found = load_file(tmp_path / 'a.safetensors')
  for name, array in ARRAYS.items():
    assert found[name].dtype == array.dtype and found[name].shape == array.shape
    assert found[name].tobytes() == array.tobytes()
  # Readers that map the file need values at multiples of their size.
  header = (tmp_path / 'a.safetensors').read_bytes()
  size = int.from_bytes(header[:8], 'little')
  assert size % 8 == 0
  for name, entry in json.loads(header[8 : 8 + size]).items():
    if name != '__metadata__':
      assert entry['data_offsets'][0] % ARRAYS[name].dtype.itemsize == 0


def test_what_cannot_be_read_back_is_an_error(tmp_path, monkeypatch):
  write = os.pwrite
  tensors = tensor_writer.of_arrays(ARRAYS)

  def short(file, content, place):
    return write(file, bytes(content)[:5], place)

  monkeypatch.setattr(tensor_writer.os, 'pwrite', short)
  tensor_writer.write_file(tmp_path / 'short.safetensors', tensors, {})
  assert load_file(tmp_path / 'short.safetensors').keys() == ARRAYS.keys()

  def flip(file, content, place):
    changed = bytearray(content)
    changed[-1] ^= 1
    return write(file, changed, place)

  def full(file, content, place):
    raise OSError(errno.ENOSPC, 'No space left on device')

  for number, fault in enumerate((flip, full)):
    monkeypatch.setattr(tensor_writer.os, 'pwrite', fault)
    with pytest.raises(OSError):
      tensor_writer.write_file(tmp_path / f'{number}.safetensors', tensors, {})


def test_a_folder_has_files_of_bounded_size_and_their_index(tmp_path, monkeypatch):
  monkeypatch.setattr(tensor_writer, '_FILE_BYTES', 100)
  asked = []

  def stored(number):
    def read(index):
      asked.append(number // 2)
      return np.full((10,), number, np.float32)[index]

    return Tensor((10,), read, stored_in=str(number // 2))

  order = [0, 2, 4, 1, 3, 5]  # each stored array has two tensors, which are not neighbors
  tensor_writer.write_folder(tmp_path, {f't{number}': stored(number) for number in order})
  files = sorted(file.name for file in tmp_path.iterdir())
  assert files[:2] == ['model-00001-of-00003.safetensors', 'model-00002-of-00003.safetensors']
  assert files[3:] == ['model.safetensors.index.json']
  index = json.loads((tmp_path / files[3]).read_text())
  assert index['metadata'] == {'total_size': 6 * 40}
  assert asked == [0, 0, 1, 1, 2, 2]  # an array is read once
  found = tensor_folders.in_files(tmp_path).tensors
  assert sorted(found) == sorted(index['weight_map']) == sorted(f't{number}' for number in order)
  for number in order:
    np.testing.assert_array_equal(found[f't{number}'].read((slice(None),)), np.full(10, number))
