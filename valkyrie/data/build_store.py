"""Command line that tokenizes a split of a seqio task into a token store.

  python -m valkyrie.data.build_store --task=python_stdlib --split=train --output=DIR

The same command continues a killed build. Many processes with a shared directory build a large
task, each with its own `--shard`; the last one to finish writes store.json:

  python -m valkyrie.data.build_store --task=fineweb --source=gs://bucket/fineweb --split=train \\
      --output=DIR --shards=512 --shard=17

The module valkyrie.tasks.NAME registers a task NAME, NAME.X or NAME/X; 'package.module:NAME' names
another module. A task has the feature 'targets'. With 'inputs' too, a document is a prompt and its
answer, and only the answer is learned. 'sequence_key' (a string) is equal for documents that belong
together, and 'FEATURE_pretokenized', which seqio's tokenize adds, gives the bytes of text.
"""

import argparse
from collections.abc import Iterator
import contextlib
import importlib
import importlib.util
import json
import os
import pathlib
import pkgutil
import shutil
import sys
import threading
from typing import Any

import tqdm

from valkyrie.config.suggest import did_you_mean
from valkyrie.data import provenance, store_writer, token_store, vocabularies
from valkyrie.data.store_location import NO_OPTIONS, Options, located
from valkyrie.data.store_writer import Document
from valkyrie.data.vocabularies import Vocabulary
from valkyrie.errors import ConfigurationError, Preempted, ValkyrieError

DEFAULT_SHARDS = 8


def build(
  task: str,
  split: str,
  vocabulary: Vocabulary,
  output: pathlib.Path,
  *,
  source: str | None = None,
  options: Options = NO_OPTIONS,
  shards: int = DEFAULT_SHARDS,
  shard: int | None = None,
  rebuild: bool = False,
) -> dict[str, Any] | None:
  """Builds a store, or one shard of it; returns store.json, or None while shards are missing.

  With `rebuild` a store that is there is removed first.

  Raises:
    ConfigurationError: the task or split is unknown, or does not fit the other arguments.
    DataError: the task's source is missing, damaged or empty.
  """
  source = located(source)
  if (output / token_store.STORE_FILE).exists():
    found = _finished(output, task, split, vocabulary, source, options)
    if not rebuild:
      provenance.check(output, found, 'run the same command with --rebuild.')
      return found
    shutil.rmtree(output)
  module, name = _task_module(task)
  print(f'building {output}\nloading seqio and TensorFlow', file=sys.stderr, flush=True)
  with _silenced():
    import tensorflow as tf  # noqa: PLC0415  (8 s, only to build a store)

    from valkyrie.data.task_reader import TaskReader  # noqa: PLC0415

    tf.config.list_logical_devices()
  reader = TaskReader(module, name, split, vocabulary, source, options)
  origin = reader.description | {'location': source, 'options': dict(options)}
  recipe = store_writer.Recipe(task, split, vocabulary, origin, shards)
  numbers = range(shards) if shard is None else [shard]
  count = tokens = 0

  def documents(number: int) -> Iterator[Document]:
    """A shard's documents; the totals and the tokens/s so far appear beside the progress."""
    nonlocal count, tokens
    for document in reader.documents(number, shards):
      count += 1
      tokens += len(document.tokens)
      rate = tokens / max(progress.format_dict['elapsed'], 1e-9)
      progress.set_postfix_str(
        f'{count:,} documents, {tokens:,} tokens, {rate:,.0f} tokens/s', refresh=False
      )
      progress.update(0)
      yield document

  with tqdm.tqdm(
    desc=f'{task}/{split}',
    total=len(numbers),
    unit='shard',
    miniters=0,  # time alone decides when the line is rewritten
    mininterval=0.2 if sys.stderr.isatty() else 10,
  ) as progress:
    for number in numbers:
      store_writer.write_shard(output, recipe, number, documents)
      progress.update()
  return store_writer.finish(output, recipe, reader.origin)


def _finished(
  output: pathlib.Path,
  task: str,
  split: str,
  vocabulary: Vocabulary,
  source: str | None,
  options: Options,
) -> dict[str, Any]:
  """Reads store.json of a finished store, which must have the requested task and source."""
  information = token_store.read_information(output)
  origin = information['source']
  recorded = (information['vocabulary']['fingerprint'], origin.get('location'))
  found = (information['task'], information['split'], *recorded, origin.get('options', {}))
  expected = (task, split, vocabulary.fingerprint, source, dict(options))
  if found != expected:
    raise ConfigurationError(
      f'{output} holds another store (task, split, vocabulary, source, options): found {found}, '
      f'expected {expected}. Use another --output, or delete that directory.'
    )
  return information


@contextlib.contextmanager
def _silenced():
  """Discards standard error: TensorFlow reports a missing GPU there at every log level."""
  sys.stderr.flush()
  kept = os.dup(2)
  with open(os.devnull, 'w') as null:
    os.dup2(null.fileno(), 2)
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
      f"Use one of {', '.join(known)}, or 'package.module:NAME' for a task of your own."
    )
  return module, name


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog='python -m valkyrie.data.build_store',
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  add = parser.add_argument
  add('--task', help='seqio task to build: NAME or package.module:NAME')
  add('--split', default='train', help='split of the task (default: %(default)s)')
  add('--vocabulary', default='bytes', help="'bytes' (default), a .model file or a tokenizer.json")
  add('--source', help='location of the documents, for a task such as fineweb that needs one')
  add('--output', required=True, type=pathlib.Path, help='directory of the store')
  add('--option', action='append', default=[], metavar='NAME=VALUE', help='of the source')
  add('--rebuild', action='store_true', help='remove the store in --output first')
  add('--shards', type=int, default=DEFAULT_SHARDS, help='number of shards (default: %(default)s)')
  add('--shard', type=int, help='number, from 0, of the only shard to build (default: all)')
  add('--verify', action='store_true', help='check every byte of the store in --output instead')
  add('--json', action='store_true', help='print the result as one line of JSON')
  add('--while-open', action='store_true', help='end when standard input is closed')
  return parser


def _run(arguments: argparse.Namespace) -> dict[str, Any] | None:
  if arguments.verify:
    return token_store.verify(arguments.output)
  if arguments.task is None:
    raise ConfigurationError('--task is missing. Name the seqio task to build, or pass --verify.')
  if arguments.shards < 1 or arguments.shard not in (None, *range(arguments.shards)):
    raise ConfigurationError(
      f'--shard={arguments.shard} and --shards={arguments.shards} are out of range. Use 1 or more '
      'shards, and a shard from 0 to --shards - 1.'
    )
  return build(
    arguments.task,
    arguments.split,
    vocabularies.load(arguments.vocabulary),
    arguments.output.absolute(),
    source=arguments.source,
    options=dict(_option(text) for text in arguments.option),
    rebuild=arguments.rebuild,
    shards=arguments.shards,
    shard=arguments.shard,
  )


def _option(text: str) -> tuple[str, str]:
  name, equals, value = text.partition('=')
  if not equals:
    raise ConfigurationError(f'--option={text} has no value. Write --option=NAME=VALUE.')
  return name, value


def _end_with_the_caller() -> None:
  """Ends this process when its standard input is closed, as the system does after `kill -9`."""
  while os.read(0, 1):
    pass
  os._exit(Preempted.exit_code)


def main() -> int:
  """Runs the command line; returns the exit code, and prints an error to standard error."""
  arguments = _parser().parse_args()
  if arguments.while_open:
    threading.Thread(target=_end_with_the_caller, daemon=True).start()
  # Only tf.data is used, so that the accelerators stay free for training.
  os.environ |= {'CUDA_VISIBLE_DEVICES': '', 'JAX_PLATFORMS': 'cpu'}
  try:
    information = _run(arguments)
  except ValkyrieError as error:
    if arguments.json:
      print(json.dumps({'error': type(error).__name__, 'message': str(error)}))
    else:
      print(f'build_store: {error}', file=sys.stderr)
    return error.exit_code
  names = (*store_writer.COUNTS, 'fingerprint')
  report = {name: information[name] for name in names} if information else {}
  if arguments.json:
    print(json.dumps(report))
  else:
    state = ', '.join(f'{name} {value}' for name, value in report.items())
    print(f'{arguments.output}: {state or "this shard is finished, other shards are missing"}')
  return 0


if __name__ == '__main__':
  sys.exit(main())
