"""Clients of Google Cloud Storage see of faults.fake_gcs what the service lets them see."""

import io
import os
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request

from google.api_core import exceptions
from google.cloud import storage
from google.cloud.storage.retry import DEFAULT_RETRY
import pytest
import tensorstore

from faults.fake_faults import on, reads_of, writes_of
from faults.fake_gcs import FakeGcs

QUICK = DEFAULT_RETRY.with_delay(initial=0.01, maximum=0.02)
MEBI = 1 << 20


@pytest.fixture
def server(monkeypatch):
  with FakeGcs('bucket', 'other') as server:
    for name, value in server.environment.items():
      monkeypatch.setenv(name, value)
    yield server


@pytest.fixture
def bucket(server):
  return storage.Client().bucket('bucket')


def open_kvstore(path=''):
  retries = {'max_retries': 20, 'initial_delay': '1ms', 'max_delay': '5ms'}
  spec = {'driver': 'gcs', 'bucket': 'bucket', 'path': path, 'gcs_request_retries': retries}
  return tensorstore.KvStore.open(spec).result()


def write(bucket, *names):
  for name in names:
    bucket.blob(name).upload_from_string(name)


def test_an_object_is_what_was_written_and_has_its_checksums(server, bucket):
  blob = bucket.blob('a/ü ?#%.txt')
  blob.upload_from_string('hello', content_type='text/plain', if_generation_match=0)
  found = bucket.get_blob('a/ü ?#%.txt')
  assert found.download_as_bytes() == b'hello'
  assert found.download_as_bytes(start=1, end=2) == b'el'
  assert (found.size, found.content_type, found.metageneration) == (5, 'text/plain', 1)
  assert found.md5_hash == 'XUFAKrxLKna5cZ2REBfFkg==' and found.crc32c == 'mnG7TA=='
  assert found.updated == found.time_created
  assert bucket.get_blob('none') is None and bucket.exists()
  assert not storage.Client().bucket('absent').exists()


def test_generations_and_preconditions(server, bucket):
  blob = bucket.blob('x')
  blob.upload_from_string('1', if_generation_match=0)
  first = blob.generation
  with pytest.raises(exceptions.PreconditionFailed):
    bucket.blob('x').upload_from_string('2', if_generation_match=0)
  blob.upload_from_string('2', if_generation_match=first)
  assert blob.generation > first
  for call in (blob.delete, blob.download_as_bytes, blob.reload, blob.patch):
    with pytest.raises(exceptions.PreconditionFailed):
      call(if_generation_match=first)
  with pytest.raises(exceptions.NotModified):
    blob.reload(if_generation_not_match=blob.generation)
  with pytest.raises(exceptions.PreconditionFailed):
    bucket.copy_blob(blob, bucket, 'y', if_source_generation_match=first)
  with pytest.raises(exceptions.PreconditionFailed):
    bucket.blob('y').compose([blob], if_generation_match=first)
  blob.metadata = {'key': 'value'}
  blob.patch(if_metageneration_match=1)
  with pytest.raises(exceptions.PreconditionFailed):
    blob.patch(if_metageneration_match=1)
  assert (bucket.get_blob('x').metadata, blob.metageneration) == ({'key': 'value'}, 2)
  blob.delete(if_generation_match=blob.generation)
  assert not server.objects()


def test_of_many_that_create_one_object_one_succeeds(server, bucket):
  made = []

  def create(number):
    try:
      bucket.blob('lock').upload_from_string(str(number), if_generation_match=0)
      made.append(number)
    except exceptions.PreconditionFailed:
      pass

  threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert [str(number).encode() for number in made] == [server.objects()['lock'].data]


def test_lists_come_in_pages_with_prefixes_and_ranges(server, bucket):
  write(bucket, 'a/1', 'a/2', 'a/b/3', 'a/b/4', 'a/c/', 'z')
  client = storage.Client()

  def names(**query):
    pages = client.list_blobs('bucket', page_size=2, **query)
    return [blob.name for blob in pages], sorted(pages.prefixes)

  assert names() == (['a/1', 'a/2', 'a/b/3', 'a/b/4', 'a/c/', 'z'], [])
  assert names(prefix='a/', delimiter='/') == (['a/1', 'a/2'], ['a/b/', 'a/c/'])
  assert names(delimiter='/', include_trailing_delimiter=True) == (['z'], ['a/'])
  assert names(prefix='a/', delimiter='/', include_trailing_delimiter=True)[0][-1] == 'a/c/'
  assert names(start_offset='a/2', end_offset='a/c') == (['a/2', 'a/b/3', 'a/b/4'], [])


def test_a_composed_object_has_no_md5_and_may_be_its_own_source(server, bucket):
  write(bucket, 'one', 'two')
  whole = bucket.blob('one')
  whole.compose([bucket.blob('one'), bucket.blob('two')])
  assert whole.download_as_bytes() == b'onetwo'
  assert (whole.md5_hash, whole.component_count) == (None, 2) and whole.crc32c
  with pytest.raises(exceptions.NotFound):
    whole.compose([bucket.blob('none')])


def test_copies(server, bucket):
  write(bucket, 'x')
  bucket.copy_blob(bucket.blob('x'), storage.Client().bucket('other'), 'y')
  assert bucket.blob('z').rewrite(bucket.blob('x')) == (None, 1, 1)
  assert list(server.objects()) == ['x', 'z'] and list(server.objects('other')) == ['y']


def test_a_batch_deletes_each_object_on_its_own(server, bucket):
  write(bucket, 'a', 'b', 'c')
  with storage.Client().batch(raise_exception=False) as batch:
    for name in ('a', 'none', 'b'):
      storage.Client.bucket(batch._client, 'bucket').blob(name).delete()
  assert list(server.objects()) == ['c']
  assert [answer.status_code for answer in batch._responses] == [204, 404, 204]


def test_a_resumable_upload_goes_on_after_lost_answers_and_errors(server, bucket):
  data = os.urandom(3 * MEBI + 5)
  server.lose(on('PUT'))
  server.fail(503, on('PUT'), times=1)
  blob = bucket.blob('big', chunk_size=MEBI)
  blob.upload_from_file(io.BytesIO(data), if_generation_match=0, retry=QUICK)
  assert server.objects()['big'].data == data
  assert sum('upload_id' in call.query for call in server.calls) > 4
  with pytest.raises(exceptions.PreconditionFailed):
    blob.upload_from_file(io.BytesIO(data), if_generation_match=0)


# Its packages read the address of the server that gives tokens when they are imported.
OF_GCSFS = """
import gcsfs

files = gcsfs.GCSFileSystem()
data = bytes(range(256)) * 4096
files.pipe({'bucket/d/1': b'1', 'bucket/d/e/2': b'2'})
with files.open('bucket/d/big', 'wb', block_size=2**19) as file:
  file.write(data)
assert files.cat('bucket/d/big') == data
assert files.cat_file('bucket/d/big', start=7, end=9) == data[7:9]
assert files.find('bucket/d') == ['bucket/d/1', 'bucket/d/big', 'bucket/d/e/2']
assert files.ls('bucket/d', detail=False) == ['bucket/d/1', 'bucket/d/big', 'bucket/d/e']
files.mv('bucket/d/e/2', 'bucket/moved')
files.rm('bucket/d', recursive=True)
"""


def test_gcsfs_writes_reads_moves_and_deletes(server):
  server.require_tokens()
  subprocess.run([sys.executable, '-c', OF_GCSFS], check=True)
  assert [(name, one.data) for name, one in server.objects().items()] == [('moved', b'2')]


def test_tensorstore_writes_conditionally_and_pages(server):
  kvstore = open_kvstore('ts/')
  absent = kvstore.read('k').result().stamp.generation
  made = kvstore.write('k', b'v', if_equal=absent).result().generation
  assert not kvstore.write('k', b'w', if_equal=absent).result().generation
  assert kvstore.write('k', b'w', if_equal=made).result().generation
  assert kvstore.read('k').result().value == b'w'
  server.put('other', b'')
  assert kvstore.list().result() == [b'k']
  kvstore.delete_range(tensorstore.KvStore.KeyRange('a', 'z')).result()
  assert list(server.objects()) == ['other']


@pytest.mark.parametrize('status', [429, 500, 503])
def test_a_burst_of_errors_passes(server, bucket, status):
  write(bucket, 'x')
  burst = server.fail(status, reads_of('bucket/x'), times=4)
  assert open_kvstore().read('x').result().value == b'x' and burst.injected == 4
  burst = server.fail(status, on('GET'), times=2)
  assert bucket.blob('x').download_as_bytes(retry=QUICK) == b'x' and burst.injected == 2


def test_errors_by_chance_have_a_seed(server):
  fault = server.fail(503, writes_of(), probability=0.5)
  for number in range(20):
    open_kvstore().write(str(number), b'x').result()
  assert len(server.objects()) == 20 and fault.injected > 0


def test_a_torn_upload_makes_no_object_and_is_repeated(server):
  data = os.urandom(MEBI)
  address = server.url.removeprefix('http://').split(':')
  with socket.create_connection((address[0], int(address[1]))) as connection:
    head = 'POST /upload/storage/v1/b/bucket/o?uploadType=media&name=x HTTP/1.1\r\n'
    connection.sendall(f'{head}Content-Length: {MEBI}\r\n\r\n'.encode() + data[:1000])
  torn = server.tear(writes_of('bucket/y'))
  open_kvstore().write('y', data).result()
  assert torn.injected == 1 and {name: one.data for name, one in server.objects().items()} == {
    'y': data
  }
  torn = server.tear(reads_of('bucket/y'))
  assert open_kvstore().read('y').result().value == data and torn.injected == 1


def test_a_conditional_write_whose_answer_is_lost_finds_its_own_object(server):
  kvstore = open_kvstore()
  absent = kvstore.read('lock').result().stamp.generation
  server.lose(writes_of('bucket/lock'))
  assert not kvstore.write('lock', b'mine', if_equal=absent).result().generation
  assert kvstore.read('lock').result().value == b'mine'


def test_a_held_request_takes_effect_when_it_is_released(server):
  held = server.hold(writes_of('bucket/x'), times=1)
  writing = open_kvstore().write('x', b'late')
  assert held.wait(60)
  server.put('x', b'between')
  held.end()
  writing.result()
  assert server.objects()['x'].data == b'late'


# tensorstore keeps one token for the whole process.
CHILD = """
import sys, tensorstore
kvstore = tensorstore.KvStore.open({'driver': 'gcs', 'bucket': 'bucket'}).result()
for line in sys.stdin:
  try:
    print(kvstore.read('x').result().value.decode(), flush=True)
  except ValueError as error:
    print(str(error)[:17], flush=True)
"""


def test_an_expired_token_is_refused_until_a_new_one(server):
  server.put('x', b'data')
  server.require_tokens()
  server.token_seconds = 1  # by the server's word: the client asks for a new one each time
  with pytest.raises(urllib.error.HTTPError, match='401'):
    urllib.request.urlopen(f'{server.url}/storage/v1/b/bucket/o/x')
  command, pipe = [sys.executable, '-c', CHILD], subprocess.PIPE
  with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as child:

    def read():
      print(file=child.stdin, flush=True)
      return child.stdout.readline().strip()

    assert read() == 'data'
    server.expire_tokens()
    assert read() == 'data'
    server.token_seconds = 3600
    assert read() == 'data'
    server.expire_tokens()
    assert read() == 'PERMISSION_DENIED'
    child.stdin.close()


def test_a_server_that_ended_answers_no_more(server):
  kvstore = open_kvstore()
  kvstore.write('x', b'x').result()
  server.__exit__()
  with pytest.raises(ValueError, match='Could not connect'):
    kvstore.read('x').result()
