"""The build of a token store, by one process or by several that share its shards.

One process builds a shard, whose content does not depend on the process: any number of processes
builds the same store, and so do the workers of Apache Beam on other machines.
"""

# Beam is an optional package.
# pyright: reportMissingImports=false

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
import contextlib
import functools
import hashlib
import multiprocessing
import os
import pathlib
import sys
import threading
from typing import Any

import tqdm

from valkyrie import foreign, packages
from valkyrie.config.suggest import did_you_mean
from valkyrie.data import (
  apart,
  document_source,
  provenance,
  shard_record,
  store_writer,
  token_store,
)
from valkyrie.data.document_source import TASKS, TaskReader
from valkyrie.data.selection import Selection
from valkyrie.data.store_writer import Report, StoreWriter
from valkyrie.distributed import heartbeat
from valkyrie.errors import (
  ConfigurationError,
  DataError,
  Preempted,
  converted,
  storage_errors,
  write_errors,
)

DEFAULT_SHARDS = 8


def build(
  selection: Selection,
  output: pathlib.Path,
  *,
  shards: int = DEFAULT_SHARDS,
  shard: int | None = None,
  processes: int = 1,
  rebuild: bool = False,
  renew: bool = False,
  beam: Sequence[str] | None = None,
) -> dict[str, Any] | None:
  """Builds a store, or one shard of it; returns store.json, or None while shards are missing.

  The arguments are the options of the command line, see `build_store`.

  Raises:
    ConfigurationError: the task or split is unknown, or does not fit the other arguments; the
      output is not apart from the source; Beam is not installed, or rejects its options.
    DataError: the task's source is missing, damaged or empty; or Beam failed or wrote elsewhere.
  """
  pipeline = None
  if beam is not None:
    pipeline = _pipeline(beam)
  apart.check_store(output, selection.source, selection.options)
  generation = ''
  if os.path.lexists(output / token_store.STORE_FILE):
    if not rebuild:
      found = _finished(selection, output)
      again = 'run the same command with --rebuild.'
      provenance.check(output, found, again, selection.places)
      document_source.check_generated(output, found['source'], selection, again)
      return found
    generation = _next_generation(selection, output)
  begun = f'building {output}'
  bos = selection.vocabulary.bos
  if bos:
    begun += f': each document after {selection.vocabulary.file} begins with BOS, {bos}'
  print(begun, file=sys.stderr, flush=True)
  renew |= rebuild
  opened = functools.partial(Bench, selection, output, shards, renew, generation)
  bench = opened()
  if not renew:
    bench.writer.check_shards()
  numbers: Sequence[int] = range(shards)
  if shard is not None:
    numbers = [shard]
  if pipeline is not None:
    _in_pipeline(pipeline, opened, numbers)
  else:
    with _Progress(str(selection), len(numbers)) as progress:
      if processes == 1:
        for number in numbers:
          bench.build(number, progress.add)
          progress.add(shards=1)
      else:
        count = min(processes, len(numbers))
        _in_processes(opened, numbers, count, progress)
  origin = bench.origin and bench.origin.record()
  information = bench.writer.finish(origin)
  if information is None and pipeline is not None:
    raise DataError(
      f'The pipeline has ended, but {output} lacks shards. The workers write there, so --output '
      'must be a directory that all their machines share.'
    )
  return information


def open_task(selection: Selection) -> TaskReader:
  """The reader of the selected task. It loads TensorFlow only for a task that only seqio knows."""
  module, task = document_source.loaded(selection.task)
  if task in TASKS:
    return document_source.document_reader(TASKS[task], selection)
  known = [*TASKS]
  if 'seqio' in sys.modules:
    with document_source.quiet():
      from valkyrie.data import seqio_tasks  # noqa: PLC0415  (TensorFlow)
    known += seqio_tasks.seqio.TaskRegistry.names()
    if task in known:
      return seqio_tasks.task_reader_of(task, selection)
  raise ConfigurationError(
    f'The module {module} registers no task {task!r}.{did_you_mean(task, known)} '
    'A mixture is endless and cannot be stored. Name its tasks one by one.'
  )


class Bench:
  """All that a process needs to build shards."""

  def __init__(
    self,
    selection: Selection,
    output: pathlib.Path,
    shards: int,
    renew: bool = False,
    generation: str = '',
  ):
    self._reader = open_task(selection)
    module, _ = document_source.loaded(selection.task)
    recorded = selection.recorded()
    source = self._reader.description | {
      'location': recorded['source'],
      'options': recorded['options'],
      'code_sha256': _code_hash([module, *self._reader.modules]),
    }
    files = self._reader.files
    if files:
      apart.check_files(output, files)
    self.origin = files and provenance.Origin(files, output, renew=renew, generation=generation)
    if self.origin:
      source['files_sha256'] = self.origin.digest
    if ':' in selection.task:
      source[document_source.MODULE] = document_source.module_hash(selection.task)
    self.writer = StoreWriter(output, selection, source, shards, renew, generation)

  def build(self, number: int, report: Report) -> None:
    """Builds a shard, unless it is there."""
    documents = self._documents(number)
    self.writer.write_shard(number, documents, report)

  def _documents(self, shard: int) -> Iterator[store_writer.Document]:
    yield from self._reader.documents(shard, self.writer.shards)
    if self.origin:  # before the shard gets its name
      self.origin.check()


def _code_hash(modules: Iterable[str]) -> str:
  """SHA-256 of the code that produces tokens: of these loaded modules and of all in this folder."""
  files: list[pathlib.Path] = []
  for name in sorted({*modules}):
    package = name.split('.')[0]
    file = getattr(sys.modules.get(name), '__file__', None)
    if file and package not in sys.stdlib_module_names:
      files.append(pathlib.Path(file))
  folder = pathlib.Path(__file__).parent
  files += sorted(folder.glob('*.py'))
  digest = hashlib.sha256()
  for file in files:
    code = hashlib.sha256(file.read_bytes())
    digest.update(code.digest())
  return digest.hexdigest()


class _Progress(tqdm.tqdm):
  """A line of progress, with the documents and tokens of all processes."""

  def __init__(self, title: str, shards: int):
    interval = 10
    if sys.stderr.isatty():  # only time decides when the line is rewritten
      interval = 0.2
    super().__init__(desc=title, total=shards, unit='shard', miniters=0, mininterval=interval)
    self._documents = 0
    self._tokens = 0

  def add(self, documents: int = 0, tokens: int = 0, shards: int = 0) -> None:
    heartbeat.beat()  # of the run that waits for the store, if there is one
    self._documents += documents
    self._tokens += tokens
    seconds = max(self.format_dict['elapsed'], 1e-9)
    documents_a_second = self._documents / seconds
    tokens_a_second = self._tokens / seconds
    self.set_postfix_str(
      f'{self._documents:,} documents, {documents_a_second:,.0f} documents/s, '
      f'{self._tokens:,} tokens, {tokens_a_second:,.0f} tokens/s',
      refresh=False,
    )
    self.update(shards)


@packages.without_current_folder()
def _in_processes(
  opened: Callable[[], Bench],
  numbers: Iterable[int],
  count: int,
  progress: _Progress,
) -> None:
  """Builds shards in `count` processes; raises the first error, and ends the others."""
  context = multiprocessing.get_context('spawn')
  failed = f'--processes={count} needs semaphores of the system, in its shared memory (/dev/shm)'
  otherwise = 'build with --processes=1'
  with write_errors(failed, otherwise, also=(ImportError, NotImplementedError)):
    reports = context.SimpleQueue()
    builders = futures.ProcessPoolExecutor(count, context, _start, (opened, reports))
  with builders as pool:
    try:
      running = {pool.submit(_build_one, number) for number in numbers}
      while running:
        done, running = futures.wait(running, 1, futures.FIRST_COMPLETED)
        while not reports.empty():
          read = reports.get()
          progress.add(*read)
        for finished in done:
          finished.result()
    except BrokenProcessPool as error:
      raise DataError(
        'A process that built shards has died, perhaps for lack of memory. Finished shards '
        'are kept. Run the same command again, with fewer --processes.'
      ) from error
    except BaseException:
      for process in multiprocessing.active_children():
        process.terminate()
      raise


_worker: tuple[Callable[[], Bench], Any]  # of this process, if it is one of several


def _start(opened: Callable[[], Bench], reports: Any) -> None:
  """Begins a process, which opens its bench with its first shard, and ends with its parent."""
  global _worker  # noqa: PLW0603
  _worker = functools.cache(opened), reports
  watcher = threading.Thread(target=_end_with_the_parent, daemon=True)
  watcher.start()


def _build_one(number: int) -> None:
  opened, reports = _worker
  bench = opened()
  bench.build(number, lambda *read: reports.put(read))
  reports.put((0, 0, 1))


def _end_with_the_parent() -> None:
  """Ends this process when its parent does, by whatever means."""
  parent = multiprocessing.parent_process()
  assert parent is not None
  parent.join()
  os._exit(Preempted.exit_code)


def _pipeline(options: Sequence[str]) -> Any:
  """A pipeline of Apache Beam with these options, as on its command line: --runner=NAME."""
  advice = (
    'Beam excludes packages of this environment. Make another one with the extra beam, in a clone '
    "by bash -c 'source scripts/setup_environment; setup_environment beam', and run this there: "
    '.venv-beam/bin/python -m valkyrie.data.build_store ...'
  )
  lacks = '--beam needs Apache Beam, which this Python does not have'
  with converted((ImportError,), ConfigurationError, lacks, advice):
    import apache_beam  # noqa: PLC0415  (an optional package)
    from apache_beam.options import pipeline_options  # noqa: PLC0415
  try:
    given = pipeline_options.PipelineOptions([*options])
    return apache_beam.Pipeline(options=given)
  except (AttributeError, ImportError, ValueError) as error:
    raise ConfigurationError(
      f'Apache Beam refuses its options {" ".join(options)}: {error}. Correct what follows --beam.'
    ) from error


def _in_pipeline(pipeline: Any, opened: Callable[[], Bench], numbers: Iterable[int]) -> None:
  """Builds shards on the workers of a pipeline, whose elements are the numbers of the shards.

  Every worker reads the source and writes to the directory of the store. The runner shows the
  numbers of documents and tokens.
  """
  import apache_beam  # noqa: PLC0415
  from apache_beam.metrics import Metrics  # noqa: PLC0415
  from apache_beam.utils import shared  # noqa: PLC0415

  benches = shared.Shared()  # all threads of a worker share a bench
  counters = [Metrics.counter('valkyrie', name) for name in ('documents', 'tokens')]

  def report(*read: int) -> None:
    for counter, number in zip(counters, read, strict=True):
      counter.inc(number)

  def build_shard(number: int) -> None:
    bench = benches.acquire(opened)
    bench.build(number, report)

  _ = pipeline | apache_beam.Create(numbers) | apache_beam.Map(build_shard)
  try:
    pipeline.run().wait_until_finish()
  except Exception as error:  # runners raise many types, with the traceback of a worker as text
    lines = str(error).strip().splitlines()
    *_, reason = lines or [repr(error)]
    raise DataError(
      f'The pipeline has failed ({reason}). The lines above have more. Finished shards are kept. '
      'Run the same command again to continue.'
    ) from error


def _finished(selection: Selection, output: pathlib.Path) -> dict[str, Any]:
  """Reads store.json of a finished store, which must be of this selection.

  Raises:
    ConfigurationError: it is of another selection, or of another program.
    DataError: it is damaged.
  """
  try:
    information = token_store.read_information(output)
  except DataError as error:
    if shard_record.all_in(output):
      raise
    raise ConfigurationError(
      f'{output / token_store.STORE_FILE} is not the record of a token store, and {output} has no '
      'shards. Use another --output, or move that file away.'
    ) from error
  source = information['source']
  found = {key: information[key] for key in ('task', 'split', 'unique')} | {
    'vocabulary': information['vocabulary']['fingerprint'],
    'source': source.get('location'),
    'options': source.get('options', {}),
  }
  expected = selection.recorded()
  if found != expected:
    found, expected = store_writer.differences(found, expected)
    raise ConfigurationError(
      f'{output} holds another store: found {found}, expected {expected}. Use another --output.'
    )
  return information


def _next_generation(selection: Selection, output: pathlib.Path) -> str:
  """The generation of the store that replaces the one in `output`; the same in all its builders.

  Raises a ConfigurationError as `_finished`.
  """
  file = output / token_store.STORE_FILE
  with contextlib.suppress(DataError):  # it is damaged
    _finished(selection, output)
  with storage_errors(f'{file} cannot be read', 'Move it away.', also=(ValueError,)):
    content = foreign.content(file)
  digest = hashlib.sha256(content).hexdigest()
  return f'-{digest[:8]}'
