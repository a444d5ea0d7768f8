"""The gate for files and texts that people, other programs or networks wrote.

A file is regular and of bounded size before a byte of it is read, JSON has bounded depth and fields
of known types, and a name or text in a message shows no character that a terminal would obey.

A ValueError, or an OSError of a file, says why one is refused; the reader names the file.
"""

import collections
from collections.abc import Callable, Iterator
import errno
import io
import json
import os
import re
import stat
from typing import Any

LARGEST_FILE = 2**30  # bytes
LARGEST_TEXT = 2**32  # bytes of a text that is read into memory
_PIECE = 2**24  # bytes of such a text that are read at once
LONGEST_LINE = 2**29  # bytes: several copies of a line are in memory at once
DEEPEST = 100  # brackets inside one another
_LONGEST_REASON = 300  # characters of a library's text in a message
_SYSTEM_FILE = 2**20  # bytes that are read from a file without a size, as in /proc
_STRING_OR_BRACKET = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[][{}]', re.DOTALL)
# Control characters, marks that reverse the direction of a text, line separators, half characters.
_OBEYED = '\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff'
_HIDDEN = re.compile(f'[{_OBEYED}]')
# In whole texts, line ends and tabs stay. A carriage return begins a line of progress, or ends one.
_HIDDEN_IN_LINES = re.compile(rf'(?!\n|\t|\r\n|(?<!.)\r)[{_OBEYED}]', re.DOTALL)
_KINDS = {
  stat.S_IFDIR: 'a folder',
  stat.S_IFIFO: 'a pipe',
  stat.S_IFSOCK: 'a socket',
  stat.S_IFCHR: 'a device',
  stat.S_IFBLK: 'a device',
}


def opened(file: str | os.PathLike, largest: int | None = None) -> io.BufferedReader:
  """Opens a regular file, of at most `largest` bytes, for reading.

  Nothing else is opened: a pipe could make this process wait, a device could be endless.

  Raises:
    OSError: the system refuses, or the file is not a regular one.
    ValueError: it is too large.
  """
  _check_kind(os.stat(file), file)
  descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
  try:
    found = os.fstat(descriptor)  # the name may lead elsewhere by now
    _check_kind(found, file)
    if largest is not None and found.st_size > largest:
      raise ValueError(f'it has {found.st_size:,} bytes, expected at most {largest:,}')
    return open(descriptor, 'rb')
  except BaseException:
    os.close(descriptor)
    raise


def content(file: str | os.PathLike, largest: int = LARGEST_FILE) -> bytes:
  """The bytes that a regular file has when it is opened; raises as `opened`."""
  with opened(file, largest) as stream:
    status = os.fstat(stream.fileno())
    return stream.read(status.st_size or _SYSTEM_FILE)


def _check_kind(found: os.stat_result, file: str | os.PathLike) -> None:
  if not stat.S_ISREG(found.st_mode):
    file_type = stat.S_IFMT(found.st_mode)
    kind = _KINDS.get(file_type, 'something else')
    raise OSError(errno.EINVAL, f'it is not a regular file, but {kind}', os.fspath(file))


def check_tree(root: str) -> None:
  """Checks a path that is to be a file or a folder, before the folder is listed.

  Raises:
    OSError: it is a pipe, a socket or a device.
    ValueError: a link leads to a folder on the way to it, below which files have endless names.
  """
  is_folder = os.path.isdir(root)
  if os.path.exists(root) and not is_folder:
    _check_kind(os.stat(root), root)

  def target_of(folder: str) -> str:
    real_path = os.path.realpath(folder)
    return os.path.join(real_path, '')

  above = {root: [target_of(root)]}  # by folder, itself and those above it
  for folder, folders, _ in os.walk(root, followlinks=True):
    ways = above.pop(folder)
    for name in folders:
      path = os.path.join(folder, name)
      target = target_of(path)
      is_above = any(way.startswith(target) for way in ways)
      if is_above and os.path.islink(path):
        raise ValueError(f'its link {path} leads to a folder above it: remove the link')
      above[path] = [*ways, target]


def shown(text: object) -> str:
  """A name or text for one line of a message: hidden characters are escaped, as repr does.

  Text that people read stays as it is, in any script.
  """
  return _HIDDEN.sub(_escaped, str(text))


def shown_lines(text: str) -> str:
  """As `shown`, for a text of several lines, whose line ends and tabs stay."""
  return _HIDDEN_IN_LINES.sub(_escaped, text)


def reason(error: BaseException) -> str:
  """What a library or the system says of an error, on one line of at most a few hundred letters."""
  words = str(error).split()
  one_line = ' '.join(words)
  text = shown(one_line or type(error).__name__)
  if len(text) > _LONGEST_REASON:
    begin = text[:_LONGEST_REASON]
    text = f'{begin}...'
  return text


def _escaped(found: re.Match[str]) -> str:
  quoted = ascii(found[0])
  return quoted[1:-1]


def whole(stream: Any, check: Callable[[bytes], None] = lambda piece: None) -> bytes:
  """The content of a stream of at most LARGEST_TEXT bytes; `check` gets each piece when it is read.

  Raises a ValueError if it is larger: a small compressed file may have any content.
  """
  pieces: list[bytes] = []
  size = 0
  while True:
    piece = stream.read(_PIECE)
    if not piece:
      break
    check(piece)
    pieces.append(piece)
    size += len(piece)
    if size > LARGEST_TEXT:
      raise ValueError(f'it has more than {LARGEST_TEXT:,} bytes, which are read at once')
  return b''.join(pieces)


def lines(stream: Any, longest: int = LONGEST_LINE) -> Iterator[Any]:
  """The lines of a stream, with their ends, each of at most so many bytes (or characters)."""
  while True:
    line = stream.readline(longest + 1)
    if not line:
      return
    if len(line) > longest:
      begin = line[:40]
      raise ValueError(f'a line begins with {begin!r} and has more than {longest:,} bytes')
    yield line


class RepeatedField(ValueError):
  """A JSON object has two fields of one name; the standard library would keep the last."""


def json_value(text: bytes) -> Any:
  """The value of a JSON text in which at most DEEPEST brackets are inside one another.

  Raises a RepeatedField, or another ValueError.
  """
  brackets = text.count(b'[') + text.count(b'{')
  if brackets > DEEPEST:
    _check_depth(text)
  try:
    encoding = json.detect_encoding(text)
    decoded = text.decode(encoding, 'surrogatepass')
    return _JSON.decode(decoded)
  except (RecursionError, MemoryError) as error:
    raise ValueError(f'it is too large ({type(error).__name__})') from None


def _with_each_field_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  fields_by_name = dict(pairs)
  if len(fields_by_name) < len(pairs):
    names = [name for name, _ in pairs]
    counts = collections.Counter(names)
    ((name, _),) = counts.most_common(1)
    raise RepeatedField(f'it has the field {name!r:.80} twice in one object')
  return fields_by_name


_JSON = json.JSONDecoder(object_pairs_hook=_with_each_field_once)  # once: json.loads is slower


def _check_depth(text: bytes) -> None:
  """Raises a ValueError if more than DEEPEST brackets are inside one another."""
  depth = 0
  for match in _STRING_OR_BRACKET.finditer(text):
    mark = match[0]
    if mark in b'[{':
      depth += 1
    elif mark in b']}':
      depth -= 1
    if depth > DEEPEST:
      raise ValueError(f'it has more than {DEEPEST} brackets inside one another')


def json_object(text: bytes, **kinds: Any) -> dict[str, Any]:
  """The JSON object in a text, whose fields of these names have these types, see `fields`."""
  return fields(json_value(text), **kinds)


def fields(found: Any, **kinds: Any) -> dict[str, Any]:
  """The value, if it is a JSON object whose fields of these names have these types.

  A field whose type has None may be missing, and True and False are not numbers.
  """
  if not isinstance(found, dict):
    raise ValueError(f'it has {found!r:.40}, but a JSON object was expected')
  for name, kind in kinds.items():
    value = found.get(name)
    is_truth = kind is int and isinstance(value, bool)
    if not isinstance(value, kind) or is_truth:
      raise ValueError(f'its field {name!r} has {value!r:.40}')
  return found
