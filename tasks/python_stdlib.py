"""Sources of the running Python's standard library: real text that every machine has.

A file is a document, as text with '\\n' line ends. Excluded are files that some installations lack
(tests, idlelib, tkinter, distutils, ...) or generate, and the tables of encodings. The hash of its
path puts about one file of twenty into 'validation', the same in every Python version. The files of
one top-level package or module are a sequence.
"""

from collections.abc import Iterator
import functools
import hashlib
import io
import pathlib
import platform
import sysconfig
import tokenize
from typing import Any

from valkyrie.data.document_source import DocumentSource, TextDocument, register, stable_hash
from valkyrie.errors import DataError

VALIDATION_PERCENT = 5
_EXCLUDED = {
  *('__phello__', '__pycache__', 'dist-packages', 'distutils', 'encodings', 'ensurepip'),
  *('idlelib', 'lib-dynload', 'lib2to3', 'macholib', 'pydoc_data', 'site-packages', 'test'),
  *('tests', 'tkinter', 'turtledemo'),
}
# Files of the build or of the distribution, which differ between machines.
_EXCLUDED_PREFIXES = ('_sysconfigdata', '_distutils_system_mod', 'sitecustomize', 'config-')


class StandardLibrarySource(DocumentSource):
  """The .py files of the library, sorted by path."""

  def __init__(self):
    super().__init__(splits=('train', 'validation'))

  def documents(self, split: str, shard: int, shards: int) -> Iterator[TextDocument]:
    root = _root()
    paths = _paths(split)
    for path in paths[len(paths) * shard // shards : len(paths) * (shard + 1) // shards]:
      yield TextDocument(_text(root / path), sequence_key=path.split('/')[0], name=path)

  def describe(self, split: str) -> dict[str, Any]:
    paths = _paths(split)
    digest = hashlib.sha256('\n'.join(paths).encode())
    for path in paths:
      digest.update(hashlib.sha256(_text(_root() / path).encode()).digest())
    return {
      'kind': 'python_stdlib',
      'python': f'{platform.python_implementation()} {platform.python_version()}',
      'files': paths,
      'files_sha256': digest.hexdigest(),
    }


def _root() -> pathlib.Path:
  return pathlib.Path(sysconfig.get_paths()['stdlib'])


@functools.cache
def _paths(split: str) -> list[str]:
  root = _root()
  paths = sorted(path.relative_to(root).as_posix() for path in root.rglob('*.py'))
  kept = [path for path in paths if _is_kept(path) and _split(path) == split]
  if not kept:
    raise DataError(
      f'The standard library at {root} has no source files for {split!r}. '
      'Use a Python that includes them, or another task.'
    )
  return kept


def _is_kept(path: str) -> bool:
  parts = path.split('/')
  return not any(part in _EXCLUDED or part.startswith(_EXCLUDED_PREFIXES) for part in parts)


def _split(path: str) -> str:
  return 'validation' if stable_hash(path) % 100 < VALIDATION_PERCENT else 'train'


def _text(file: pathlib.Path) -> str:
  """The text of a file in its declared encoding, or in UTF-8 with replacement characters."""
  content = file.read_bytes()
  try:
    encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
    text = content.decode(encoding)
  except (SyntaxError, UnicodeDecodeError):
    text = content.decode('utf-8', errors='replace')
  return text.replace('\r\n', '\n')


register('python_stdlib', StandardLibrarySource())
