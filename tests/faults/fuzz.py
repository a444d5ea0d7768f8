"""Altered files for readers: each is read, or refused in one sentence.

`trials` of a row runs a process (this module as a program), which alters the file of a kind again
and again and reads it. An alteration follows from its number, so a failure can be repeated:

  PYTHONPATH=tests python -m faults.fuzz faults.fuzz_data arrow 0 17 1
"""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import importlib
import json
import os
import pathlib
import random
import resource
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import traceback
from typing import Any, NamedTuple

from faults.table import Trial
from valkyrie import foreign
from valkyrie.errors import ValkyrieError, message_of

PATIENCE = 20.0  # seconds for one file
MEMORY = 2 * 2**30  # bytes that a process may use
_LIMIT = 6 * 2**30  # bytes of addresses, which protect the machine
_LONGEST_MESSAGE = 1200  # characters
ODD_VALUES = (
  None, True, -1, 0, 1.5, 2**31, 2**62, 10**400, '', 'NaN', 'a\x1b[31m\u202e\n', '\ud83d', '../x',
  [], [[1]], {}, {'a': 1},
)  # fmt: skip
_NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 2**62, 2**64 - 1)


class Kind(NamedTuple):
  """A kind of file.

  make: writes valid files into an empty folder, and returns the one that is altered.
  read: reads that file as users do, and returns what was read; a ValkyrieError refuses it.
  seal: adapts what is beside the altered file, such as its hash, so that only its content is wrong.
  is_hashed: whether a hash protects the file, so that an altered one is refused, or is read as the
    unaltered one.
  """

  make: Callable[[pathlib.Path], pathlib.Path]
  read: Callable[[pathlib.Path], object]
  seal: Callable[[pathlib.Path], None] = lambda file: None
  is_hashed: bool = False


def trials(module: str, kinds: Mapping[str, Kind], seed: int, times: int) -> Iterator[Trial]:
  """Alters the file of each kind `times` times; `module` has the kinds as KINDS."""
  for kind in kinds:
    for number, failure in _results(module, kind, seed, times):
      yield Trial(f'{kind} {number}', failure)


def _results(module: str, kind: str, seed: int, times: int) -> Iterator[tuple[int, str | None]]:
  """(number, failure or None) of each alteration; a process that died is followed by another."""
  number = 0
  while number < times:
    with _process(module, kind, seed, number, times - number) as lines:
      for line in lines:
        answer = json.loads(line)
        yield number, answer['failure']
        number += 1
    if number < times:
      yield number, f'the process {lines.ending}'
      number += 1


class _Lines:
  """The lines of a process, each within PATIENCE; `ending` says why there are no more."""

  def __init__(self, process: subprocess.Popen, errors: pathlib.Path):
    self._process, self._errors = process, errors
    self.ending = ''

  def __iter__(self) -> Iterator[str]:
    stream = self._process.stdout
    assert stream is not None
    text = b''
    with selectors.DefaultSelector() as selector:
      selector.register(stream, selectors.EVENT_READ)
      patience = 6 * PATIENCE  # for the imports
      while selector.select(patience):
        if not (read := os.read(stream.fileno(), 65536)):
          code = self._process.wait()
          self.ending = f'ended with {code}: {self._errors.read_text(errors="replace")[-400:]}'
          return
        patience = PATIENCE
        *lines, text = (text + read).split(b'\n')
        yield from (line.decode() for line in lines)
    self.ending = f'was silent for {patience:g} s'


@contextlib.contextmanager
def _process(module: str, kind: str, seed: int, first: int, count: int) -> Iterator[_Lines]:
  """A process that reads altered files, and prints a line for each."""
  arguments = [module, kind, *map(str, (seed, first, count))]
  with tempfile.TemporaryDirectory(prefix='fuzz-') as folder:
    errors = pathlib.Path(folder, 'errors')
    with errors.open('wb') as log:
      process = subprocess.Popen(
        [sys.executable, '-m', 'faults.fuzz', *arguments],
        stdout=subprocess.PIPE,
        stderr=log,
        cwd=pathlib.Path(__file__).parents[2],
        env={**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path), 'TMPDIR': folder},
      )
    try:
      yield _Lines(process, errors)
    finally:
      process.kill()
      process.wait()
      assert process.stdout is not None
      process.stdout.close()


def altered(content: bytes, generator: random.Random, others: list[bytes]) -> bytes:
  """A file's content after one alteration, or a few."""
  changes = [_flipped, _flipped, _cut, _repeated, _removed, _inserted, _zeroed, _number, _swapped]
  if generator.random() < 0.05:
    return generator.choice([b'', *others])
  with contextlib.suppress(ValueError, RecursionError):
    if generator.random() < 0.6:
      return _other_value(content, generator)
  for _ in range(generator.choice((1, 1, 1, 2, 5))):
    content = generator.choice(changes)(content, generator)
  return content


def _span(content: bytes, generator: random.Random) -> tuple[int, int]:
  begin = generator.randrange(len(content) + 1)
  return begin, min(len(content), begin + generator.choice((1, 4, 16, 64, 1024)))


def _flipped(content: bytes, generator: random.Random) -> bytes:
  if not content:
    return content
  bit = generator.randrange(8 * len(content))
  changed = bytearray(content)
  changed[bit // 8] ^= 1 << bit % 8
  return bytes(changed)


def _cut(content: bytes, generator: random.Random) -> bytes:
  return content[: generator.randrange(len(content) + 1)]


def _repeated(content: bytes, generator: random.Random) -> bytes:
  begin, end = _span(content, generator)
  return content[:end] + content[begin:end] * generator.choice((1, 2, 50)) + content[end:]


def _removed(content: bytes, generator: random.Random) -> bytes:
  begin, end = _span(content, generator)
  return content[:begin] + content[end:]


def _inserted(content: bytes, generator: random.Random) -> bytes:
  begin, _ = _span(content, generator)
  return content[:begin] + generator.randbytes(generator.choice((1, 8, 300))) + content[begin:]


def _zeroed(content: bytes, generator: random.Random) -> bytes:
  begin, end = _span(content, generator)
  return content[:begin] + bytes(end - begin) + content[end:]


def _number(content: bytes, generator: random.Random) -> bytes:
  size = generator.choice((1, 2, 4, 8))
  begin = generator.randrange(len(content) + 1)
  number = generator.choice(_NUMBERS) % 2 ** (8 * size)
  return content[:begin] + number.to_bytes(size, 'little') + content[begin + size :]


def _swapped(content: bytes, generator: random.Random) -> bytes:
  begin, end = _span(content, generator)
  other, _ = _span(content, generator)
  return content[:begin] + content[other : other + end - begin] + content[end:]


def _other_value(content: bytes, generator: random.Random) -> bytes:
  """A JSON text, or one of its lines, with another value at a place; ValueError if it is none."""
  lines = content.splitlines(keepends=True)
  number = generator.randrange(len(lines)) if len(lines) > 1 else 0
  try:
    value, before, after = json.loads(content), b'', b''
  except ValueError:
    value = json.loads(lines[number])
    before, after = b''.join(lines[:number]), b'\n' + b''.join(lines[number + 1 :])
  return before + json.dumps(_with_another(value, generator)).encode() + after


def _with_another(value: Any, generator: random.Random) -> Any:
  places = [*value] if isinstance(value, dict) else [*range(len(value))]
  if not places:
    return generator.choice(ODD_VALUES)
  place = generator.choice(places)
  changed = value.copy()
  if isinstance(value[place], dict | list) and generator.random() < 0.8:
    changed[place] = _with_another(value[place], generator)
  elif generator.random() < 0.2:
    del changed[place]
  else:
    changed[place] = generator.choice(ODD_VALUES)
  return changed


def _special(file: pathlib.Path, number: int) -> None:
  """Puts something else than a regular file, or an immense one, at the place of a file."""
  if number == 0:
    os.mkfifo(file)
  elif number == 1:
    file.symlink_to('/dev/zero')
  elif number == 2:
    file.mkdir()
  elif number == 3:
    with contextlib.chdir(file.parent), socket.socket(socket.AF_UNIX) as listening:
      listening.bind(file.name)
  elif number == 4:
    file.symlink_to('missing')
  elif number == 5:
    file.symlink_to(file.name)
  elif number == 6:
    with file.open('wb') as stream:
      stream.truncate(20 * 2**30)  # sparse


SPECIAL = 7


def _failure(read: Callable[[], object], is_right: Callable[[object], bool]) -> str | None:
  """Why a file was neither read nor refused in one sentence."""
  try:
    if not is_right(read()):
      return 'other values than the unaltered ones were read'
  except ValkyrieError as error:
    message = message_of(error)
    if '\n' in message.strip() or len(message) > _LONGEST_MESSAGE:
      return f'the message is {message[:2000]!r}'
    if foreign.shown(message) != message:
      return f'the message has hidden characters: {message!r}'
  except BaseException:  # a panic of Rust is no Exception
    return f'a traceback: {traceback.format_exc()[-1500:]}'
  used = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return f'the process used {used / 2**30:.2f} GiB' if used > MEMORY else None


def _comparison(kind: Kind, file: pathlib.Path) -> Callable[[object], bool]:
  """Whether a value is right that was read of an altered file."""
  if not kind.is_hashed:
    return lambda value: True
  expected = kind.read(file)
  assert expected is not None
  return lambda value: value == expected


def main(arguments: list[str]) -> None:
  """Reads altered files, and prints a JSON line for each: the failure, or null."""
  module, name, seed, first, count = arguments
  kinds: Mapping[str, Kind] = importlib.import_module(module).KINDS
  kind = kinds[name]
  answers = os.fdopen(os.dup(1), 'w')
  os.dup2(2, 1)
  resource.setrlimit(resource.RLIMIT_AS, (_LIMIT, _LIMIT))
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
  with tempfile.TemporaryDirectory(prefix='fuzz-') as place:
    # Each trial has the same path: a store names the place of its source.
    folder, made = pathlib.Path(place, 'folder'), pathlib.Path(place, 'made')
    folder.mkdir()
    file = kind.make(folder)
    folder.rename(made)
    shutil.copytree(made, folder)
    content = file.read_bytes()
    is_right = _comparison(kind, file)
    others = [bytes(range(256)), b'PK\x03\x04', b'{"a": ' * 50, content[::-1], content * 3]
    for number in range(int(first), int(first) + int(count)):
      shutil.rmtree(folder)  # what was read may have changed what is beside the file
      shutil.copytree(made, folder)
      if number < SPECIAL:
        file.unlink()
        _special(file, number)
      else:
        file.write_bytes(altered(content, random.Random(f'{seed} {name} {number}'), others))
        with contextlib.suppress(Exception):  # what can no longer be sealed stays as it is
          kind.seal(file)
      failure = _failure(lambda: kind.read(file), is_right)
      print(json.dumps({'failure': failure}), file=answers, flush=True)


if __name__ == '__main__':
  main(sys.argv[1:])
