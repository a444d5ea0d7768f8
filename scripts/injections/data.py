"""Token stores that are damaged, and documents that are empty or too short."""

from collections.abc import Iterator
import pathlib
import shutil

import numpy as np

from injections.laboratory import BYTES, Laboratory, ended, write_store
from injections.table import Trial, fault
from valkyrie.data.feed import TaskFeed
from valkyrie.data.token_store import TokenStore, read_information
from valkyrie.errors import DataError

BAD_DATA = 65


def _store(lab: Laboratory) -> pathlib.Path:
  (found,) = (lab.folder / 'data').glob('letters-train-*')
  return pathlib.Path(shutil.copytree(found, lab.folder / lab.new()))


def _read_all(path: pathlib.Path) -> np.ndarray:
  """Which documents are damaged; raises where the store cannot even be opened."""
  store = TokenStore.open(path, BYTES)
  return np.flatnonzero(store.damaged(np.arange(len(store.lengths))))


@fault(
  'one flipped bit in a token store', 'is found, and its file or document named', full=200, short=40
)
def flipped_bit(lab: Laboratory, times: int) -> Iterator[Trial]:
  path = _store(lab)
  files = sorted(file for file in path.rglob('*') if file.name not in ('shard.json',))
  files = [file for file in files if file.is_file()]
  for number in range(times):
    file = files[number % len(files)]
    whole = file.read_bytes()
    bit = lab.random.randrange(8 * len(whole))
    altered = bytearray(whole)
    altered[bit // 8] ^= 1 << bit % 8
    file.write_bytes(altered)
    try:
      found = None if _read_all(path).size else 'it was not found'
    except DataError as error:
      named = str(file) in str(error) or file.parent.name in str(error) or file.name in str(error)
      found = None if named else f'the message is {error}'
    yield Trial(f'bit {bit} of {file.relative_to(path)}', found)
    file.write_bytes(whole)
  shutil.rmtree(path)


@fault('a file of a token store cut, emptied or missing', 'is named, 65', full=30, short=9)
def lost_files(lab: Laboratory, times: int) -> Iterator[Trial]:
  path = _store(lab)
  files = sorted(file for file in path.rglob('*.npy'))
  for number in range(times):
    file = files[number % len(files)]
    whole = file.read_bytes()
    harm = ('cut', 'emptied', 'missing')[number // len(files) % 3]
    if harm == 'missing':
      file.unlink()
    else:
      file.write_bytes(whole[: len(whole) // 2] if harm == 'cut' else b'')
    try:
      _read_all(path)
      found = 'it was not found'
    except DataError as error:
      found = None if str(file) in str(error) else f'the message is {error}'
    yield Trial(f'{file.relative_to(path)} {harm}', found)
    file.write_bytes(whole)
  shutil.rmtree(path)


@fault(
  'a shard missing, a token out of range, a document altered, in a run',
  'ends with 65, named',
  full=6,
  short=1,
)
def in_a_run(lab: Laboratory, times: int) -> Iterator[Trial]:
  for number in range(times):
    name, harm = lab.new(), ('token', 'shard', 'document')[number % 3]
    data, store = copied(lab, name)
    shard = sorted(store.glob('shard-*'))[number % 2]
    if harm == 'shard':
      shutil.rmtree(shard)
    else:
      alter(shard, 5, 999 if harm == 'token' else 100)
    code = ended(lab.start(name, f'--gin.TaskFeed.data_dir="{data}"'))
    found = None if code == BAD_DATA else f'exit code {code}: {lab.said(name)[-300:]}'
    names = (shard.name, str(store), '' if harm == 'shard' else 'document 0')
    if found is None and not all(word in lab.said(name) for word in names):
      found = f'it said {lab.said(name)[-300:]}'
    yield Trial(f'{harm} of {shard.name}', found)
    lab.forget(name)


def copied(lab: Laboratory, name: str) -> tuple[pathlib.Path, pathlib.Path]:
  """(a copy of the data for one run, the training store in it)."""
  data = pathlib.Path(shutil.copytree(lab.folder / 'data', lab.folder / f'{name}.data'))
  (store,) = data.glob('letters-train-*')
  return data, store


def alter(shard: pathlib.Path, place: int, token: int) -> None:
  """Writes another token into a store, behind its back."""
  tokens = np.load(shard / 'tokens.npy', mmap_mode='r+')
  tokens[place] = token
  tokens.flush()


@fault(
  'damaged documents within TaskFeed.bad_documents',
  'are passed over, as by a run that is killed',
  full=4,
)
def passed_over(lab: Laboratory, times: int) -> Iterator[Trial]:
  for number in range(times):
    whole, killed = lab.new(), lab.new()
    data, store = copied(lab, whole)
    alter(store / f'shard-0000{number % 2}-of-00002', 5 + number, 999)
    flags = (f'--gin.TaskFeed.data_dir="{data}"', '--gin.TaskFeed.bad_documents=1')
    lab.run(whole, *flags)
    lab.run(killed, *flags, '--gin.Act.at=15', '--gin.Act.what="die"', code=-9)
    lab.run(killed, *flags)
    found = None
    if dict(lab.hashes(whole)) != dict(lab.hashes(killed)):
      found = 'the run that was killed decided otherwise'
    elif lab.said(whole).count('Passing over document 0') != 1:
      found = 'it was not named once'
    yield Trial(f'in shard {number % 2}', found)
    lab.forget(killed)
    lab.forget(whole)


@fault(
  'empty documents and documents of one token',
  'are left out and counted, refused where most are',
  full=20,
  short=4,
)
def short_documents(lab: Laboratory, times: int) -> Iterator[Trial]:
  for number in range(times):
    data = lab.folder / f'{lab.new()}.data'
    sound, empty = 20, number * 2
    documents = ['abcd'] * sound + ['', 'a'] * (empty // 2)
    lab.random.shuffle(documents)
    try:
      path = write_store(data, 'short', 'train', documents)
      counts = read_information(path)
      skipped = counts['skipped_empty'] + counts['skipped_one_token']
      found = None if (counts['documents'], skipped) == (sound, empty) else f'{counts} were counted'
      if empty > sound:
        found = 'most are empty, and it was not refused'
      TaskFeed('short', 'train', 2, 0, data_dir=str(data)).read(0, 100)
    except DataError as error:
      found = None if empty > sound else str(error)
    yield Trial(f'{empty} of {sound + empty}', found)
    shutil.rmtree(data)
