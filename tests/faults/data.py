"""Damaged token stores, and documents that are empty or too short."""

import collections
from collections.abc import Iterator
import json
import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from faults.harness import BYTES, Harness, write_store
from faults.table import Trial, fault
from valkyrie.data.feed import TaskFeed
from valkyrie.data.token_store import TokenStore, read_information
from valkyrie.errors import DataError

BAD_DATA = 65


def _store(harness: Harness) -> pathlib.Path:
  (store,) = (harness.folder / 'data').glob('letters-train-*')
  return pathlib.Path(shutil.copytree(store, harness.folder / harness.new()))


def _read_all(path: pathlib.Path) -> np.ndarray:
  """The numbers of the damaged documents; raises DataError if the store cannot be opened."""
  store = TokenStore.open(path, BYTES)
  return np.flatnonzero(store.damaged(np.arange(len(store.lengths))))


@fault(
  'one flipped bit in a token store', 'is found, and its file or document named', full=200, short=40
)
def flipped_bit(harness: Harness, times: int) -> Iterator[Trial]:
  path = _store(harness)
  files = sorted(file for file in path.rglob('*') if file.name not in ('shard.json',))
  files = [file for file in files if file.is_file()]
  for number in range(times):
    file = files[number % len(files)]
    whole = file.read_bytes()
    bit = harness.random.randrange(8 * len(whole))
    altered = bytearray(whole)
    altered[bit // 8] ^= 1 << bit % 8
    file.write_bytes(altered)
    try:
      failure = None if _read_all(path).size else 'it was not found'
    except DataError as error:
      named = str(file) in str(error) or file.parent.name in str(error) or file.name in str(error)
      failure = None if named else f'the message is {error}'
    yield Trial(f'bit {bit} of {file.relative_to(path)}', failure)
    file.write_bytes(whole)
  shutil.rmtree(path)


@fault(
  'a file of a token store cut, emptied or missing', 'is named, ends with 65', full=30, short=9
)
def lost_files(harness: Harness, times: int) -> Iterator[Trial]:
  path = _store(harness)
  files = sorted(file for file in path.rglob('*.npy'))
  for number in range(times):
    file = files[number % len(files)]
    whole = file.read_bytes()
    damage = ('cut', 'emptied', 'missing')[number // len(files) % 3]
    if damage == 'missing':
      file.unlink()
    else:
      file.write_bytes(whole[: len(whole) // 2] if damage == 'cut' else b'')
    try:
      _read_all(path)
      failure = 'it was not found'
    except DataError as error:
      failure = None if str(file) in str(error) else f'the message is {error}'
    yield Trial(f'{file.relative_to(path)} {damage}', failure)
    file.write_bytes(whole)
  shutil.rmtree(path)


@fault(
  'a missing shard, a token out of range or an altered document, in a run',
  'ends with 65 and names it',
  full=6,
)
def in_a_run(harness: Harness, times: int) -> Iterator[Trial]:
  for number in range(times):
    name, damage = harness.new(), ('token', 'shard', 'document')[number % 3]
    data, store = copied(harness, name)
    shard = sorted(store.glob('shard-*'))[number % 2]
    if damage == 'shard':
      shutil.rmtree(shard)
    else:
      alter(shard, 5, 999 if damage == 'token' else 100)
    process = harness.start(name, f'--gin.TaskFeed.data_dir="{data}"')
    failure = harness.ending(name, process, BAD_DATA)
    names = (shard.name, str(store), '' if damage == 'shard' else 'document 0')
    if failure is None and not all(word in harness.said(name) for word in names):
      failure = f'the message is {harness.said(name)[-300:]}'
    yield Trial(f'{damage} of {shard.name}', failure)
    harness.forget(name)


def copied(harness: Harness, name: str) -> tuple[pathlib.Path, pathlib.Path]:
  """(a copy of the data for one run, its training store)."""
  data = pathlib.Path(shutil.copytree(harness.folder / 'data', harness.folder / f'{name}.data'))
  (store,) = data.glob('letters-train-*')
  return data, store


def alter(shard: pathlib.Path, place: int, token: int) -> None:
  """Replaces a token in the file of a store."""
  tokens = np.load(shard / 'tokens.npy', mmap_mode='r+')
  tokens[place] = token
  tokens.flush()


@fault(
  'damaged documents within TaskFeed.bad_documents',
  'are skipped, also by a run that is killed',
  full=4,
)
def skipped(harness: Harness, times: int) -> Iterator[Trial]:
  for number in range(times):
    whole, killed = harness.new(), harness.new()
    data, store = copied(harness, whole)
    alter(store / f'shard-0000{number % 2}-of-00002', 5 + number, 999)
    flags = (f'--gin.TaskFeed.data_dir="{data}"', '--gin.TaskFeed.bad_documents=1')
    harness.run(whole, *flags)
    harness.run(killed, *flags, '--gin.Act.at=15', '--gin.Act.action="kill"', code=-9)
    harness.run(killed, *flags)
    failure = None
    if dict(harness.hashes(whole)) != dict(harness.hashes(killed)):
      failure = 'the killed run has other states'
    elif harness.said(whole).count('Passing over document 0') != 1:
      failure = 'the document was not named exactly once'
    yield Trial(f'in shard {number % 2}', failure)
    harness.forget(killed)
    harness.forget(whole)


@fault(
  'empty documents and documents of one token',
  'are left out and counted, refused if most are such',
  full=20,
  short=4,
)
def short_documents(harness: Harness, times: int) -> Iterator[Trial]:
  for number in range(times):
    data = harness.folder / f'{harness.new()}.data'
    sound, empty = 20, number * 2
    documents = ['abcd'] * sound + ['', 'a'] * (empty // 2)
    harness.random.shuffle(documents)
    try:
      path = write_store(data, 'short', 'train', documents)
      counts = read_information(path)
      skipped = counts['skipped_empty'] + counts['skipped_one_token']
      failure = (
        None if (counts['documents'], skipped) == (sound, empty) else f'the counts are {counts}'
      )
      if empty > sound:
        failure = 'most are empty, but the store was not refused'
      TaskFeed('short', 'train', 2, 0, data_dir=str(data)).read(0, 100)
    except DataError as error:
      failure = None if empty > sound else str(error)
    yield Trial(f'{empty} of {sound + empty}', failure)
    shutil.rmtree(data)


@fault(
  'a column of a parquet file with bytes, numbers or lists in place of texts',
  'ends with 65, names file and column',
  full=3,
)
def other_columns(harness: Harness, times: int) -> Iterator[Trial]:
  for value in (b'bytes', 7, ['list'])[:times]:
    name = harness.new()
    folder = harness.folder / f'{name}.data'
    folder.mkdir()
    pyarrow.parquet.write_table(pa.table({'text': [value] * 9}), folder / 'odd.parquet')
    text = ('--gin_file=gin/data/text.gin', f'--gin.text="{folder}"')
    process = harness.start(name, *text, f'--gin.TaskFeed.data_dir="{folder}.stores"')
    failure = harness.ending(name, process, BAD_DATA)
    message = f'odd.parquet has {value!r} in the column text, expected a text'
    if failure is None and message not in harness.said(name):
      failure = f'the message is {harness.said(name)[-300:]}'
    yield Trial(type(value).__name__, failure)
    harness.forget(name)


@fault(
  'a text edited at equal size between two shards of its store',
  'ends with 65, names the file, and never joins; the text as it was continues the build',
  full=8,
)
def two_texts(harness: Harness, times: int) -> Iterator[Trial]:
  for number in range(times):
    folder = harness.folder / f'{harness.new()}.data'
    folder.mkdir()
    kind, keeps_time = ('jsonl', 'parquet')[number // 2 % 2], bool(number % 2)
    file, store = folder / f'text.{kind}', folder / 'store'
    first, other = harness.random.sample(range(4), 2)
    _write_text(file, 'old')
    codes = [_build(folder, f'--shard={first}').returncode]
    before = file.stat()
    _write_text(file, 'new')
    if keeps_time:
      os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    refused = _build(folder, f'--shard={other}')
    _write_text(file, 'old')
    codes += [refused.returncode, _build(folder).returncode]
    failure = None if codes == [0, BAD_DATA, 0] else f'the exit codes are {codes}'
    if failure is None and f'1 changed: {file.name}' not in refused.stderr:
      failure = f'the message is {refused.stderr[-300:]}'
    if failure is None:
      texts = _texts(store)
      failure = None if texts == {'old': 40} else f'the store has {texts}'
    yield Trial(f'{kind}, with {"its old" if keeps_time else "a new"} time', failure)
    shutil.rmtree(folder)


def _write_text(file: pathlib.Path, word: str) -> None:
  texts = [f'{word} {number:02}' for number in range(40)]
  if file.suffix == '.parquet':
    pyarrow.parquet.write_table(pa.table({'text': texts}), file, row_group_size=5)
  else:
    file.write_text(''.join(f'{json.dumps({"text": text})}\n' for text in texts))


def _build(folder: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess[str]:
  command = [sys.executable, '-m', 'valkyrie.data.build_store', '--task=text', '--shards=4']
  command += [f'--source={folder}/text.*', f'--output={folder / "store"}', '--option=held_out=1e-9']
  return subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)


def _texts(path: pathlib.Path) -> collections.Counter[str]:
  """The first words of the documents of a store."""
  store = TokenStore.open(path, BYTES)
  zeros = np.zeros(len(store.lengths), int)
  tokens = store.read(np.arange(len(zeros)), zeros, zeros + 3)
  return collections.Counter(map(BYTES.decode, tokens.reshape(-1, 3)))


@fault(
  'test and validation files beside the training text',
  'are not trained on, and are named',
  full=6,
)
def other_splits(harness: Harness, times: int) -> Iterator[Trial]:
  forms = [
    ('train.jsonl', 'test.jsonl'),
    ('a.jsonl', 'dev.jsonl'),
    ('train.parquet', 'eval-00000-of-00001.parquet'),
    ('b/a.jsonl', 'b/Test.jsonl'),
    ('a.jsonl', 'testing/b.jsonl'),
    ('data.jsonl', 'data.validation.parquet'),
  ]
  for number in range(times):
    folder = harness.folder / harness.new()
    train, other = (folder / 'texts' / name for name in forms[number % len(forms)])
    for file, word in ((train, 'old'), (other, 'new')):
      file.parent.mkdir(parents=True, exist_ok=True)
      _write_text(file, word)
    built = _build(folder, f'--source={folder}/texts/**/*')
    texts = built.stderr[-300:] if built.returncode else _texts(folder / 'store')
    failure = None if texts == {'old': 40} else f'the store has {texts}'
    if failure is None and other.name not in built.stderr:
      failure = f'the message is {built.stderr[-300:]}'
    yield Trial(str(other.relative_to(folder)), failure)
    shutil.rmtree(folder)


@fault(
  'tokens.npy that is truncated under a running trainer',
  'saves, and ends with 65 and the name of the file',
  full=4,
  short=1,
)
def truncated(harness: Harness, times: int) -> Iterator[Trial]:
  for number in range(times):
    name = harness.new()
    data, store = copied(harness, name)
    held = 6  # between two saves
    process = harness.start_and_hold(name, held, f'--gin.TaskFeed.data_dir="{data}"')
    for file in store.glob('*/tokens.npy'):
      os.truncate(file, (0, 100, 130, file.stat().st_size - 1)[number % 4])
    harness.release(name)
    failure = harness.ending(name, process, BAD_DATA)
    if failure is None and 'tokens.npy is truncated or altered' not in (said := harness.said(name)):
      failure = f'the message is {said[-300:]}'
    if failure is None and max(harness.saved(name), default=0) < held:
      failure = f'the saved steps are {harness.saved(name)}'
    yield Trial(f'number {number}', failure)
    harness.forget(name)
