"""Stores beside texts, and stores that are built again: nothing of a user is deleted."""

from collections.abc import Iterator
import pathlib
import shutil
import subprocess
import sys

from faults.harness import Harness
from faults.table import Trial, fault
from valkyrie.data import token_store

CONFIGURATION, BAD_DATA = 78, 65


def _texts(harness: Harness) -> pathlib.Path:
  """A new folder with texts/a.txt, texts/more/b.txt and a link to texts."""
  folder = harness.folder / harness.new()
  (folder / 'texts' / 'more').mkdir(parents=True)
  (folder / 'texts' / 'a.txt').write_text('The first text.')
  (folder / 'texts' / 'more' / 'b.txt').write_text('The second text.')
  (folder / 'link').symlink_to('texts')
  return folder


def _build(folder: pathlib.Path, source: str, output: str, *more: str) -> int:
  command = [sys.executable, '-m', 'valkyrie.data.build_store', '--task=text', '--shards=2']
  command += [f'--source={folder}/{source}', f'--output={folder}/{output}', *more]
  command.append('--option=held_out=1e-9')
  return subprocess.run(command, capture_output=True, check=False).returncode


def _contents(folder: pathlib.Path) -> dict[str, bytes]:
  files = (path for path in folder.rglob('*') if path.is_file())
  return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@fault(
  'a store whose output is its source, inside it or above it, by any path or link',
  'ends with 78, and no file is written or deleted',
  full=12,
)
def not_apart(harness: Harness, times: int) -> Iterator[Trial]:
  pairs = [
    ('texts', 'texts'),
    ('texts/more', 'texts'),
    ('link', 'texts/new'),
    ('texts', 'link'),
    ('texts/**/*.txt', 'texts/more'),
    ('texts', 'link/../texts/new'),
  ]
  for number in range(times):
    folder = _texts(harness)
    before = _contents(folder)
    source, output = pairs[number % len(pairs)]
    more = ('--rebuild',) if number % 2 else ()
    code = _build(folder, source, output, *more)
    failure = None if code == CONFIGURATION else f'the exit code is {code}'
    if _contents(folder) != before:
      failure = 'the files have changed'
    yield Trial(f'{output} of {source} {" ".join(more)}', failure)
    shutil.rmtree(folder)


@fault(
  'a rebuild of a store while its source is gone, and files of a user in the store',
  'the old store stays whole; then the new one is, and the files of the user stay',
  full=4,
)
def rebuilt(harness: Harness, times: int) -> Iterator[Trial]:
  for number in range(times):
    folder = _texts(harness)
    store = folder / 'store'
    codes = [_build(folder, 'texts', 'store')]
    notes = [store / 'notes.md', store / f'shard-0000{number % 2}-of-00002' / 'notes.md']
    for file in notes:
      file.write_text('of the user')
    before = _contents(store)
    (folder / 'texts').rename(folder / 'away')
    codes.append(_build(folder, 'texts', 'store', '--rebuild'))
    stays = _contents(store) == before
    (folder / 'away').rename(folder / 'texts')
    codes.append(_build(folder, 'texts', 'store', '--rebuild'))
    failure = None if stays else 'the old store has changed'
    if failure is None and codes != [0, BAD_DATA, 0]:
      failure = f'the exit codes are {codes}'
    if failure is None:
      token_store.verify(store)
      kept = [file.exists() and file.read_text() == 'of the user' for file in notes]
      failure = None if all(kept) else 'a file of the user is gone'
    yield Trial(f'notes in shard {number % 2}', failure)
    shutil.rmtree(folder)
