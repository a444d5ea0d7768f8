"""Command line that tokenizes a split of a task into a token store.

  python -m valkyrie.data.build_store --task=python_stdlib --split=train

The same command continues a killed build. --processes=N builds N shards at once. Many machines with
a shared directory build a large task, each with its own `--shard`; the last one to finish writes
store.json:

  python -m valkyrie.data.build_store --task=fineweb --source=gs://bucket/fineweb --split=train \\
      --output=DIR --shards=512 --shard=17

With --beam, the workers of Apache Beam build the shards. All options after --beam are Beam's:

  python -m valkyrie.data.build_store ... --beam --runner=FlinkRunner --flink_master=HOST:PORT

The module valkyrie.tasks.NAME registers a task NAME, NAME.X or NAME/X; 'package.module:NAME' names
another module. A task of seqio needs the feature 'targets'. With 'inputs' too, a document is a
prompt and its answer, and only the answer is learned. Documents with the same 'sequence_key' (a
string) belong together. 'FEATURE_pretokenized', which seqio's tokenize adds, holds the text.
"""

import argparse
from collections.abc import Mapping, Sequence
import json
import os
import pathlib
import sys
import threading
from typing import Any, NoReturn

from valkyrie.data import document_source, store_builder, token_store, vocabularies
from valkyrie.data.selection import Selection
from valkyrie.data.store_location import store_path
from valkyrie.distributed import console
from valkyrie.errors import ConfigurationError, Preempted, ValkyrieError, usable_path


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog='valkyrie-build-store',
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  add = parser.add_argument
  add('--task', help='task to build: NAME or package.module:NAME')
  add('--split', default='train', help='split of the task (default: %(default)s)')
  add('--vocabulary', default='bytes', help="'bytes' (default), a .model file or a tokenizer.json")
  add('--source', help='location of the documents, for a task such as fineweb that needs one')
  add('--output', help='directory of the store (default: where a run looks)')
  add('--data_dir', help='TaskFeed.data_dir, the directory of all stores, for the default --output')
  add('--option', action='append', default=[], metavar='NAME=VALUE', help='option of the source')
  add('--rebuild', action='store_true', help='build it again, and then replace the old one')
  add('--renew', action='store_true', help='build unfinished shards of another source again')
  add('--unique', action='store_true', help='drop all but the first of equal documents')
  add('--processes', type=int, default=1, help='shards to build at once (default: %(default)s)')
  shards = store_builder.DEFAULT_SHARDS
  add('--shards', type=int, default=shards, help='number of shards (default: %(default)s)')
  add('--shard', type=int, help='number, from 0, of the only shard to build (default: all)')
  add('--mixture', help='print the tasks and rates of this seqio Mixture, package.module:NAME')
  add('--verify', action='store_true', help='check every byte of the store in --output instead')
  add('--for_a_run', action='store_true', help='print JSON; end with standard input')
  add(
    '--beam',
    nargs=argparse.REMAINDER,
    metavar='OPTION',
    help="build the shards with Apache Beam; the options after it are Beam's, e.g. --runner=NAME",
  )
  return parser


def _run(arguments: argparse.Namespace) -> Mapping[str, Any] | None:
  """The rates of a mixture, or store.json; None while shards are missing."""
  if arguments.output is not None:
    arguments.output = pathlib.Path(usable_path('--output', arguments.output))
  if arguments.mixture is not None:
    with document_source.quiet():
      from valkyrie.data import seqio_tasks  # noqa: PLC0415  (TensorFlow)
    return seqio_tasks.rates(arguments.mixture)
  if arguments.verify:
    if arguments.output is None:
      raise ConfigurationError('--verify needs --output, the directory of the store.')
    return token_store.verify(arguments.output)
  _check(arguments)
  options = [_option(text) for text in arguments.option]
  selection = Selection(
    arguments.task,
    arguments.split,
    vocabularies.load(arguments.vocabulary),
    arguments.source,
    dict(options),
    arguments.unique,
  )
  if arguments.output is None:
    arguments.output = store_path(selection, arguments.data_dir)
  return store_builder.build(
    selection,
    arguments.output.absolute(),
    shards=arguments.shards,
    shard=arguments.shard,
    processes=arguments.processes,
    rebuild=arguments.rebuild,
    renew=arguments.renew,
    beam=arguments.beam,
  )


def _check(arguments: argparse.Namespace) -> None:
  """Raises a ConfigurationError for arguments of a build that do not fit together."""
  if arguments.task is None:
    raise ConfigurationError('--task is missing. Name the task to build, or pass --verify.')
  shards = range(arguments.shards)
  is_one = arguments.shard is None or arguments.shard in shards
  if not shards or not is_one:
    raise ConfigurationError(
      f'--shard={arguments.shard} and --shards={arguments.shards} are out of range. Use 1 or more '
      'shards, and a shard from 0 to --shards - 1.'
    )
  if arguments.processes < 1:
    raise ConfigurationError(f'--processes={arguments.processes} must be 1 or more.')
  if arguments.beam is None:
    return
  if arguments.shard is not None or arguments.processes != 1:
    raise ConfigurationError(
      f'--beam builds all shards by its own workers, but got --shard={arguments.shard} and '
      f'--processes={arguments.processes}. Remove both. Options of the runner give the number of '
      'workers, such as --direct_num_workers=2.'
    )
  _, of_beam = _parser().parse_known_args(arguments.beam)
  misplaced = [option for option in arguments.beam if option not in of_beam]
  if misplaced:
    raise ConfigurationError(
      f'Found {" ".join(misplaced)} after --beam, but only options of Apache Beam are expected '
      'there. Write it before --beam.'
    )


def _option(text: str) -> tuple[str, str]:
  name, equals, value = text.partition('=')
  if not equals:
    raise ConfigurationError(f'--option={text} has no value. Write --option=NAME=VALUE.')
  return name, value


def _answer(arguments: argparse.Namespace) -> NoReturn:
  """Runs the command for a run: prints the result, or the error, as JSON, and ends the process.

  All other output, such as what a task prints, goes to standard error.
  """
  answers = open(os.dup(1), 'w')  # noqa: SIM115, for as long as the process lives
  os.dup2(2, 1)
  sys.stdout = sys.stderr
  watcher = threading.Thread(target=_end_with_the_input, daemon=True)
  watcher.start()
  try:
    answer = {'done': _run(arguments)}
  except ValkyrieError as error:
    answer = {'error': type(error).__name__, 'message': str(error)}
  print(json.dumps(answer), file=answers, flush=True)
  os._exit(0)


def _end_with_the_input() -> NoReturn:
  """Ends this process when its standard input is closed, as the system does after `kill -9`."""
  os.read(0, 1)
  os._exit(Preempted.exit_code)


@console.lasting_streams()
@console.program
def main(line: Sequence[str] | None = None) -> None:
  """Runs the command line, and prints what is done."""
  arguments = _parser().parse_args(line)
  # Only tf.data is used, so that the accelerators stay free for training.
  os.environ |= {'CUDA_VISIBLE_DEVICES': '', 'JAX_PLATFORMS': 'cpu'}
  if arguments.for_a_run:
    _answer(arguments)
  done = _run(arguments)
  if arguments.mixture is not None:
    print(json.dumps(done))
  elif done is None:
    print(f'{arguments.output}: this shard is finished, other shards are missing')
  else:
    lines = [str(arguments.output), *_statistics(done)]
    print('\n'.join(lines))


def _statistics(information: Mapping[str, Any]) -> list[str]:
  """Lines about a finished store for people."""
  documents = information['documents']
  tokens = information['tokens']
  ratio = information['text_bytes'] / tokens
  lines = [f'{documents:,} documents, {tokens:,} tokens, {ratio:.2f} bytes of text a token']
  skipped = information['skipped_empty'] + information['skipped_one_token']
  if skipped:
    lines.append(f'{skipped:,} documents with fewer than two tokens were left out')
  if 'duplicates' in information:
    duplicates = information['duplicates']['documents']
    documents -= duplicates
    lines.append(f'{duplicates:,} documents are equal to an earlier one and were dropped')
  lines += _lengths(information['lengths'], documents)
  fingerprint = information['fingerprint']
  lines.append(f'fingerprint {fingerprint}')
  return lines


def _lengths(lengths: Mapping[str, int], documents: int) -> list[str]:
  """A line for each number of tokens that documents have, by powers of two."""
  counts = {}
  for begin, count in lengths.items():
    counts[int(begin)] = count
  lines = []
  for begin, count in sorted(counts.items()):
    last = 2 * begin - 1
    share = count / documents
    bounds = f'{begin:>12,} to {last:>12,} tokens'
    lines.append(f'{bounds}: {count:,} documents, {share:.1%}')
  return lines


if __name__ == '__main__':
  sys.exit(main())
