"""Which tensors count in files of strangers, and how a file is refused that is not what it says."""

import json
import os

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from valkyrie.errors import ConfigurationError, StorageError, message_of
from valkyrie.weights import source, tensor_files
from valkyrie.weights.tensor_files import TensorFile
from valkyrie.weights.tensor_folders import in_files

A, B = 'model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors'
INDEX = 'model.safetensors.index.json'


def save(path, **values):
  """A file whose tensors have two values each."""
  tensors = {name: np.full(2, value, np.float32) for name, value in values.items()}
  save_file(tensors, path)


def index(folder, name=INDEX, **file_of):
  (folder / name).write_text(json.dumps({'metadata': {}, 'weight_map': file_of}))


def values(path):
  """{name: value} of the tensors of a place."""
  found = in_files(path).tensors
  return {name: float(tensor.read((slice(None),))[0]) for name, tensor in found.items()}


def test_the_file_that_the_index_names_counts(tmp_path):
  save(tmp_path / A, both=1, first=1)
  save(tmp_path / B, both=2, second=2)
  index(tmp_path, both=A, first=A, second=B)
  assert values(tmp_path) == {'both': 1, 'first': 1, 'second': 2}
  index(tmp_path, both=B, first=A, second=B)
  assert values(tmp_path) == {'both': 2, 'first': 1, 'second': 2}
  assert values(tmp_path / INDEX)['both'] == 2
  (tmp_path / INDEX).unlink()
  with pytest.raises(ConfigurationError, match=f"tensor 'both' in {A} and in {B}, and no index"):
    in_files(tmp_path)


def test_an_old_index_beside_new_weights_is_refused_until_one_is_moved_away(tmp_path):
  save(tmp_path / A, a=1)
  save(tmp_path / B, b=1)
  index(tmp_path, a=A, b=B)
  save(tmp_path / 'model.safetensors', a=2, b=2)
  with pytest.raises(ConfigurationError, match='Move away the one that you do not want'):
    in_files(tmp_path)
  (tmp_path / INDEX).rename(tmp_path / 'away')
  with pytest.raises(ConfigurationError, match=r"'a' in .* and no index"):
    in_files(tmp_path)
  for shard in (A, B):
    (tmp_path / shard).rename(tmp_path / f'{shard}.old')
  assert values(tmp_path) == {'a': 2, 'b': 2}
  index(tmp_path, a='model.safetensors', b='model.safetensors')
  assert values(tmp_path) == {'a': 2, 'b': 2}


def test_the_index_of_the_model_comes_before_any_other_and_the_rest_is_named(tmp_path):
  other = 'consolidated-00001-of-00001.safetensors'
  save(tmp_path / other, **{'layers.0.wq': 3})
  index(tmp_path, 'consolidated.safetensors.index.json', **{'layers.0.wq': other})
  assert values(tmp_path) == {'layers.0.wq': 3}
  save(tmp_path / A, a=1)
  save(tmp_path / B, b=1)
  (tmp_path / 'pytorch_model.bin').touch()
  index(tmp_path, a=A, b=B)
  assert values(tmp_path) == {'a': 1, 'b': 1}
  assert in_files(tmp_path).unread == (other, 'pytorch_model.bin')
  (tmp_path / INDEX).unlink()
  save(tmp_path / 'model.safetensors', a=5)
  assert values(tmp_path) == {'a': 5}
  (tmp_path / 'model.safetensors').unlink()
  index(tmp_path, 'model.fp16.safetensors.index.json', a=A, b=B)
  with pytest.raises(
    ConfigurationError, match=r'but no model.safetensors.index.json. Move away those'
  ):
    in_files(tmp_path)


@pytest.mark.parametrize(
  ('file_of', 'message'),
  [
    ({'a': A, 'c': A, 'b': B}, f"{A} does not fit {INDEX}: it lacks 'c'"),
    ({'b': B}, None),
    ({'a': A, 'b': B, 'd': 'gone.safetensors'}, 'names gone.safetensors, which is not there'),
    ({'a2': A, 'b': B}, f"{A} does not fit {INDEX}: it lacks 'a2'"),
    ({'a': A, 'c': B, 'b': B}, f"{B} does not fit {INDEX}: it lacks 'c'"),
  ],
)
def test_an_index_of_other_files_is_refused(tmp_path, file_of, message):
  save(tmp_path / A, a=1)
  save(tmp_path / B, b=1)
  index(tmp_path, **file_of)
  if message is None:
    assert [*in_files(tmp_path).tensors] == ['b']
    assert in_files(tmp_path).unread == (A,)
    return
  with pytest.raises(StorageError, match=message):
    in_files(tmp_path)


def test_a_tensor_that_the_index_does_not_name_is_refused(tmp_path):
  save(tmp_path / A, a=1, more=1)
  index(tmp_path, a=A)
  with pytest.raises(StorageError, match=r"it also has 'more'. They are of different weights"):
    in_files(tmp_path)


def test_a_part_of_a_set_without_its_index_is_refused(tmp_path):
  save(tmp_path / A, a=1)
  with pytest.raises(StorageError, match=f'has {A}, but not {B}'):
    in_files(tmp_path)
  save(tmp_path / B, b=1)
  assert values(tmp_path) == {'a': 1, 'b': 1}


def test_what_is_no_safetensors_file_is_named(tmp_path):
  (tmp_path / 'pytorch_model.bin').touch()
  with pytest.raises(ConfigurationError, match=r'pytorch_model.bin may hold weights in another'):
    in_files(tmp_path)
  step = tmp_path / 'run/checkpoints/30'
  step.mkdir(parents=True)
  with pytest.raises(ConfigurationError, match=r"name .*run, and set InitialWeights.step = '30'"):
    in_files(step)
  with pytest.raises(ConfigurationError, match=r"InitialWeights.step is '30', but .* has no steps"):
    source.open_source(str(step), '30')


@pytest.mark.parametrize('name', ['adapter_config.json', 'adapter_model.safetensors'])
def test_an_adapter_beside_the_weights_is_refused(tmp_path, name):
  save(tmp_path / 'model.safetensors', a=1)
  (tmp_path / 'config.json').write_text('{"format": "valkyrie"}')
  (tmp_path / name).touch()
  with pytest.raises(ConfigurationError, match=f'{name}, an adapter that Valkyrie would not add'):
    source.open_source(str(tmp_path))


def test_every_dtype_is_read_slice_by_slice(tmp_path, monkeypatch):
  monkeypatch.setattr(tensor_files, '_BLOCK', 40)  # a block of 2 rows, or of a part of one
  random = np.random.default_rng(0)
  arrays = {
    str(np.dtype(dtype)): random.integers(0, 2, (7, 5)).astype(dtype)
    for dtype in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16, np.int8, np.uint64, bool)
  }
  arrays['one'] = np.array(3, np.float32)
  arrays['nothing'] = np.zeros((0, 4), np.float32)
  save_file(arrays, tmp_path / 'a.safetensors')
  found = TensorFile(tmp_path / 'a.safetensors').tensors
  for name, array in arrays.items():
    tensor = found[name]
    whole = tensor.read((slice(None),) * array.ndim)
    assert tensor.shape == array.shape and whole.dtype == array.dtype
    np.testing.assert_array_equal(whole, array)
    if array.shape == (7, 5):
      np.testing.assert_array_equal(tensor.read((slice(2, 6), slice(1, 3))), array[2:6, 1:3])
      np.testing.assert_array_equal(tensor.T.read((slice(1, 3), slice(2, 6))), array.T[1:3, 2:6])


def sealed(header, content=b''):
  text = header if isinstance(header, bytes) else json.dumps(header).encode()
  return len(text).to_bytes(8, 'little') + text + content


def entry(begin, end, dtype='F32', shape=(1,)):
  return {'dtype': dtype, 'shape': shape, 'data_offsets': [begin, end]}


LIES = {
  'nothing': b'',
  'a length beyond the file': (2**62).to_bytes(8, 'little') + b'{}',
  'a length of 100 MB': sealed(b' ' * 10**8),
  'a list': sealed([1]),
  'no JSON': sealed(b'{"a": '),
  'many brackets': sealed(b'[' * 10**5),
  'bytes beyond the file': sealed({'a': entry(0, 4)}, b'abc'),
  'bytes that nobody has': sealed({'a': entry(0, 4)}, b'abcdefgh'),
  'a hole': sealed({'a': entry(0, 4), 'b': entry(8, 12)}, bytes(12)),
  'an overlap': sealed({'a': entry(0, 8, shape=[2]), 'b': entry(4, 12, shape=[2])}, bytes(12)),
  'a product of another size': sealed({'a': entry(0, 4, shape=[2])}, bytes(4)),
  'a dtype of another size': sealed({'a': entry(0, 4, 'F64')}, bytes(4)),
  'a negative size': sealed({'a': entry(0, 4, shape=[-1])}, bytes(4)),
  'sizes whose product overflows': sealed({'a': entry(0, 0, shape=[2**62, 2**62])}),
  'texts for sizes': sealed({'a': entry(0, 4, shape=['1'])}, bytes(4)),
  'a truth for a size': sealed({'a': entry(0, 4, shape=[True])}, bytes(4)),
  'three offsets': sealed({'a': entry(0, 4) | {'data_offsets': [0, 4, 4]}}, bytes(4)),
  'no dtype': sealed({'a': {'shape': [1], 'data_offsets': [0, 4]}}, bytes(4)),
  'a name twice': sealed(
    b'{"a": ' + json.dumps(entry(0, 8, shape=[1, 2])).encode()
    + b', "a": ' + json.dumps(entry(0, 8, shape=[2, 1])).encode() + b'}', bytes(8)),
  'a name that a terminal obeys': sealed({'\x1b[2J': entry(0, 4)}, bytes(4)),
  'metadata of numbers': sealed({'__metadata__': {'a': 1}}),
}  # fmt: skip


@pytest.mark.parametrize('content', LIES.values(), ids=LIES)
def test_a_header_that_lies_is_refused(tmp_path, content):
  file = tmp_path / 'a.safetensors'
  file.write_bytes(content)
  with pytest.raises(StorageError, match=r'a.safetensors is not a whole safetensors file') as error:
    in_files(tmp_path)
  said = message_of(error.value)
  assert '\n' not in said and '\x1b' not in said and len(said) < 600


def test_what_is_no_file_is_refused_at_once(tmp_path):
  file = tmp_path / 'model.safetensors'
  os.mkfifo(file)
  with pytest.raises(StorageError, match='it is not a regular file'):
    in_files(tmp_path)
  file.unlink()
  file.symlink_to('/dev/zero')
  with pytest.raises(StorageError, match='it is not a regular file'):
    in_files(tmp_path)
  file.unlink()
  file.symlink_to(tmp_path / 'nothing')
  with pytest.raises(StorageError, match='is not a whole safetensors file'):
    in_files(tmp_path)
  file.unlink()
  file.mkdir()
  with pytest.raises(StorageError, match='it is not a regular file'):
    in_files(tmp_path)
  file.rmdir()
  with open(file, 'wb') as sparse:
    sparse.truncate(20 * 2**30)
  with pytest.raises(StorageError, match='is not a whole safetensors file'):
    in_files(tmp_path)
  for name in ('config.json', INDEX):
    save(file, a=1)
    os.mkfifo(tmp_path / name)
    with pytest.raises(StorageError, match=f'{name} cannot be read'):
      source.open_source(str(tmp_path))
    (tmp_path / name).unlink()


def test_a_file_that_changes_while_it_is_read_is_named(tmp_path):
  file = tmp_path / 'a.safetensors'
  save(file, a=1)
  tensor = in_files(file).tensors['a']
  os.truncate(file, file.stat().st_size - 4)
  with pytest.raises(StorageError, match='has changed since it was opened'):
    tensor.read((slice(None),))
  save(tmp_path / 'b.safetensors', a=2)
  (tmp_path / 'b.safetensors').replace(file)
  with pytest.raises(StorageError, match='has changed since it was opened'):
    tensor.read((slice(None),))


def test_a_configuration_with_a_field_twice_is_refused(tmp_path):
  save(tmp_path / 'model.safetensors', a=1)
  (tmp_path / 'config.json').write_text('{"rope_theta": 1e4, "rope_theta": 5e5}')
  with pytest.raises(StorageError, match="has the field 'rope_theta' twice"):
    source.open_source(str(tmp_path))
