"""Arrays of a store that change while they are read, or never were what the store says."""

import errno
import json
import os
import shutil

import numpy as np
import pytest

from valkyrie.data import store_arrays, store_writer, token_store, vocabularies
from valkyrie.data.feed import TaskFeed
from valkyrie.data.selection import Selection
from valkyrie.data.store_arrays import ArrayFile
from valkyrie.data.token_store import TokenStore
from valkyrie.errors import DataError, StorageError

BYTES = vocabularies.ByteVocabulary()
TEXTS = [f'The text {number}, and some more of it.' for number in range(30)]
INT64 = np.dtype(np.int64)
SHARD = 'shard-00000-of-00002'


@pytest.fixture
def store(tmp_path):
  """A store with prompts, later prompts and duplicates."""
  selection = Selection('letters', 'train', BYTES, unique=True)
  writer = store_writer.StoreWriter(tmp_path / 'store', selection, {}, 2)
  writer.write(
    lambda shard: [
      store_writer.Document(BYTES.ids(text), len(text), None, 3, (5, 7))
      for text in [*TEXTS[shard::2], TEXTS[shard]]
    ]
  )
  return tmp_path / 'store'


def feed_of(path):
  feed = TaskFeed('letters', 'train', 2, 0, bad_documents=0)
  feed.__dict__['store'] = TokenStore.open(path, BYTES)
  return feed


def seal(store, name):
  """Makes store.json fit an array."""
  record = store / 'store.json'
  information = json.loads(record.read_text())
  del information['sha256']
  recorded = token_store.recorded_files(information)[name]
  recorded['bytes'] = (store / name).stat().st_size
  recorded['sha256'] = store_arrays.file_sha256(store / name)
  information['sha256'] = token_store.content_hash(information)
  record.write_text(json.dumps(information))


@pytest.mark.parametrize('size', [0, 100, 128 + 2 * 50])
def test_tokens_that_are_truncated_while_they_are_read_are_named(store, size):
  feed = feed_of(store)
  feed.read(0, 16)
  os.truncate(store / SHARD / 'tokens.npy', size)
  os.truncate(store / SHARD.replace('00000-', '00001-') / 'tokens.npy', size)
  with pytest.raises(
    DataError, match=rf'tokens\.npy is truncated or altered: it has {size:,} byte'
  ):
    feed.read(0, 64)


def test_a_store_that_is_removed_or_replaced_is_read_on(store, tmp_path):
  feed = feed_of(store)
  expected = feed.read(0, 64)
  shutil.copytree(store, tmp_path / 'copy')
  shutil.rmtree(store)
  np.testing.assert_array_equal(feed.read(0, 64).inputs, expected.inputs)
  shutil.copytree(tmp_path / 'copy', store)
  store_arrays._opened.cache_clear()  # as more shards than may be open do
  np.testing.assert_array_equal(feed.read(0, 64).inputs, expected.inputs)
  shutil.rmtree(store)
  store_arrays._opened.cache_clear()
  with pytest.raises(DataError, match=r'The token store lacks .*tokens\.npy'):
    feed.read(0, 64)


def test_what_was_checked_is_checked_again_when_a_file_changes(store):
  feed = feed_of(store)
  feed.read(0, 64)
  for file in store.glob('*/tokens.npy'):
    os.utime(file, (1, 1))
  feed.read(0, 64)  # nothing but the time has changed
  for file in store.glob('*/tokens.npy'):
    content = bytearray(file.read_bytes())
    content[-2::-2] = content[-4::-2] + content[-2:-1]
    file.write_bytes(content)
    os.utime(file, (2, 2))
  with pytest.raises(DataError, match='damaged'):
    feed.read(0, 64)


def test_the_errors_of_a_disk_name_the_file(store, monkeypatch):
  feed = feed_of(store)

  def fails(*_):
    raise OSError(errno.EIO, 'Input/output error')

  monkeypatch.setattr(os, 'preadv', fails)
  with pytest.raises(StorageError, match=r'tokens\.npy cannot be read \(Input/output error\)'):
    feed.read(0, 64)
  with pytest.raises(StorageError, match=r'offsets\.npy cannot be read \(Input/output error\)'):
    TokenStore.open(store, BYTES)


WRONG = {
  'offsets.npy': [
    lambda a: a[::-1].copy(),
    lambda a: a + 1,
    lambda a: a - 1,
    lambda a: a[:-1],
    lambda a: a.astype(np.float64),
    lambda a: a.astype('>i8'),
    lambda a: a[:, None],
    lambda a: np.where(np.arange(len(a)) == 3, a[2], a),
    lambda a: np.where(np.arange(len(a)) == 3, 2**62, a),
    lambda a: np.array(3),
  ],
  'hashes.npy': [lambda a: a[:-1], lambda a: a[:, :8], lambda a: a.astype(np.uint16)],
  'keys.npy': [lambda a: a[:-1], lambda a: a.astype(np.int64), lambda a: a.astype('S8')],
  'prompts.npy': [lambda a: a[1:], lambda a: a + 10**6, lambda a: -a, lambda a: a * 0.5],
  'later_prompts.npy': [lambda a: a[1:], lambda a: a[::-1].copy(), lambda a: a + 10**6],
  'tokens.npy': [lambda a: a[1:], lambda a: a.astype(np.uint32), lambda a: a[None]],
}


@pytest.mark.parametrize('name', WRONG)
def test_arrays_of_a_sealed_store_fit_each_other(store, name):
  file = store / SHARD / name
  right = np.load(file)
  for change in WRONG[name]:
    np.save(file, change(right))
    seal(store, f'{SHARD}/{name}')
    with pytest.raises(DataError, match=rf'{name} is corrupt: '):
      TokenStore.open(store, BYTES)
  np.save(file, right)
  seal(store, f'{SHARD}/{name}')
  assert TokenStore.open(store, BYTES).tokens


@pytest.mark.parametrize(
  'numbers', [[1, 0], [0, 0], [-1], [32], [*range(32)], [0.5], [[0]]], ids=str
)
def test_the_duplicates_of_a_sealed_store_are_some_of_its_documents(store, numbers):
  np.save(store / 'duplicates.npy', np.array(numbers))
  seal(store, 'duplicates.npy')
  with pytest.raises(DataError, match=r'duplicates\.npy is corrupt'):
    TokenStore.open(store, BYTES)


@pytest.mark.parametrize(
  'content', [b'', b'\x93NUMPY', b'\x93NUMPY\1\0\x10\0{"a": ' + b'(' * 300, b'PK\3\4', b'\x80\4.']
)
def test_what_is_no_array_is_refused(tmp_path, content):
  (tmp_path / 'a.npy').write_bytes(content)
  with pytest.raises(DataError, match=r'a\.npy is not a readable array'):
    ArrayFile(tmp_path / 'a.npy', INT64, (3,))


def test_an_array_is_as_large_as_its_header_says(tmp_path):
  file = tmp_path / 'a.npy'
  np.save(file, np.arange(1000))
  assert store_arrays.load(file, np.int64, (None,)).tolist() == [*range(1000)]
  os.truncate(file, 1000)
  with pytest.raises(DataError, match='is truncated or altered: it has 1,000 bytes'):
    store_arrays.load(file, np.int64, (1000,))
  file.write_bytes(file.read_bytes().replace(b'(1000,)', b'(10**9,'))
  with pytest.raises(DataError, match='is not a readable array'):
    store_arrays.load(file, np.int64, (None,))


def test_few_files_stay_open(tmp_path, monkeypatch):
  files = []
  for number in range(100):
    np.save(tmp_path / f'{number}.npy', np.arange(number, number + 3))
    files.append(ArrayFile(tmp_path / f'{number}.npy', INT64, (3,)))
  store_arrays._opened.cache_clear()
  before = len(os.listdir('/dev/fd'))
  for _ in range(2):
    assert [file.read(1, 2).item() for file in files] == [*range(1, 101)]
  assert len(os.listdir('/dev/fd')) - before <= store_arrays._OPEN_FILES
