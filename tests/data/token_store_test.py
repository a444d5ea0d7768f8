"""Token stores: reading the written documents, and messages that name a damage."""

import json
import threading

import numpy as np
import pytest

from valkyrie.data import shard_arrays, token_store, vocabularies
from valkyrie.data.selection import Selection
from valkyrie.data.store_writer import Document, StoreWriter
from valkyrie.data.token_store import TokenStore
from valkyrie.errors import ConfigurationError, DataError

BYTES = vocabularies.ByteVocabulary()
LENGTHS = [5, 0, 2, 1, 300, 7, 40]
SHARDS = 3


def _documents(shard):
  rng = np.random.RandomState(shard)
  return [Document(rng.randint(3, 259, n), n, sequence_key=str(n % 2)) for n in LENGTHS]


def _writer(path, vocabulary=BYTES, source=1, shards=SHARDS):
  return StoreWriter(path, Selection('t', 's', vocabulary), {'a': source}, shards)


@pytest.fixture
def store(tmp_path):
  _writer(tmp_path / 'store').write(_documents)
  return tmp_path / 'store'


def test_documents_are_read_as_written_with_a_final_eos(store):
  opened = TokenStore.open(store, BYTES)
  written = [d for shard in range(SHARDS) for d in _documents(shard) if len(d.tokens) > 1]
  whole = [np.append(d.tokens, BYTES.eos_id) for d in written]
  np.testing.assert_array_equal(opened.lengths, [len(d) for d in whole])
  numbers = np.arange(len(whole))
  read = opened.read(numbers, 0 * numbers, opened.lengths)
  np.testing.assert_array_equal(read, np.concatenate(whole))
  # Without first token and EOS, in reverse order.
  read = opened.read(numbers[::-1], 0 * numbers + 1, opened.lengths[::-1] - 2)
  np.testing.assert_array_equal(read, np.concatenate([d[1:-1] for d in whole[::-1]]))
  assert len(set(opened.sequence_keys.tolist())) == 2
  assert opened.sequence_keys[0] == opened.sequence_keys[3]  # of odd length, as written
  assert opened.tokens == sum(len(d) for d in whole)


def test_skipped_documents_are_counted(store):
  information = token_store.verify(store)
  counts = {key: information[key] for key in ('documents', 'skipped_empty', 'skipped_one_token')}
  assert counts == {'documents': 15, 'skipped_empty': 3, 'skipped_one_token': 3}
  assert information['text_bytes'] == 3 * (5 + 2 + 300 + 7 + 40)


def test_tokens_of_large_vocabularies_have_four_bytes(tmp_path):
  class Large(vocabularies.ByteVocabulary):
    size = 100_000

  documents = [Document(np.array([99_999, 65_536]), 2)]
  _writer(tmp_path, Large(), shards=1).write(lambda _: documents)
  read = TokenStore.open(tmp_path, Large()).read(np.array([0]), np.array([0]), np.array([3]))
  assert read.tolist() == [99_999, 65_536, 1]


def test_a_continued_build_keeps_finished_shards_and_rebuilds_others(store, tmp_path):
  expected = token_store.read_information(store)['fingerprint']
  other = tmp_path / 'other'

  def dies(shard):
    yield from _documents(shard)[:5]
    raise KeyboardInterrupt

  _writer(other).write_shard(1, _documents(1))
  finished = (other / 'shard-00001-of-00003' / 'tokens.npy').stat()
  with pytest.raises(KeyboardInterrupt):
    _writer(other).write_shard(0, dies(0))
  assert _writer(other).finish() is None
  with pytest.raises(DataError, match='not a finished token store'):
    TokenStore.open(other, BYTES)
  assert _writer(other).write(_documents)['fingerprint'] == expected
  assert (other / 'shard-00001-of-00003' / 'tokens.npy').stat() == finished
  assert not [file for file in other.iterdir() if file.name.startswith('.')]


def test_two_builders_of_one_store_at_once(store, tmp_path):
  found = []

  def build():
    found.append(_writer(tmp_path / 'both').write(_documents))

  threads = [threading.Thread(target=build) for _ in range(2)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert found == [token_store.verify(store)] * 2


def test_shards_of_another_source_are_not_mixed_in(tmp_path):
  _writer(tmp_path).write_shard(0, _documents(0))
  with pytest.raises(ConfigurationError, match=r"another source: found \{'a': 1\}.*\{'a': 2\}"):
    _writer(tmp_path, source=2).write(_documents)


@pytest.mark.parametrize('name', ['tokens.npy', 'offsets.npy', 'keys.npy'])
def test_messages_name_missing_empty_and_truncated_files(store, name):
  file = store / 'shard-00002-of-00003' / name
  content = file.read_bytes()
  file.write_bytes(content[:-1])
  with pytest.raises(DataError, match=rf'shard-00002-of-00003/{name} is truncated'):
    TokenStore.open(store, BYTES)
  file.write_bytes(b'')
  with pytest.raises(DataError, match=rf'shard-00002-of-00003/{name} is empty'):
    TokenStore.open(store, BYTES)
  file.unlink()
  with pytest.raises(DataError, match=rf'lacks .*shard-00002-of-00003/{name}'):
    TokenStore.open(store, BYTES)


def test_verify_finds_a_flipped_bit_of_the_tokens(store):
  file = store / 'shard-00001-of-00003' / 'tokens.npy'
  content = bytearray(file.read_bytes())
  content[-9] ^= 1
  file.write_bytes(content)
  with pytest.raises(DataError, match=r'shard-00001-of-00003/tokens\.npy is corrupt'):
    token_store.verify(store)


@pytest.mark.parametrize('name', ['offsets.npy', 'hashes.npy', 'keys.npy'])
def test_opening_a_store_finds_a_flipped_bit_beside_the_tokens(store, name):
  file = store / 'shard-00000-of-00003' / name
  for place in (7, 60, 130, -3):
    content = bytearray(file.read_bytes())
    content[place] ^= 4
    file.write_bytes(content)
    with pytest.raises(DataError, match=rf'shard-00000-of-00003/{name} is corrupt'):
      TokenStore.open(store, BYTES)
    content[place] ^= 4
    file.write_bytes(content)
  TokenStore.open(store, BYTES)


def test_a_header_with_another_dtype_is_refused(store):
  file = store / 'shard-00000-of-00003' / 'tokens.npy'
  content = file.read_bytes()
  file.write_bytes(content.replace(b'<u2', b'>u2'))
  with pytest.raises(DataError, match=r'tokens\.npy is corrupt: it has >u2'):
    TokenStore.open(store, BYTES)


@pytest.mark.parametrize('name', ['shards', 'text_bytes', 'split', 'fingerprint', 'sha256'])
def test_an_altered_store_json_is_refused(store, name):
  information = json.loads((store / 'store.json').read_text())
  information[name] = None
  (store / 'store.json').write_text(json.dumps(information))
  with pytest.raises(DataError, match=r'store\.json is corrupt'):
    TokenStore.open(store, BYTES)


@pytest.mark.parametrize(
  ('token', 'message'), [(259, 'has the token 259, but there are 259 ids'), (100, 'have the hash')]
)
def test_a_damaged_document_is_located(store, token, message):
  tokens = np.load(store / 'shard-00001-of-00003' / 'tokens.npy', mmap_mode='r+')
  tokens[12] = token  # of the third stored document, which begins after 6 + 3 tokens
  tokens.flush()
  opened = TokenStore.open(store, BYTES)
  assert np.flatnonzero(opened.damaged(np.arange(15))).tolist() == [7]
  place = f'document 2 of shard-00001-of-00003 in the token store {store}'
  assert opened.damage(7).startswith(place) and message in opened.damage(7)
  assert opened.damage(6) is None


def test_a_token_outside_the_vocabulary_is_not_written(tmp_path):
  with pytest.raises(DataError, match=r'Document 0 of shard 0.*token ids from 3 to 259'):
    _writer(tmp_path).write(lambda _: [Document(np.array([3, 259]), 2)])


def test_another_vocabulary_is_refused(store):
  other = vocabularies.ByteVocabulary()
  other.fingerprint = 'sentencepiece-abc'
  with pytest.raises(ConfigurationError, match=r'built with .*bytes .*asks for sentencepiece-abc'):
    TokenStore.open(store, other)


@pytest.mark.parametrize(
  ('content', 'message'),
  [('{', 'cannot be read'), ('[]', 'a JSON object was expected'), ('{"format": "x"}', "'x'")],
)
def test_an_invalid_store_json_is_refused(store, content, message):
  (store / 'store.json').write_text(content)
  with pytest.raises(DataError, match=message):
    TokenStore.open(store, BYTES)


def test_mostly_empty_sources_are_refused(tmp_path):
  empty = [Document(np.array([], np.int32), 0)] * 2 + [Document(np.array([5, 6]), 2)]
  with pytest.raises(DataError, match=r'6 of 9 documents .* are empty'):
    _writer(tmp_path / 'a').write(lambda _: empty)
  with pytest.raises(DataError, match='has no documents'):
    _writer(tmp_path / 'b').write(lambda _: [])


@pytest.mark.parametrize('name', shard_arrays.COUNTS)
def test_an_altered_count_of_a_shard_is_found_before_the_store_is_finished(store, name):
  (store / 'store.json').unlink()
  file = store / 'shard-00001-of-00003' / 'shard.json'
  record = json.loads(file.read_text())
  file.write_text(json.dumps(record | {name: record[name] + 1}))
  with pytest.raises(DataError, match=r'shard\.json is corrupt: its content does not match'):
    _writer(store).finish()
  del record['sha256']  # as versions before 0.3 wrote it
  file.write_text(json.dumps(record))
  assert _writer(store).finish()
  file.write_text(json.dumps(record | {name: 2**63}))
  with pytest.raises(DataError, match=f"'{name}' has {2**63}, expected from 0 to"):
    _writer(store).finish()


def test_tokens_are_plain_npy_files(store):
  recorded = json.loads((store / 'store.json').read_text())
  for shard in recorded['shards']:
    tokens = np.load(store / shard['name'] / 'tokens.npy')
    assert tokens.dtype == np.uint16 and tokens.shape == (shard['tokens'],)


def test_reports_come_by_time_and_add_up(tmp_path, monkeypatch):
  monkeypatch.setattr(shard_arrays, '_REPORT_SECONDS', 0.0)
  reports = []
  documents = [*_documents(0), Document(np.array([], np.int32), 0)] * 3
  _writer(tmp_path).write_shard(0, documents, lambda *read: reports.append(read))
  assert len(reports) > len(documents), 'also of documents that are left out'
  counts = json.loads((_writer(tmp_path).folders[0] / 'shard.json').read_text())
  assert tuple(np.sum(reports, axis=0)) == (counts['documents'], counts['tokens'])
