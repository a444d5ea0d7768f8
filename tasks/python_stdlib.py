"""The running Python's own standard library sources: real text that every machine has.

One document a file, as text with its line ends made '\\n'. Left out is what some installations
lack (tests, idlelib, tkinter, distutils, ...) or write themselves, and encodings' tables. A file is
in 'validation' by the hash of its path, about one in twenty, so that it stays there in every
Python version. Files of one top-level package or module make a sequence.
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

import seqio
import tensorflow as tf

from valkyrie.data.document_source import DocumentSource, TextDocument
from valkyrie.errors import DataError

VALIDATION_PERCENT = 5
_LEFT_OUT = {
  *('__phello__', '__pycache__', 'dist-packages', 'distutils', 'encodings', 'ensurepip'),
  *('idlelib', 'lib-dynload', 'lib2to3', 'macholib', 'pydoc_data', 'site-packages', 'test'),
  *('tests', 'tkinter', 'turtledemo'),
}
# Written by the build or by the distribution, so different from machine to machine.
_LEFT_OUT_PREFIXES = ('_sysconfigdata', '_distutils_system_mod', 'sitecustomize', 'config-')


class StandardLibrarySource(DocumentSource):
  """The library's .py files in the order of their paths."""

  def __init__(self):
    super().__init__(splits=('train', 'validation'))

  def documents(self, split: str, shard: int, shards: int) -> Iterator[TextDocument]:
    root, paths = _root(), _paths(split)
    for path in paths[len(paths) * shard // shards : len(paths) * (shard + 1) // shards]:
      yield TextDocument(_text(root / path), sequence_key=path.split('/')[0], name=path)

  def describe(self, split: str) -> dict[str, Any]:
    paths = _paths(split)
    return {
      'kind': 'python_stdlib',
      'python': f'{platform.python_implementation()} {platform.python_version()}',
      'files': paths,
      'files_sha256': hashlib.sha256('\n'.join(paths).encode()).hexdigest(),
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
      f'The standard library at {root} holds no source files for {split!r}: this Python comes '
      'without them. Use another Python, or another task.'
    )
  return kept


def _is_kept(path: str) -> bool:
  parts = path.split('/')
  return not any(part in _LEFT_OUT or part.startswith(_LEFT_OUT_PREFIXES) for part in parts)


def _split(path: str) -> str:
  digest = hashlib.blake2b(path.encode(), digest_size=8).digest()
  return 'validation' if int.from_bytes(digest, 'big') % 100 < VALIDATION_PERCENT else 'train'


def _text(file: pathlib.Path) -> str:
  """The source text, in the encoding that the file declares, or as UTF-8 with replacements."""
  try:
    content = file.read_bytes()
  except OSError as error:
    raise DataError(f'The library file {file} cannot be read ({error.strerror}).') from error
  try:
    encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
    text = content.decode(encoding)
  except (SyntaxError, UnicodeDecodeError):
    text = content.decode('utf-8', errors='replace')
  return text.replace('\r\n', '\n')


seqio.TaskRegistry.add(
  'python_stdlib',
  source=StandardLibrarySource(),
  preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos],
  output_features={
    'targets': seqio.Feature(vocabulary=seqio.ByteVocabulary(), add_eos=True, dtype=tf.int32)
  },
)
