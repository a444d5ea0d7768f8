"""Stores of real tasks: the standard library, FineWeb's parquet shards, and a user's own task."""

import collections
import importlib
import itertools
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import sysconfig
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from valkyrie.data import build_store, document_source, store_builder, token_store, vocabularies
from valkyrie.data.document_source import TASKS
from valkyrie.data.feed import TaskFeed
from valkyrie.data.records import Records
from valkyrie.data.selection import Selection
from valkyrie.data.token_store import TokenStore
from valkyrie.distributed import heartbeat
from valkyrie.errors import ConfigurationError, DataError

BYTES = vocabularies.ByteVocabulary()
PAGES, PARQUET_FILES, HOSTS, SHARDS = 2000, 3, 1000, 12


def _page(i):
  text = f'Page {i}: ' + 'naïve café ' * (i % 7)
  host = f'site{i % HOSTS}.org'
  return {
    **{'text': text, 'id': f'<urn:{i}>', 'dump': 'CC', 'url': f'https://{host}/{i}'},
    **{'date': '2024', 'file_path': 's3://x', 'language': 'en', 'language_score': 0.9},
    'token_count': len(text),
  }


def _write_pages(directory):
  directory.mkdir()
  for number in range(PARQUET_FILES):
    pages = [_page(i) for i in range(number, PAGES, PARQUET_FILES)]
    if number == 1:
      pages += [{**pages[0], 'text': None}, {**pages[0], 'text': 'x', 'url': 'http://[broken'}]
    table = pa.Table.from_pylist(pages)
    pyarrow.parquet.write_table(table, directory / f'00{number}.parquet', row_group_size=50)


@pytest.fixture(scope='module')
def pages(tmp_path_factory):
  directory = tmp_path_factory.mktemp('fineweb') / 'shards'
  _write_pages(directory)
  return directory


@pytest.fixture(scope='module')
def library(tmp_path_factory):
  """The validation split, built by a feed on first use."""
  options = {'data_dir': str(tmp_path_factory.mktemp('cache')), 'shuffle': False, 'epochs': 1}
  return TaskFeed('python_stdlib', 'validation', 1, 0, **options)


def _build(output, **options):
  how = {name: options.pop(name) for name in ('shards', 'shard', 'processes') if name in options}
  selection = Selection(**({'task': 'fineweb', 'split': 'train', 'vocabulary': BYTES} | options))
  return store_builder.build(selection, output, **how)


@pytest.fixture(scope='module')
def whole(pages, tmp_path_factory):
  """FineWeb's train split, built in one go."""
  path = tmp_path_factory.mktemp('whole')
  return path, _build(path, source=str(pages), shards=SHARDS)


def test_the_store_of_the_library_has_the_bytes_of_its_files(library):
  information = library.store.information
  root = pathlib.Path(sysconfig.get_paths()['stdlib'])
  expected = []
  for path in information['source']['files']:
    content = (root / path).read_bytes()
    if len(content) > 1:
      expected += [*(np.frombuffer(content, np.uint8).astype(int) + 3).tolist(), BYTES.eos_id]
  assert library.read(0, library.row_tokens).inputs[0].tolist() == expected
  assert information['source']['python'].endswith(sys.version.split()[0])
  assert len(information['source']['files_sha256']) == 64


def test_the_library_excludes_files_that_some_installations_lack():
  from valkyrie.tasks import python_stdlib  # noqa: PLC0415

  source = python_stdlib.StandardLibrarySource()
  files = {split: source.describe(split)['files'] for split in source.splits}
  assert not set(files['train']) & set(files['validation'])
  together = files['train'] + files['validation']
  assert {'abc.py', 'asyncio/events.py', 'json/decoder.py'} <= set(together)
  names = {part for path in together for part in path.split('/')}
  assert not names & {'test', 'tests', 'idlelib', 'encodings', 'site-packages', '__pycache__'}
  assert 0.02 < len(files['validation']) / len(together) < 0.1


def test_the_content_of_the_library_is_in_its_description(tmp_path, monkeypatch):
  from valkyrie.tasks import python_stdlib  # noqa: PLC0415

  (tmp_path / 'a.py').write_text('a = 1')
  monkeypatch.setattr(sysconfig, 'get_paths', lambda: {'stdlib': str(tmp_path)})
  monkeypatch.setattr(python_stdlib, '_paths', lambda split: ['a.py'])
  source = python_stdlib.StandardLibrarySource()
  before = source.describe('train')
  assert source.describe('train') == before
  (tmp_path / 'a.py').write_text('a = 2')
  assert source.describe('train') != before


def test_library_files_in_other_encodings(tmp_path):
  from valkyrie.tasks import python_stdlib  # noqa: PLC0415

  for content, text in [
    ('# coding: latin-1\n# é'.encode('latin-1'), '# coding: latin-1\n# é'),
    (b'# \xff\r\n', '# \ufffd\n'),
    (b'# coding: no-such\n', '# coding: no-such\n'),
  ]:
    (tmp_path / 'a.py').write_bytes(content)
    assert python_stdlib._text(tmp_path / 'a.py') == text


def test_a_builder_beats_for_the_run_that_waits_for_it(tmp_path, monkeypatch):
  reader, writer = os.pipe()
  monkeypatch.setenv(heartbeat.VARIABLE, heartbeat.address(writer))
  feed = TaskFeed('python_stdlib', 'validation', 1, 0, data_dir=str(tmp_path))
  assert feed.store.lengths.size
  os.close(writer)
  with open(reader) as beats:
    assert {line.strip() for line in beats} == {'{}'}


def test_documents_are_stored_and_read_without_tensorflow(tmp_path):
  program = f"""
import sys
from valkyrie.data import build_store
from valkyrie.data.feed import TaskFeed
path = {str(tmp_path)!r}
assert build_store.main(['--task=listops', '--split=validation', '--data_dir=' + path]) == 0
TaskFeed('listops', 'validation', 1, 0, data_dir=path)
loaded = {{'tensorflow', 'seqio'}} & set(sys.modules)
assert not loaded, loaded
"""
  subprocess.run([sys.executable, '-c', program], check=True)


PUBLISHED = """
import seqio
from valkyrie.data import document_source, seqio_tasks

class Words(document_source.DocumentSource):
  def documents(self, split, shard, shards):
    yield document_source.TextDocument('words', '', '')

  def describe(self, split):
    return {}

assert 'fineweb' not in seqio.TaskRegistry.names()
seqio_tasks.publish()
assert seqio.get_mixture_or_task('fineweb').name == 'fineweb'
document_source.register('words', Words(('train',)))
assert 'words' not in seqio.TaskRegistry.names()
seqio_tasks.publish()
(example,) = seqio.get_mixture_or_task('words').get_dataset(split='train').as_numpy_iterator()
assert example['targets'].size == 6
"""


def test_seqio_gets_the_tasks_by_a_call_and_not_by_an_import():
  subprocess.run([sys.executable, '-c', PUBLISHED], check=True)


def test_seqio_has_the_documents_and_the_vocabulary(library):
  import seqio  # noqa: PLC0415

  from valkyrie.data import seqio_tasks  # noqa: PLC0415

  seqio_tasks.publish()
  task = seqio.get_mixture_or_task('python_stdlib')
  example = next(task.get_dataset(split='validation', shuffle=False).as_numpy_iterator())
  first = int(library.store.lengths[0])
  assert example['targets'].tolist() == library.read(0, first).inputs[0].tolist()
  adapter = seqio_tasks.SeqioVocabulary(BYTES)
  assert adapter.encode_tf('é!').numpy().tolist() == adapter.encode('é!') == BYTES.encode('é!')
  assert adapter.decode_tf(np.array(BYTES.encode('é!'))).numpy().decode() == 'é!'
  library_source = document_source.TASKS['python_stdlib'].source
  with pytest.raises(ConfigurationError, match=r"'python_stdlib' is registered twice\. Rename"):
    document_source.register('python_stdlib', library_source)
  seqio.TaskRegistry.add('taken', task.source, task.output_features)
  document_source.register('taken', document_source.TASKS['recall'].source)
  with pytest.raises(ConfigurationError, match=r"seqio has another task 'taken'.* Rename"):
    seqio_tasks.publish()
  del document_source.TASKS['taken']


def test_fineweb_pages(pages, whole, tmp_path):
  train_path, train = whole
  validation = _build(tmp_path, source=f'{pages}/*.parquet', split='validation', shards=1)
  assert train['documents'] + validation['documents'] == PAGES and validation['documents']
  edu = _build(
    tmp_path / 'edu', task='fineweb.edu', source=f'{pages}/*.parquet', split='validation', shards=1
  )
  assert edu['documents'] == validation['documents']
  skipped = [(s['skipped_empty'], s['skipped_one_token']) for s in (train, validation)]
  assert np.sum(skipped, axis=0).tolist() == [1, 1]
  assert train['source']['files'] == PARQUET_FILES
  texts, keys = [], []
  for path in (train_path, tmp_path):
    store = TokenStore.open(path, BYTES)
    for number, length in enumerate(store.lengths):
      ids = store.read(np.array([number]), np.array([0]), np.array([length]))
      texts.append(BYTES.decode(ids))
    keys.append(store.sequence_keys.tolist())
  assert sorted(texts) == sorted(_page(i)['text'] for i in range(PAGES))
  # The pages of a host have one key and are in one split.
  assert set(collections.Counter(keys[0]).values()) == {PAGES // HOSTS}
  assert not set(keys[0]) & set(keys[1])


WAITING = """
import pathlib
import shlex
import time

from valkyrie.data import document_source


class Waiting(document_source.DocumentSource):
  def documents(self, split, shard, shards):
    while shard > 1 and not pathlib.Path({go!r}).exists():
      time.sleep(0.01)
    for number in range(250):
      yield document_source.TextDocument(f'{{(7 * shard + number) % 999}} is a text', '', '')

  def describe(self, split):
    return {{'kind': 'waiting'}}


document_source.register('waiting', Waiting(('train',)))
"""


@pytest.mark.parametrize('processes', [1, 2])
def test_a_killed_build_continues(tmp_path, monkeypatch, processes):
  (tmp_path / 'waiting_tasks.py').write_text(WAITING.format(go=str(tmp_path / 'go')))
  monkeypatch.setenv('PYTHONPATH', str(tmp_path), prepend=os.pathsep)
  monkeypatch.syspath_prepend(tmp_path)
  command = [sys.executable, '-m', 'valkyrie.data.build_store', '--task=waiting_tasks:waiting']
  command += [f'--output={tmp_path / "killed"}', f'--processes={processes}']
  builder = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
  names = [tmp_path / 'killed' / f'shard-0000{shard}-of-00008' for shard in (0, 1)]
  while not all(name.exists() for name in names):
    assert builder.poll() is None
    time.sleep(0.01)
  builder.send_signal(signal.SIGKILL)
  builder.wait()
  first = os.stat(names[0] / 'tokens.npy')
  (tmp_path / 'go').touch()
  # A process that outlived the builder would keep the lock of its shard.
  subprocess.run(command, check=True, capture_output=True)
  whole = [*command, f'--output={tmp_path / "whole"}']
  subprocess.run(whole, check=True, capture_output=True)
  assert token_store.verify(tmp_path / 'killed') == token_store.verify(tmp_path / 'whole')
  assert os.stat(names[0] / 'tokens.npy') == first


def test_shards_built_separately_are_the_same_store(pages, whole, tmp_path):
  options = {'source': str(pages), 'shards': SHARDS}
  parts = [_build(tmp_path, shard=i, **options) for i in reversed(range(SHARDS))]
  assert parts == [None] * (SHARDS - 1) + [whole[1]]


def test_an_error_in_one_of_several_processes(pages, tmp_path):
  empty = tmp_path / 'empty'
  empty.mkdir()
  with pytest.raises(DataError, match=r'no files of a known format'):
    _build(tmp_path / 'store', source=str(empty), processes=2)
  _write_pages(tmp_path / 'shards')
  file = tmp_path / 'shards' / '002.parquet'
  content = bytearray(file.read_bytes())
  content[4000:4400] = bytes(400)
  file.write_bytes(content)
  with pytest.raises(DataError, match=r'002\.parquet is corrupt'):
    _build(tmp_path / 'store', source=str(tmp_path / 'shards'), processes=2)


def test_of_equal_documents_the_first_stays(tmp_path, monkeypatch):
  (tmp_path / 'waiting_tasks.py').write_text(WAITING.format(go=str(tmp_path)))
  monkeypatch.setenv('PYTHONPATH', str(tmp_path), prepend=os.pathsep)
  monkeypatch.syspath_prepend(tmp_path)
  whole = _build(tmp_path / 'whole', task='waiting_tasks:waiting', shards=4)
  unique = _build(tmp_path / 'unique', task='waiting_tasks:waiting', shards=4, unique=True)
  stores = [TokenStore.open(tmp_path / name, BYTES) for name in ('whole', 'unique')]

  def texts(store):
    zero = np.zeros(1, int)
    read = (store.read(zero + n, zero, store.lengths[n : n + 1]) for n in range(len(store.lengths)))
    return [BYTES.decode(tokens) for tokens in read]

  every, kept = map(texts, stores)
  assert len(every) == 4 * 250 and kept == list(dict.fromkeys(every))
  assert stores[1].tokens == stores[1].lengths.sum() < stores[0].tokens
  assert unique['duplicates']['documents'] == len(every) - len(kept)
  assert sum(unique['lengths'].values()) == len(kept)
  assert unique['fingerprint'] != whole['fingerprint']
  assert not stores[1].damaged(np.arange(len(kept))).any()
  with pytest.raises(ConfigurationError, match='holds another store'):
    _build(tmp_path / 'whole', task='waiting_tasks:waiting', shards=4, unique=True)
  file = tmp_path / 'unique' / 'duplicates.npy'
  file.write_bytes(file.read_bytes()[:-8] + bytes(8))
  with pytest.raises(DataError, match=r'duplicates\.npy is corrupt'):
    TokenStore.open(tmp_path / 'unique', BYTES)


@pytest.mark.parametrize('task', ['python_stdlib', 'recall'])
def test_documents_are_those_of_the_seqio_task(task, monkeypatch):
  """Sources of documents are read without tf.data, which must not change them."""
  monkeypatch.setattr('valkyrie.data.document_source._PIECE', 2000)
  selection = Selection(task, 'validation', BYTES)
  reader = store_builder.open_task(selection)
  found = [*itertools.islice(reader.documents(3, 40), 30)]
  from valkyrie.data import seqio_tasks  # noqa: PLC0415, TensorFlow

  seqio_tasks.publish()
  theirs = seqio_tasks.task_reader_of(task, selection)
  assert (theirs.description, theirs.files) == (reader.description, reader.files)
  expected = [*itertools.islice(theirs.documents(3, 40), 30)]
  assert len(found) == len(expected) > 0
  for ours, theirs in zip(found, expected, strict=True):
    tokens = ours.tokens
    if not isinstance(tokens, np.ndarray):
      pieces = [*tokens]
      assert len(pieces) > 1
      tokens = np.concatenate(pieces)
    np.testing.assert_array_equal(tokens, theirs.tokens)
    assert ours[1:] == theirs[1:]


def test_a_long_text_is_tokenized_in_pieces_that_end_with_lines(monkeypatch):
  monkeypatch.setattr(document_source, '_PIECE', 10)
  assert [*document_source.pieces('')] == []
  assert [*document_source.pieces('one\ntwo\nthree\nx')] == ['one\ntwo\n', 'three\nx']
  assert [*document_source.pieces('a' * 25)] == ['a' * 10, 'a' * 10, 'a' * 5]


def test_a_finished_store_of_another_task_is_refused(pages, whole):
  assert _build(whole[0], source=str(pages)) == whole[1]
  for options in ({'source': '/elsewhere'}, {'source': str(pages), 'split': 'validation'}):
    with pytest.raises(ConfigurationError, match='holds another store'):
      _build(whole[0], **options)


def test_the_message_names_a_damaged_row_group(pages, tmp_path):
  _write_pages(tmp_path / 'shards')
  file = tmp_path / 'shards' / '002.parquet'
  content = bytearray(file.read_bytes())
  content[4000:4400] = bytes(400)
  file.write_bytes(content)
  with pytest.raises(DataError, match=r'002\.parquet is corrupt: it cannot be read') as caught:
    _build(tmp_path / 'store', source=str(tmp_path / 'shards'))
  assert caught.value.exit_code == 65


def test_messages_name_bad_parquet_shards(pages, tmp_path):
  def refused(message, location=tmp_path):
    with pytest.raises(DataError, match=message):
      Records(str(location), ('text', 'url'))

  refused('no files of a known format')
  refused('cannot be listed', tmp_path / 'nowhere')
  refused('cannot be listed', 'nosuch://bucket/path')
  file = tmp_path / '000.parquet'
  file.write_bytes(b'')
  refused(r'000\.parquet is empty')
  file.write_bytes((pages / '000.parquet').read_bytes()[:-20])
  refused(r'000\.parquet is corrupt')
  pyarrow.parquet.write_table(pa.table({'text': ['a'], 'id': ['b']}), file)
  refused(r'000\.parquet has no column url; it has text, id')
  pyarrow.parquet.write_table(pa.table({'text': pa.array([], pa.string()), 'url': []}), file)
  refused(r'000\.parquet is empty')


def test_messages_about_a_missing_location_and_a_missing_package(tmp_path, monkeypatch):
  with pytest.raises(ConfigurationError, match=r'needs the location .* TaskFeed\.source'):
    _build(tmp_path / 'a')
  monkeypatch.setitem(sys.modules, 'datasets', None)
  with pytest.raises(ConfigurationError, match='pip install datasets'):
    _build(tmp_path / 'b', source='hf://HuggingFaceFW/fineweb')


OWN_TASK = """
import seqio
import tensorflow as tf

def words(split, shuffle_files):
  return tf.data.Dataset.from_tensor_slices({'text': [f'{split} number {i}' for i in range(20)]})

seqio.TaskRegistry.add(
  'words',
  source=seqio.FunctionDataSource(words, splits=['train']),
  preprocessors=[
    lambda dataset: dataset.map(lambda example: {'targets': example['text']}),
    seqio.preprocessors.tokenize,
  ],
  output_features={'targets': seqio.Feature(seqio.PassThroughVocabulary(1), dtype=tf.int32)},
)
"""


def test_shards_of_two_codes_of_a_task_never_join(tmp_path, monkeypatch):
  file = tmp_path / 'edited_tasks.py'
  file.write_text(WAITING.format(go=str(tmp_path)).replace("'waiting'", "'edited'"))
  monkeypatch.syspath_prepend(tmp_path)
  task = {'task': 'edited_tasks:edited', 'shards': 2}
  assert _build(tmp_path / 'store', shard=0, **task) is None
  file.write_text(file.read_text().replace('edited', 'Edited'))
  with pytest.raises(ConfigurationError, match=r"shard-00000.*another source: .*'code_sha256'"):
    _build(tmp_path / 'store', shard=1, **task)


LINES = """
import seqio

seqio.TaskRegistry.add(
  'lines',
  source=seqio.TextLineDataSource({{'train': '{folder}/[0-5].txt'}}),
  preprocessors=[
    lambda dataset: dataset.map(lambda line: {{'targets': line}}),
    seqio.preprocessors.tokenize,
  ],
  output_features={{'targets': seqio.Feature(seqio.ByteVocabulary(), add_eos=False)}},
)
"""


def test_the_files_of_a_seqio_task_are_compared(tmp_path, monkeypatch):
  for name in '012':
    (tmp_path / f'{name}.txt').write_text(f'Text {name}')
  (tmp_path / 'line_tasks.py').write_text(LINES.format(folder=tmp_path))
  monkeypatch.syspath_prepend(tmp_path)
  task, output = {'task': 'line_tasks:lines', 'shards': 2}, tmp_path / 'store'
  assert _build(output, shard=1, **task) is None
  (tmp_path / '1.txt').write_text('Next 1')
  with pytest.raises(DataError, match=r'0\.txt and 2 more has now \(1 changed: 1\.txt\)'):
    _build(output, shard=0, **task)
  (tmp_path / '1.txt').write_text('Text 1')
  assert _build(output, shard=0, **task)['documents'] == 3
  (tmp_path / '0.txt').unlink()
  with pytest.raises(DataError, match=r'was made from other files .*\(1 gone: 0\.txt\)'):
    _build(output, **task)


def test_a_users_own_task(tmp_path, monkeypatch):
  (tmp_path / 'their_tasks.py').write_text(OWN_TASK)
  monkeypatch.syspath_prepend(tmp_path)
  information = _build(tmp_path / 'store', task='their_tasks:words')
  assert (information['documents'], information['text_bytes']) == (20, 10 * 14 + 10 * 15)
  store = TokenStore.open(tmp_path / 'store', BYTES)
  assert len(set(store.sequence_keys.tolist())) == 20
  for options, message in [
    ({'task': 'their_tasks:word'}, 'registers no task .word.* Did you mean words'),
    ({'task': 'their_task:words'}, 'no module their_task'),
    ({'task': 'their_tasks:words', 'split': 'test'}, "no split 'test'. Use one of train"),
    ({'task': 'their_tasks:words', 'source': '/x'}, 'is not of documents'),
    ({'task': 'python_stdlib', 'source': '/x'}, 'has its own documents'),
  ]:
    with pytest.raises(ConfigurationError, match=message):
      _build(tmp_path / 'bad', **options)


RIDDLES = """
from valkyrie.data.document_source import Problem, register_problems

def riddle(random):
  return Problem(f'{random.randint(9)} and one is ', ANSWER)

register_problems('riddles', {'train': (40, riddle)})
"""


def test_a_store_of_a_generated_task_is_compared_with_its_code(tmp_path, monkeypatch, capsys):
  monkeypatch.syspath_prepend(tmp_path)
  module = tmp_path / 'own_riddles.py'

  def read(answer, comment=''):
    module.write_text(RIDDLES.replace('ANSWER', repr(answer)) + comment)
    importlib.invalidate_caches()
    sys.modules.pop('own_riddles', None)
    TASKS.pop('riddles', None)
    feed = TaskFeed('own_riddles:riddles', 'train', 1, 0, data_dir=str(tmp_path / 'stores'))
    return feed.read(0, 9)

  first = read('one')
  assert 'own_riddles' not in sys.modules  # the builder ran it
  np.testing.assert_array_equal(read('one', '# A comment.').inputs, first.inputs)
  with pytest.raises(DataError, match=r'own_riddles:riddles generates now') as caught:
    read('two')
  assert 'own_riddles' in sys.modules
  command = shlex.split(str(caught.value).strip().splitlines()[-1])
  assert build_store.main([*command[3:-1]]) == 65  # without --rebuild
  assert 'generates now' in capsys.readouterr().err
  assert build_store.main(command[3:]) == 0
  read('two')


def test_a_store_of_our_generated_task_has_a_sample_of_its_problems(tmp_path, monkeypatch):
  feed = TaskFeed('passkey.64', 'validation', 1, 0, data_dir=str(tmp_path))
  feed.read(0, 9)
  others = {'validation': (128, lambda _: document_source.Problem('a', 'b'))}
  source = document_source.GeneratedSource('passkey.64', others)
  changed = document_source.DocumentTask(source, prompts=True)
  document_source.loaded('passkey.64')
  monkeypatch.setitem(TASKS, 'passkey.64', changed)
  del feed.store
  with pytest.raises(DataError, match=r'passkey.64 generates now'):
    _ = feed.store
