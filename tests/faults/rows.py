"""Measured rows of the table: one after another, or one on each core."""

from collections.abc import Iterator, Sequence
from concurrent import futures
import importlib
import multiprocessing
import pathlib
import signal
import sys
import time
import traceback
from typing import NamedTuple

from faults.harness import CORES, Harness, keep_to
from faults.table import FAULTS, Fault, Trial, Unavailable, summary

# Each module registers its rows of the table.
MODULES = (
  'kills', 'signals', 'starts', 'supervision', 'supervisors', 'damage', 'hostile', 'disks',
  'file_systems', 'machine', 'ownership', 'numbers', 'lengths', 'data', 'fuzz_data', 'replaced',
  'world', 'mistakes', 'trust', 'beside', 'pairs', 'buckets', 'fuzz_runs',
)  # fmt: skip


class Row(NamedTuple):
  """A row of the table, and how often its fault is injected."""

  fault: Fault
  times: int


def register() -> list[Fault]:
  """All rows of the table, in order."""
  for module in MODULES:
    importlib.import_module(f'faults.{module}')
  return FAULTS


def prepare(core: int) -> None:
  """Binds this process to a core, and sets the signals that end it."""
  keep_to(core)
  signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets its `&` jobs ignore it
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))  # removes what rows have mounted


def results(
  rows: Sequence[Row], folder: pathlib.Path, seed: int, workers: int = 1
) -> Iterator[dict]:
  """The results of rows as they come.

  Args:
    rows: with more than one worker, those that need one core come first.
    folder: a new folder for the runs.
    seed: of the random moments and places; they do not depend on other rows.
    workers: the number of rows at a time, each on its own core.
  """
  together = [row for row in rows if row.fault.cores == 1] if workers > 1 else []
  if together:
    yield from _on_cores(together, folder, seed, CORES[:workers])
  alone = [row for row in rows if row not in together]
  if alone:
    harness = _harness(folder / 'alone', seed)
    for row in alone:
      yield _result(row, harness, seed)


def measure(row: Fault, harness: Harness, times: int) -> dict:
  """Injects the faults of a row; an error of the injection counts as a promise not kept."""
  began, trials = time.monotonic(), []
  try:
    for trial in row.inject(harness, times):
      trials.append(trial)
      if trial.failure is not None:
        say(f'  BROKEN, {trial.what}: {trial.failure}')
  except Unavailable as reason:
    return {**summary(row, [], 0.0), 'unavailable': str(reason)}
  except Exception as error:
    text = ''.join(traceback.format_exception(error))
    trials.append(Trial('the injection', text[-2000:]))
    say(f'  BROKEN, the injection: {text}')
  return summary(row, trials, time.monotonic() - began)


def say(text: str) -> None:
  """Prints a line of progress."""
  print(text, file=sys.stderr, flush=True)


def _harness(folder: pathlib.Path, seed: int) -> Harness:
  folder.mkdir()
  return Harness(folder, seed)


def _result(row: Row, harness: Harness, seed: int) -> dict:
  harness.random.seed(f'{seed} {row.fault.name}')  # the same after a stop
  return measure(row.fault, harness, row.times)


def _on_cores(
  rows: Sequence[Row], folder: pathlib.Path, seed: int, cores: Sequence[int]
) -> Iterator[dict]:
  context = multiprocessing.get_context('spawn')
  free = context.SimpleQueue()
  for core in cores:
    free.put(core)
  with futures.ProcessPoolExecutor(len(cores), context, _begin, (free, folder, seed)) as pool:
    try:
      names = [pool.submit(_row_of_worker, row.fault.name, row.times) for row in rows]
      for done in futures.as_completed(names):
        yield done.result()
    except BaseException:
      for worker in multiprocessing.active_children():
        worker.terminate()
      raise


class _Worker(NamedTuple):
  harness: Harness
  seed: int


_worker: list[_Worker] = []  # of this process


def _begin(free: multiprocessing.SimpleQueue, folder: pathlib.Path, seed: int) -> None:
  """Begins a worker."""
  prepare(core := free.get())
  register()
  _worker.append(_Worker(_harness(folder / f'core{core}', seed), seed))


def _row_of_worker(name: str, times: int) -> dict:
  (worker,) = _worker
  fault = next(fault for fault in FAULTS if fault.name == name)
  return _result(Row(fault, times), worker.harness, worker.seed)
