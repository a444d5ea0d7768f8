"""Texts and token stores in buckets of Cloud Storage and S3."""

import functools
import gzip
import io
import json
import shutil
import signal
import subprocess
import sys
import threading
import time

from faults.fake_faults import on
from faults.fake_gcs import FakeGcs
from faults.fake_s3 import FakeS3
import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet
import pytest

from valkyrie.data import store_builder, token_store, vocabularies
from valkyrie.data.feed import TaskFeed
from valkyrie.data.records import Records
from valkyrie.data.selection import Selection
from valkyrie.data.source_files import SourceFiles
from valkyrie.data.store_location import open_store, store_path
from valkyrie.data.store_writer import Document, StoreWriter
from valkyrie.errors import ConfigurationError, DataError, StorageError

BYTES = vocabularies.ByteVocabulary()
LETTERS = Selection('letters', 'train', BYTES)
STORE = LETTERS.name
FILES = 2 * 4  # arrays of a store of two shards


@pytest.fixture(params=[('gs', FakeGcs), ('s3', FakeS3)], ids=['gs', 's3'])
def service(request, monkeypatch):
  """(scheme, server)"""
  scheme, kind = request.param
  with kind() as server:
    for name, value in server.environment.items():
      monkeypatch.setenv(name, value)
    yield scheme, server


@pytest.fixture
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv('VALKYRIE_CACHE', str(tmp_path / 'cache'))
  return tmp_path / 'cache'


def texts(location):
  return sorted(row['text'] for row in Records(location, ['text']).rows(0, 1))


def test_a_location_is_a_file_a_folder_or_a_pattern(service):
  scheme, server = service
  for name in ('d/a.txt', 'd/b/ü [1] %#+.txt', 'd/.hidden/c.txt', 'e/d.txt', 'd/e.png'):
    server.put(name, name.encode())

  def names(location):
    files = SourceFiles(f'{scheme}://bucket/{location}')
    return [file.path.removeprefix('bucket/') for file in files.files]

  assert names('d') == ['d/a.txt', 'd/b/ü [1] %#+.txt']
  assert names('d/a.txt') == names('d/*.txt') == names('d/[ab].txt') == ['d/a.txt']
  assert names('**/[de]*.*') == ['d/e.png', 'e/d.txt']
  assert names('d/b/ü *.txt') == names('d/b/%C3%BC%20*.txt') == ['d/b/ü [1] %#+.txt']


def test_texts_of_several_formats(service):
  scheme, server = service
  rows = [json.dumps({'text': text}).encode() for text in ('one', 'two')]
  server.put('d/1.jsonl.gz', gzip.compress(b'\n'.join(rows)))
  server.put('d/3.txt', b'three')
  assert texts(f'{scheme}://bucket/d') == ['one', 'three', 'two']


def test_parquet(service):
  scheme, server = service
  file = io.BytesIO()
  pa.parquet.write_table(pa.table({'text': ['a', 'b', 'c'], 'n': [1, 2, 3]}), file, 2)
  server.put('d/x.parquet', file.getvalue())
  # In another process, since pyarrow keeps the interpreter's lock while it opens such a file.
  code = f"""

from valkyrie.data.records import Records

records = Records('{scheme}://bucket/d', ['text'])
print([[row['text'] for row in records.rows(part, 2)] for part in range(2)])
"""
  done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=False)
  assert done.stdout.strip() == str([['a', 'b'], ['c']]), done.stderr


def test_passing_errors_are_retried(service):
  scheme, server = service
  server.put('d/a.txt', b'a' * 100_000)
  faults = [server.fail(503, on('GET', 'bucket/d/'), times=1)]
  faults += [server.tear(on('GET', 'bucket/d/a.txt'))]
  assert texts(f'{scheme}://bucket/d') == ['a' * 100_000]
  assert [fault.injected for fault in faults] == [1, 1]


@pytest.mark.parametrize('service', [('gs', FakeGcs)], indirect=True)
def test_an_outage_ends_with_the_address(service):
  service[1].fail(503)
  with pytest.raises(StorageError, match=r'gs://bucket/d.*Check the address and the network'):
    SourceFiles('gs://bucket/d?retry_limit_seconds=1')


def test_denied_access_says_how_to_get_it(service):
  scheme, server = service
  server.put('d/a.txt', b'text')
  advice = {'gs': 'gcloud auth application-default login', 's3': 'AWS_ACCESS_KEY_ID'}[scheme]
  records = Records(f'{scheme}://bucket/d', ['text'])
  server.fail(403)
  with pytest.raises(StorageError, match=f'{scheme}://bucket/d cannot be listed.*{advice}'):
    SourceFiles(f'{scheme}://bucket/d')
  with pytest.raises(StorageError, match=f'bucket/d/a.txt cannot be read.*{advice}'):
    list(records.rows(0, 1))


@pytest.mark.parametrize('missing', ['absent/d', 'bucket/absent', 'bucket/absent/*.txt'])
def test_a_missing_place_is_named(service, missing):
  address = f'{service[0]}://{missing}'
  with pytest.raises(DataError) as caught:
    SourceFiles(address)
  assert address in str(caught.value)


def test_a_file_that_changes_or_goes_after_the_listing_is_refused(service):
  scheme, server = service
  server.put('d/a.txt', b'text')
  server.put('d/b.txt', b'text')
  records = Records(f'{scheme}://bucket/d', ['text'])
  server.put('d/a.txt', b'longer text')
  with pytest.raises(DataError, match=r'a\.txt has changed.* 4 bytes: it has 11'):
    list(records.rows(0, 2))
  server.delete('d/b.txt')
  with pytest.raises(DataError, match=r'bucket/d/b\.txt is missing'):
    list(records.rows(1, 2))


def test_shards_of_two_texts_never_join(service, tmp_path):
  scheme, server = service
  server.put('d/a.jsonl', b'{"text": "Text 1"}\n{"text": "Text 2"}')
  selection = Selection('text', 'train', BYTES, f'{scheme}://bucket/d')
  build = functools.partial(store_builder.build, selection, tmp_path, shards=2)
  assert build(shard=0) is None
  time.sleep(1.1)  # buckets know seconds
  server.put('d/a.jsonl', b'{"text": "Next 1"}\n{"text": "Next 2"}')
  for _ in range(2):
    with pytest.raises(DataError, match=rf'{scheme}://bucket/d has now \(1 changed: a\.jsonl\)'):
      build(shard=1)
  shutil.rmtree(tmp_path)
  information = build()
  assert [entry[3] for entry in information['origin']['files']] == [None]
  assert build() == information
  time.sleep(1.1)
  server.put('d/a.jsonl', b'{"text": "Text 1"}\n{"text": "Text 2"}')
  with pytest.raises(DataError, match=r'1 changed: a\.jsonl.* --rebuild'):
    build()


def test_a_key_in_an_address_is_not_said(service):
  address = f's3://key:hunter2@bucket/absent?endpoint_override={service[1].url}'
  for read in (SourceFiles, lambda place: open_store(LETTERS, place)):
    with pytest.raises((DataError, StorageError)) as caught:
      read(address)
    assert 'bucket/absent' in str(caught.value) and 'hunter2' not in str(caught.value)


def documents(shard, seed=0):
  rng = np.random.RandomState(10 * seed + shard)
  return [Document(rng.randint(3, 259, n), n) for n in (5, 300, 7)]


def upload(server, folder, seed=0):
  """Puts a store at the address of its task, and keeps it in `folder`."""
  StoreWriter(folder, LETTERS, {}, 2).write(lambda shard: documents(shard, seed))
  for file in folder.rglob('*.*'):
    if file.is_file() and not file.name.startswith('.'):
      server.put(f'stores/{STORE}/{file.relative_to(folder)}', file.read_bytes())
  return token_store.TokenStore.open(folder, BYTES)


def opened(scheme):
  return open_store(LETTERS, f'{scheme}://bucket/stores')


def reads(server):
  """The names of the arrays whose bytes were read."""
  found = [call for call in server.calls if call.target.endswith('.npy') and call.method == 'GET']
  return [call.target for call in found if not call.path.startswith('/storage/')]  # of metadata


def test_a_store_is_copied_once_and_read(service, cache, tmp_path):
  scheme, server = service
  original = upload(server, tmp_path / 'original')
  feed = TaskFeed('letters', 'train', 2, 0, data_dir=f'{scheme}://bucket/stores/')
  local = TaskFeed('letters', 'train', 2, 0, data_dir=str(tmp_path / 'stores'))
  local.__dict__['store'] = original
  for ours, expected in zip(feed.read(0, 500), local.read(0, 500), strict=True):
    np.testing.assert_array_equal(ours, expected)
  assert feed.store.path.parent == cache
  token_store.verify(feed.store.path)
  assert len(set(reads(server))) == FILES
  server.calls.clear()
  assert opened(scheme).fingerprint == original.fingerprint
  assert not reads(server)


def test_a_store_that_replaces_another_is_copied_too(service, cache, tmp_path):
  scheme, server = service
  for seed in range(2):
    expected = upload(server, tmp_path / str(seed), seed).fingerprint
    assert opened(scheme).fingerprint == expected
  assert len(list(cache.iterdir())) == 2


def test_two_processes_of_a_machine_copy_once(service, cache, tmp_path):
  scheme, server = service
  upload(server, tmp_path / 'original')
  first = server.hold(on('GET', '.*tokens.npy'), times=1)
  stores = []
  threads = [threading.Thread(target=lambda: stores.append(opened(scheme))) for _ in range(2)]
  for thread in threads:
    thread.start()
  assert first.wait(60)
  first.end()
  for thread in threads:
    thread.join()
  assert stores[0].path == stores[1].path and len(stores[0].lengths) == 6
  assert len(reads(server)) == FILES


def test_a_killed_copy_goes_on_with_the_files_that_are_missing(service, cache, tmp_path):
  scheme, server = service
  upload(server, tmp_path / 'original')
  torn = server.hold(on('GET', '.*shard-00001.*tokens.npy', '(?!/storage/).*'), times=1)
  code = f"""
from valkyrie.data import vocabularies
from valkyrie.data.store_location import open_store
from valkyrie.data.selection import Selection

selection = Selection('letters', 'train', vocabularies.load('bytes'))
open_store(selection, '{scheme}://bucket/stores')
"""
  with subprocess.Popen([sys.executable, '-c', code]) as child:
    assert torn.wait(60)
    child.send_signal(signal.SIGKILL)
  torn.end()
  (copy,) = cache.iterdir()
  (copy / '.part').write_bytes(b'torn')
  before = set(reads(server))
  server.calls.clear()
  token_store.verify(opened(scheme).path)
  assert len(before) == FILES and reads(server) == [f'bucket/stores/{STORE}/{last(copy)}']


def last(copy):
  return f'{max(path.name for path in copy.glob("shard-*"))}/tokens.npy'


def test_what_is_no_finished_store_is_refused(service, cache, tmp_path):
  scheme, server = service
  upload(server, tmp_path / 'original')
  server.delete(f'stores/{STORE}/store.json')
  with pytest.raises(DataError) as caught:
    opened(scheme)
  for words in (f'{scheme}://bucket/stores/{STORE} is not a finished', '--output=', ' cp --rec'):
    assert words in str(caught.value)


def test_a_file_that_is_damaged_or_missing_is_named(service, cache, tmp_path):
  scheme, server = service
  upload(server, tmp_path / 'original')
  name = f'stores/{STORE}/shard-00001-of-00002/tokens.npy'
  whole = server.objects()[name].data
  server.put(name, whole[:-1] + b'x')
  with pytest.raises(DataError, match=f'{name} has the SHA-256'):
    opened(scheme)
  server.delete(name)
  with pytest.raises(DataError, match=r'lacks shard-00001-of-00002/tokens\.npy'):
    opened(scheme)
  server.put(name, whole)
  token_store.verify(opened(scheme).path)


def test_a_store_that_does_not_fit_is_refused_before_it_is_copied(service, cache, tmp_path):
  scheme, server = service
  upload(server, tmp_path / 'original')
  information = json.loads((tmp_path / 'original' / 'store.json').read_text())
  information['shards'][0]['files']['tokens.npy']['bytes'] = 10**18
  del information['sha256']
  information['sha256'] = token_store.content_hash(information)
  server.put(f'stores/{STORE}/store.json', json.dumps(information).encode())
  with pytest.raises(StorageError, match=f'{cache}.* needs 1e.09 GB, but .* VALKYRIE_CACHE'):
    opened(scheme)
  assert not reads(server)


def test_a_denied_store_says_how_to_get_access(service, cache):
  scheme, server = service
  server.fail(403)
  with pytest.raises(StorageError, match=f'{scheme}://bucket/stores/.*store.json cannot be read'):
    opened(scheme)


@pytest.mark.parametrize('address', ['s3://', 'gs://', 's3:///data', 'gs://anonymous@', 'gcs:///'])
def test_an_address_without_a_bucket_is_refused(cache, address):
  """pyarrow takes the next name for the bucket: the store's, or the first folder's."""
  scheme, _, _ = address.partition(':')
  message = rf'://.* names no bucket after {scheme}://\. Use {scheme}://BUCKET/FOLDER'
  with pytest.raises(ConfigurationError, match=message):
    open_store(LETTERS, address)
  with pytest.raises(ConfigurationError, match=message):
    texts(address)


def test_a_store_is_not_built_at_an_address():
  with pytest.raises(ConfigurationError, match='gs://bucket/stores'):
    store_path(LETTERS, 'gs://bucket/stores')
