"""Tokenises a split of a seqio task into a token store.

  python -m valkyrie.data.build_store --task=python_stdlib --split=train --output=DIR

A killed build goes on where it stopped when the same command runs again. A large task is built by
many processes that see one directory, each with its own `--shard`; whichever finishes last writes
store.json:

  python -m valkyrie.data.build_store --task=fineweb --source=gs://bucket/fineweb --split=train \\
      --output=DIR --shards=512 --shard=17

A task is found by its name: NAME is registered by the module valkyrie.tasks.NAME (up to the first
'.' or '/' of NAME), and 'package.module:NAME' by that module. It has a feature 'targets'. Where
it has 'inputs' too, a document is a prompt and its answer, of which only the answer is learnt.
'sequence_key' (a string) marks documents that belong together, and 'NAME_pretokenized', which
seqio's tokenize leaves of a feature, tells the bytes of text.
"""

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import pathlib
import pkgutil
import sys
import time
from typing import Any

from valkyrie.config.suggest import did_you_mean
from valkyrie.data import store_writer, token_store, vocabularies
from valkyrie.data.vocabularies import Vocabulary
from valkyrie.errors import ConfigurationError, ValkyrieError

DEFAULT_SHARDS = 8


def build(
  task: str,
  split: str,
  vocabulary: Vocabulary,
  output: pathlib.Path,
  *,
  source: str | None = None,
  shards: int = DEFAULT_SHARDS,
  shard: int | None = None,
) -> dict[str, Any] | None:
  """Builds the store, or one shard of it; store.json's content, or None while shards are missing.

  Raises:
    ConfigurationError: no such task or split, or it cannot be built as asked.
    DataError: the task's source is not what it should be.
  """
  if (output / token_store.STORE_FILE).exists():
    return _finished(output, task, split, vocabulary, source)
  module, name = _task_module(task)
  print(f'building {output}\nloading seqio and TensorFlow', file=sys.stderr, flush=True)
  with _silenced():
    import tensorflow as tf  # noqa: PLC0415  (8 s: only where a store is built)

    from valkyrie.data.task_reader import TaskReader  # noqa: PLC0415

    tf.config.list_logical_devices()
  reader = TaskReader(module, name, split, vocabulary, source)
  recipe = store_writer.Recipe(
    task=task,
    split=split,
    vocabulary=vocabulary,
    source=reader.description | {'location': source},
    shards=shards,
  )
  progress = _Progress(f'{task}/{split}', shards)
  wanted = range(shards) if shard is None else [shard]
  for number in wanted:
    store_writer.write_shard(
      output, recipe, number, lambda part: reader.documents(part, shards), progress.add
    )
    progress.end_shard(number)
  return store_writer.finish(output, recipe)


def _finished(
  output: pathlib.Path, task: str, split: str, vocabulary: Vocabulary, source: str | None
) -> dict[str, Any]:
  """store.json of a finished store, unless it is of something else than was asked for."""
  information = token_store.read_information(output)
  recorded = (information['vocabulary']['fingerprint'], information['source'].get('location'))
  found = (information['task'], information['split'], *recorded)
  asked = (task, split, vocabulary.fingerprint, source)
  if found != asked:
    raise ConfigurationError(
      f'{output} holds another store (task, split, vocabulary, source): found {found}, asked for '
      f'{asked}. Name another --output, or delete that directory.'
    )
  return information


@contextlib.contextmanager
def _silenced():
  """TensorFlow's C++ reports at its start that it finds no GPU, whatever its log level."""
  sys.stderr.flush()
  kept = os.dup(2)
  with open(os.devnull, 'w') as nowhere:
    os.dup2(nowhere.fileno(), 2)
  try:
    yield
  finally:
    os.dup2(kept, 2)
    os.close(kept)


def _task_module(task: str) -> tuple[str, str]:
  """The module that registers a task, and the task's name there."""
  module, colon, name = task.partition(':')
  if not colon:
    name = task
    module = f'valkyrie.tasks.{task.replace("/", ".").split(".")[0]}'
  try:
    found = importlib.util.find_spec(module) is not None
  except (ImportError, ValueError):
    found = False
  if not found:
    tasks = importlib.import_module('valkyrie.tasks')
    known = sorted(m.name for m in pkgutil.iter_modules(tasks.__path__))
    raise ConfigurationError(
      f'There is no module {module} to register the task {task!r}.{did_you_mean(task, known)} '
      f"Tasks here: {', '.join(known)}; one of your own is 'package.module:NAME'."
    )
  return module, name


class _Progress:
  """A line that rewrites itself on a terminal; elsewhere a plain line now and then."""

  def __init__(self, name: str, shards: int):
    self._name, self._shards = name, shards
    self._documents = self._tokens = 0
    self._begin = self._shown = time.monotonic()
    self._terminal = sys.stderr.isatty()

  def add(self, shard: int, document: store_writer.Document):
    self._documents += 1
    self._tokens += len(document.tokens)
    now = time.monotonic()
    if now - self._shown >= (0.2 if self._terminal else 10):
      self._shown = now
      self._show(shard, '\r' if self._terminal else '\n')

  def end_shard(self, shard: int):
    self._show(shard + 1, '\r' if self._terminal and shard + 1 < self._shards else '\n')

  def _show(self, done: int, end: str):
    bar = f'[{"#" * (20 * done // self._shards):20}] ' if self._terminal else ''
    rate = self._tokens / max(time.monotonic() - self._begin, 1e-9)
    print(
      f'{self._name} {bar}{done} of {self._shards} shards, {self._documents:,} documents, '
      f'{self._tokens:,} tokens, {rate:,.0f} tokens/s',
      end=end,
      file=sys.stderr,
      flush=True,
    )


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog='python -m valkyrie.data.build_store',
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  add = parser.add_argument
  add('--task', help='NAME, or package.module:NAME')
  add('--split', default='train')
  add('--vocabulary', default='bytes', help="'bytes', a .model file or a tokenizer.json")
  add('--source', help='where the documents are, for tasks that read from a place')
  add('--output', required=True, type=pathlib.Path, help="the store's directory")
  add('--shards', type=int, default=DEFAULT_SHARDS, help='shards of the whole store')
  add('--shard', type=int, help='build only this shard, from 0')
  add('--verify', action='store_true', help='read every byte of the store in --output again')
  add('--json', action='store_true', help='end with one line of JSON on standard output')
  return parser


def _run(arguments: argparse.Namespace) -> dict[str, Any] | None:
  if arguments.verify:
    return token_store.verify(arguments.output)
  if arguments.task is None:
    raise ConfigurationError('--task is missing: name the seqio task to build, or --verify.')
  if arguments.shards < 1 or arguments.shard not in (None, *range(arguments.shards)):
    raise ConfigurationError(
      f'--shard={arguments.shard} of --shards={arguments.shards}: shards are numbered from 0, and '
      'there must be at least one.'
    )
  return build(
    arguments.task,
    arguments.split,
    vocabularies.load(arguments.vocabulary),
    arguments.output.absolute(),
    source=arguments.source,
    shards=arguments.shards,
    shard=arguments.shard,
  )


def main() -> int:
  """The command line; the exit code is the error's, and its message goes to standard error."""
  arguments = _parser().parse_args()
  # Only tf.data is used: the accelerators are for training.
  os.environ |= {'CUDA_VISIBLE_DEVICES': '', 'JAX_PLATFORMS': 'cpu'}
  try:
    information = _run(arguments)
  except ValkyrieError as error:
    if arguments.json:
      print(json.dumps({'error': type(error).__name__, 'message': str(error)}))
    else:
      print(f'build_store: {error}', file=sys.stderr)
    return error.exit_code
  names = ('documents', 'tokens', 'text_bytes', 'skipped_empty', 'skipped_one_token', 'fingerprint')
  report = {name: information[name] for name in names} if information else {}
  if arguments.json:
    print(json.dumps(report))
  else:
    state = ', '.join(f'{name} {value}' for name, value in report.items())
    print(f'{arguments.output}: {state or "this shard is done, others are still missing"}')
  return 0


if __name__ == '__main__':
  sys.exit(main())
