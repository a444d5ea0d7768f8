"""The build of a token store, by one process or by several that share its shards.

One process builds a shard, whose content does not depend on the process: any number of processes
builds the same store, and so do workers on other machines (`beam_store`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
import dataclasses
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import shutil
import sys
import threading
from typing import Any

import tqdm

from valkyrie.config import redact
from valkyrie.config.suggest import did_you_mean
from valkyrie.data import provenance, store_writer, task_reader, token_store
from valkyrie.data.document_source import TASKS
from valkyrie.data.store_location import Options, located
from valkyrie.data.store_writer import Report
from valkyrie.data.task_reader import DocumentReader, TaskReader
from valkyrie.data.vocabularies import Vocabulary
from valkyrie.distributed import heartbeat
from valkyrie.errors import ConfigurationError, DataError, Preempted, ValkyrieError

DEFAULT_SHARDS = 8


@dataclasses.dataclass(frozen=True)
class Order:
  """A store to build: the arguments of `build`."""

  task: str
  split: str
  vocabulary: Vocabulary
  output: pathlib.Path
  source: str | None = None
  options: Options = dataclasses.field(default_factory=dict)
  shards: int = DEFAULT_SHARDS
  unique: bool = False


def build(
  order: Order,
  *,
  shard: int | None = None,
  processes: int = 1,
  rebuild: bool = False,
  build_shards: Callable[[Sequence[int]], None] | None = None,
) -> dict[str, Any] | None:
  """Builds a store, or one shard of it; returns store.json, or None while shards are missing.

  Args:
    order: the store.
    shard: the number of the only shard to build; None builds all.
    processes: the number of processes; it does not change the store.
    rebuild: remove a store that is there first.
    build_shards: builds the shards with these numbers, in place of processes of this machine.

  Raises:
    ConfigurationError: the task or split is unknown, or does not fit the other arguments.
    DataError: the task's source is missing, damaged or empty.
  """
  order = dataclasses.replace(order, source=located(order.source))
  if (order.output / token_store.STORE_FILE).exists():
    found = _finished(order)
    if not rebuild:
      named = (order.source, *order.options.values())
      provenance.check(order.output, found, 'run the same command with --rebuild.', named)
      return found
    shutil.rmtree(order.output)
  print(f'building {order.output}', file=sys.stderr, flush=True)
  bench = Bench(order)
  store_writer.check_shards(order.output, bench.recipe)
  numbers = range(order.shards) if shard is None else [shard]
  if build_shards:
    build_shards(numbers)
  else:
    with _Progress(f'{order.task}/{order.split}', len(numbers)) as progress:
      if processes == 1:
        for number in numbers:
          bench.build(number, progress.read)
          progress.finished()
      else:
        _in_processes(order, numbers, min(processes, len(numbers)), progress)
  return store_writer.finish(order.output, bench.recipe, bench.origin and bench.origin.record())


def open_task(order: Order) -> TaskReader:
  """The reader of the task of an order. It loads TensorFlow only for a task that only seqio knows.

  Raises:
    ConfigurationError: the task is not registered, or lacks the split or the feature 'targets', or
      a source was given to a task without a location.
    DataError: the source is damaged.
  """
  module, task = task_reader.of_task(order.task)
  given = order.split, order.vocabulary, order.source, order.options
  task_reader.load(module)
  if task in TASKS:
    return DocumentReader(task, TASKS[task], *given)
  known = [*TASKS]
  if 'seqio' in sys.modules:
    with task_reader.quiet():
      from valkyrie.data import seqio_tasks  # noqa: PLC0415  (TensorFlow)
    known += seqio_tasks.task_names()
    if task in known:
      return seqio_tasks.SeqioReader(task, *given)
  raise ConfigurationError(
    f'The module {module} registers no task {task!r}.{did_you_mean(task, known)} '
    'A mixture is endless and cannot be stored. Name its tasks one by one.'
  )


class Bench:
  """All that a process needs to build shards."""

  def __init__(self, order: Order):
    self._order = order
    self.reader = open_task(order)
    location, options = _recorded_source(order)
    module, _ = task_reader.of_task(order.task)
    code = task_reader.code_hash([module, *self.reader.modules])
    recorded = {'location': location, 'options': options, 'code_sha256': code}
    files = self.reader.files()
    self.origin = files and provenance.Origin(files, order.output)
    if self.origin:
      recorded['files_sha256'] = self.origin.digest
    source = self.reader.description | recorded
    self.recipe = store_writer.Recipe(
      order.task, order.split, order.vocabulary, source, order.shards, order.unique
    )

  def build(self, number: int, report: Report) -> None:
    """Builds a shard, unless it is there."""
    store_writer.write_shard(
      self._order.output,
      self.recipe,
      number,
      self._documents,
      report,
    )

  def _documents(self, shard: int) -> Iterator[store_writer.Document]:
    yield from self.reader.documents(shard, self._order.shards)
    if self.origin:  # before the shard gets its name
      self.origin.check()


class _Progress:
  """A line of progress, with the documents and tokens of all processes."""

  def __init__(self, title: str, shards: int):
    self._documents = self._tokens = 0
    self._bar = tqdm.tqdm(
      desc=title,
      total=shards,
      unit='shard',
      miniters=0,  # only time decides when the line is rewritten
      mininterval=0.2 if sys.stderr.isatty() else 10,
    )

  def __enter__(self) -> '_Progress':
    return self

  def __exit__(self, *_: object) -> None:
    self._bar.close()

  def read(self, documents: int, tokens: int) -> None:
    heartbeat.beat()  # of the run that waits for the store, if there is one
    self._documents += documents
    self._tokens += tokens
    seconds = max(self._bar.format_dict['elapsed'], 1e-9)
    self._bar.set_postfix_str(
      f'{self._documents:,} documents, {self._documents / seconds:,.0f} documents/s, '
      f'{self._tokens:,} tokens, {self._tokens / seconds:,.0f} tokens/s',
      refresh=False,
    )
    self._bar.update(0)

  def finished(self) -> None:
    self._bar.update()


def _in_processes(order: Order, numbers: Iterable[int], count: int, progress: _Progress) -> None:
  """Builds shards in `count` processes; raises the first error after all have ended."""
  context = multiprocessing.get_context('spawn')
  waiting = context.SimpleQueue()
  for number in numbers:
    waiting.put(number)
  for _ in range(count):
    waiting.put(None)
  readers, processes = [], []
  try:
    for _ in range(count):
      reader, writer = context.Pipe(duplex=False)
      process = context.Process(target=_work, args=(order, waiting, writer), daemon=True)
      process.start()
      processes.append(process)
      writer.close()
      readers.append(reader)
    while readers:
      for ready in multiprocessing.connection.wait(readers):
        reader: Any = ready
        try:
          message = reader.recv()
        except EOFError:
          raise DataError(
            'A process that built shards has died, perhaps for lack of memory. Finished shards '
            'are kept. Run the same command again, with fewer --processes.'
          ) from None
        if isinstance(message, ValkyrieError):
          raise message
        if message is None:
          readers.remove(reader)
        elif message == ():
          progress.finished()
        else:
          progress.read(*message)
  finally:
    for process in processes:
      process.terminate()
      process.join()


def _work(order: Order, waiting: Any, writer: Any) -> None:
  """The main function of a process: builds shards from the queue, and sends its progress."""
  threading.Thread(target=_end_with_the_parent, daemon=True).start()
  try:
    bench = Bench(order)
    while (number := waiting.get()) is not None:
      bench.build(number, lambda *read: writer.send(read))
      writer.send(())
    writer.send(None)
  except ValkyrieError as error:
    writer.send(error)


def _end_with_the_parent() -> None:
  """Ends this process when its parent does, by whatever means."""
  parent = multiprocessing.parent_process()
  assert parent is not None
  multiprocessing.connection.wait([parent.sentinel])
  os._exit(Preempted.exit_code)


def _finished(order: Order) -> dict[str, Any]:
  """Reads store.json of a finished store, which must have the requested task and source."""
  information = token_store.read_information(order.output)
  origin, (source, options) = information['source'], _recorded_source(order)
  found = {key: information[key] for key in ('task', 'split', 'unique')} | {
    'vocabulary': information['vocabulary']['fingerprint'],
    'source': origin.get('location'),
    'options': origin.get('options', {}),
  }
  expected = {'task': order.task, 'split': order.split, 'unique': order.unique} | {
    'vocabulary': order.vocabulary.fingerprint,
    'source': source,
    'options': options,
  }
  if found != expected:
    found, expected = store_writer.differences(found, expected)
    raise ConfigurationError(
      f'{order.output} holds another store: found {found}, expected {expected}. Use another '
      '--output, or delete that directory.'
    )
  return information


def _recorded_source(order: Order) -> tuple[str | None, dict[str, str]]:
  """The location of the documents and the options of their source, without secrets."""
  options = {name: redact.in_value(value) for name, value in order.options.items()}
  return order.source and redact.in_value(order.source), options
