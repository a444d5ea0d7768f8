"""A store that is built again is complete before recorded files of the old one go."""

import dataclasses
import errno
import fcntl
import json
import multiprocessing.context
import os
import shlex
import shutil

import numpy as np
import pytest

from valkyrie.data import build_store, store_builder, token_store, vocabularies
from valkyrie.data.feed import TaskFeed
from valkyrie.data.selection import Selection
from valkyrie.data.token_store import TokenStore
from valkyrie.errors import DataError

BYTES = vocabularies.load('bytes')


def write_texts(tmp_path, word, count=8):
  folder = tmp_path / 'texts'
  shutil.rmtree(folder, ignore_errors=True)
  folder.mkdir()
  for number in range(count):
    (folder / f'{number}.txt').write_text(f'{word} of number {number}')


def build(tmp_path, *more, shards=2):
  command = ['--task=text', f'--source={tmp_path}/texts', f'--output={tmp_path}/store']
  return build_store.main([*command, f'--shards={shards}', '--option=held_out=1e-9', *more])


def words(tmp_path):
  """The first words of the documents of a store, after a check of its every byte."""
  token_store.verify(tmp_path / 'store')
  store = TokenStore.open(tmp_path / 'store', BYTES)
  numbers = np.arange(len(store.lengths))
  begins, lengths = np.zeros_like(numbers), np.full_like(numbers, 4)
  return {*map(BYTES.decode, store.read(numbers, begins, lengths).reshape(-1, 4))}


def contents(folder):
  return {
    path.relative_to(folder).as_posix(): path.read_bytes()
    for path in folder.rglob('*')
    if path.is_file()
  }


@pytest.fixture
def store(tmp_path):
  write_texts(tmp_path, 'Text')
  assert build(tmp_path) == 0
  return tmp_path / 'store'


def test_a_store_stays_if_its_source_is_gone(tmp_path, store, capsys):
  before = contents(store)
  (tmp_path / 'texts').rename(tmp_path / 'away')
  assert build(tmp_path, '--rebuild') == 65
  assert 'there is no such file or folder' in capsys.readouterr().err
  assert contents(store) == before
  assert words(tmp_path) == {'Text'}


def test_a_store_is_whole_until_the_last_shard_of_its_successor(tmp_path, store):
  write_texts(tmp_path, 'Next')
  before = contents(store)
  assert build(tmp_path, '--rebuild', '--shard=0') == 0
  assert {name: text for name, text in contents(store).items() if name in before} == before
  assert words(tmp_path) == {'Text'}
  (first,) = (
    folder for folder in store.iterdir() if folder.name.startswith('shard-00000-of-00002-')
  )
  built = os.stat(first / 'tokens.npy')
  assert build(tmp_path, '--rebuild') == 0
  assert words(tmp_path) == {'Next'}
  assert os.stat(first / 'tokens.npy') == built  # the first shard was not built twice
  shards = {path.name for path in store.iterdir()} - {'store.json'}
  assert shards == {folder['name'] for folder in token_store.read_information(store)['shards']}


def test_a_rebuild_of_other_texts_than_its_first_shards_builds_those_again(tmp_path, store):
  write_texts(tmp_path, 'Next')
  assert build(tmp_path, '--rebuild', '--shard=0') == 0
  write_texts(tmp_path, 'Last')
  assert build(tmp_path, '--rebuild') == 0
  assert words(tmp_path) == {'Last'}


def test_files_of_the_user_stay_and_are_named(tmp_path, store, caplog):
  for name in ('notes.md', '.mine.lock', 'shard-00000-of-00002/notes.md', 'shard-mine/tokens.npy'):
    (store / name).parent.mkdir(exist_ok=True)
    (store / name).write_text(name)
  shutil.copytree(store / 'shard-00001-of-00002', store / 'shard-00001-of-00002.before')
  kept = contents(store / 'shard-00001-of-00002.before')
  assert build(tmp_path, '--rebuild', shards=3) == 0
  assert words(tmp_path) == {'Text'}
  for name in ('notes.md', '.mine.lock', 'shard-00000-of-00002/notes.md', 'shard-mine/tokens.npy'):
    assert (store / name).read_text() == name
  assert contents(store / 'shard-00001-of-00002.before') == kept
  assert contents(store / 'shard-00000-of-00002') == {'notes.md': b'shard-00000-of-00002/notes.md'}
  assert 'shard-00000-of-00002 stays: it has notes.md, which this program did not' in caplog.text
  assert not (store / 'shard-00001-of-00002').exists()


@pytest.mark.parametrize('more', [(), ('--rebuild',), ('--renew',)])
@pytest.mark.parametrize('content', ['{"shop": "of the user"}', 'no JSON', '[1]'])
def test_a_store_json_of_another_program_stays(tmp_path, capsys, content, more):
  write_texts(tmp_path, 'Text')
  (tmp_path / 'store').mkdir()
  for name in ('store.json', 'notes.md'):
    (tmp_path / 'store' / name).write_text(content)
  before = contents(tmp_path)
  assert build(tmp_path, *more) in (65, 78)
  assert 'Use another --output' in capsys.readouterr().err
  assert contents(tmp_path) == before


def test_a_damaged_record_is_replaced(tmp_path, store, capsys):
  (store / 'store.json').write_bytes((store / 'store.json').read_bytes()[:40])
  assert build(tmp_path) == 65
  assert 'with --rebuild' in capsys.readouterr().err
  assert build(tmp_path, '--rebuild') == 0
  assert words(tmp_path) == {'Text'}
  assert len([*store.iterdir()]) == 3


def test_links_in_a_store_are_not_followed(tmp_path, store):
  shard = store / 'shard-00000-of-00002'
  shard.rename(tmp_path / 'disk')
  shard.symlink_to(tmp_path / 'disk')
  linked = store / 'shard-00001-of-00002' / 'tokens.npy'
  linked.rename(tmp_path / 'tokens.npy')
  linked.symlink_to(tmp_path / 'tokens.npy')
  before = contents(tmp_path / 'disk') | {'tokens.npy': (tmp_path / 'tokens.npy').read_bytes()}
  assert build(tmp_path, '--rebuild') == 0
  assert words(tmp_path) == {'Text'}
  after = contents(tmp_path / 'disk') | {'tokens.npy': (tmp_path / 'tokens.npy').read_bytes()}
  assert after == before


def test_a_lock_that_is_a_link_leaves_its_target(tmp_path, capsys):
  write_texts(tmp_path, 'Text')
  (tmp_path / 'store').mkdir()
  (tmp_path / 'notes.md').write_text('of the user')
  (tmp_path / 'store' / '.shard-00000-of-00002.lock').symlink_to(tmp_path / 'notes.md')
  assert build(tmp_path) == 74
  assert '.shard-00000-of-00002.lock' in capsys.readouterr().err
  assert (tmp_path / 'notes.md').read_text() == 'of the user'


def test_duplicates_are_those_of_the_new_store(tmp_path):
  write_texts(tmp_path, 'Text')
  shutil.copy(tmp_path / 'texts' / '0.txt', tmp_path / 'texts' / '9.txt')
  assert build(tmp_path, '--unique') == 0
  write_texts(tmp_path, 'Next')
  shutil.copy(tmp_path / 'texts' / '0.txt', tmp_path / 'texts' / '8.txt')
  shutil.copy(tmp_path / 'texts' / '0.txt', tmp_path / 'texts' / '9.txt')
  fingerprints = set()
  for _ in range(2):
    assert build(tmp_path, '--unique', '--rebuild') == 0
    fingerprints.add(token_store.read_information(tmp_path / 'store')['fingerprint'])
    assert words(tmp_path) == {'Next'}
    assert len(TokenStore.open(tmp_path / 'store', BYTES).lengths) == 8
    arrays = [path.name for path in (tmp_path / 'store').glob('*.npy')]
    assert arrays == [token_store.read_information(tmp_path / 'store')['duplicates']['name']]
  assert build(tmp_path, '--unique', f'--output={tmp_path}/another') == 0
  fingerprints.add(token_store.read_information(tmp_path / 'another')['fingerprint'])
  assert len(fingerprints) == 1  # names of files are no content


def test_an_unfinished_store_is_built_again_as_the_message_says(tmp_path, capsys):
  write_texts(tmp_path, 'Text')
  assert build(tmp_path, '--shard=0') == 0
  (tmp_path / 'texts' / '3.txt').unlink()
  (tmp_path / 'store' / 'shard-00000-of-00002' / 'notes.md').write_text('of the user')
  assert build(tmp_path) == 65
  said = capsys.readouterr().err
  assert '1 gone: 3.txt' in said and 'run it with --renew' in said and 'delete' not in said
  assert build(tmp_path, '--renew') == 0
  assert words(tmp_path) == {'Text'}
  kept = tmp_path / 'store' / 'shard-00000-of-00002.replaced'
  assert contents(kept) == {'notes.md': b'of the user'}


def test_a_damaged_shard_of_an_unfinished_store_is_built_again(tmp_path, capsys):
  write_texts(tmp_path, 'Text')
  assert build(tmp_path, '--shard=0') == 0
  (tmp_path / 'store' / 'shard-00000-of-00002' / 'tokens.npy').write_bytes(b'')
  assert build(tmp_path) == 65
  assert 'with --rebuild' in capsys.readouterr().err
  assert build(tmp_path, '--rebuild') == 0
  assert words(tmp_path) == {'Text'}


@pytest.mark.parametrize('more', ['--renew', '--rebuild'])
def test_shards_of_another_split_are_not_replaced(tmp_path, capsys, more):
  write_texts(tmp_path, 'Text')
  assert build(tmp_path, '--shard=0') == 0
  before = contents(tmp_path)
  assert build(tmp_path, '--split=validation', '--option=held_out=0.9', more) == 78
  assert 'another split' in capsys.readouterr().err
  kept = contents(tmp_path)
  shards = {name: text for name, text in before.items() if '/shard-' in name}
  assert {name: kept.get(name) for name in shards} == shards


def test_a_folder_that_only_looks_like_a_shard_stays(tmp_path):
  write_texts(tmp_path, 'Text')
  folder = tmp_path / 'store' / 'shard-00000-of-00002'
  folder.mkdir(parents=True)
  (folder / 'shard.json').write_text(json.dumps({'files': {'tokens.npy': 1}, 'name': folder.name}))
  (folder / 'tokens.npy').write_text('of the user')
  before = contents(folder)
  assert build(tmp_path) == 65
  assert build(tmp_path, '--renew') == 0
  assert contents(folder.with_name(f'{folder.name}.replaced')) == before
  assert words(tmp_path) == {'Text'}


def test_a_store_is_built_without_locks(tmp_path, monkeypatch):
  def refuse(*_):
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

  monkeypatch.setattr(fcntl, 'flock', refuse)
  write_texts(tmp_path, 'Text')
  assert build(tmp_path) == 0
  write_texts(tmp_path, 'Next')
  assert build(tmp_path, '--rebuild') == 0
  assert words(tmp_path) == {'Next'}


def test_a_shard_that_another_process_finished_first_counts(tmp_path):
  write_texts(tmp_path, 'Text')
  selection = Selection('text', 'train', BYTES, f'{tmp_path}/texts', {'held_out': '1e-9'})
  bench = store_builder.Bench(selection, tmp_path / 'store', 2)
  folder = bench.writer.folders[0]

  def while_it_is_written(*_):
    if not folder.exists():
      (tmp_path / 'other').mkdir()
      other = dataclasses.replace(bench.writer, path=tmp_path / 'other')
      other.write_shard(0, bench._documents(0))
      (tmp_path / 'other' / folder.name).rename(folder)

  bench.build(0, while_it_is_written)
  assert build(tmp_path) == 0
  assert words(tmp_path) == {'Text'}


@pytest.mark.parametrize('code', [errno.ENOSPC, errno.ENOENT, errno.EACCES])
def test_processes_need_shared_memory_and_the_message_says_so(tmp_path, monkeypatch, capsys, code):
  def refuse(*_, **__):
    raise OSError(code, os.strerror(code))

  monkeypatch.setattr(multiprocessing.context.SpawnContext, 'SimpleQueue', refuse)
  write_texts(tmp_path, 'Text')
  assert build(tmp_path, '--processes=2') == 74
  assert 'uild with --processes=1' in capsys.readouterr().err
  assert build(tmp_path, '--processes=1') == 0


def test_a_run_names_the_command_that_mends_its_store(tmp_path):
  write_texts(tmp_path, 'Text')
  how = {'source': f'{tmp_path}/texts', 'options': {'held_out': '1e-9'}}

  def feed():
    return TaskFeed('text', 'train', 1, 0, data_dir=f'{tmp_path}/stores', **how)

  (array, *_) = feed().store.path.glob('shard-*/offsets.npy')
  array.write_bytes(b'')
  with pytest.raises(DataError, match='For this run, run:') as refused:
    feed().read(0, 1)
  command = shlex.split(str(refused.value).splitlines()[-1])
  assert command[-1] == '--rebuild'
  assert build_store.main(command[3:]) == 0
  feed().read(0, 1)


def test_a_record_of_the_source_that_is_damaged_is_written_again(tmp_path, capsys):
  write_texts(tmp_path, 'Text')
  assert build(tmp_path, '--shard=0') == 0
  record = tmp_path / 'store' / '.source.jsonl'
  record.write_text('[')
  assert build(tmp_path) == 65
  said = capsys.readouterr().err
  assert str(record) in said and 'Delete that file, and run the same command' in said
  record.unlink()
  assert build(tmp_path, '--renew') == 0
  assert words(tmp_path) == {'Text'}
