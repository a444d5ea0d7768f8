"""Writers of metrics to metrics.jsonl, TensorBoard and the console, with CLU's interface.

metrics.jsonl, a JSON object per line and step, and the console are written immediately. A thread
writes to TensorBoard and to the bound CLU writers, in order. TensorBoard groups the numbers:
learning/, throughput/, memory/ and hooks/, and validation/ of evaluations.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
import contextlib
import dataclasses
import functools
import importlib.util
import os
import pathlib
from typing import Any

import gin
import jax
import numpy as np

from valkyrie.config.computation import may_change_on_resume
from valkyrie.errors import ConfigurationError, end_after, storage_errors
from valkyrie.monitoring.json_lines import JsonLines
from valkyrie.storage import foreign_names

Show = Callable[[int, Mapping[str, Any]], None]
_WITHOUT = 'Install the packages of setup.py, or set create_writers.tensorboard = False.'
_ADVICE = 'Make room there, and run the same command again.'
_GROUPS = {
  'throughput': ('step_seconds', 'tokens_per_second', 'tflops_per_second', 'mfu', 'goodput'),
  'memory': ('host_memory', 'device_memory'),
}


@may_change_on_resume()
@gin.configurable
def create_writers(
  model_dir: str | os.PathLike,
  name: str = 'train',
  also: Sequence[Show] = (),
  tensorboard: bool = True,
  clu_writers: Sequence[Callable[[str], Any]] = (),
) -> 'RunWriter':
  """Returns a writer that can be used immediately, and starts to import TensorBoard's package.

  A ConfigurationError is raised if this package is not installed, or if the name leads out of
  model_dir; a StorageError if metrics.jsonl cannot be opened.

  Args:
    model_dir: the directory of the run.
    name: of the stream. 'train' writes model_dir/metrics.jsonl and model_dir/train/; any other name
      writes both in model_dir/name/.
    also: called with the scalars of each step, such as `Progress.show`.
    tensorboard: write TensorBoard event files.
    clu_writers: each is called with the folder of the event files and returns a CLU MetricWriter,
      such as CLU's SummaryWriter or LoggingWriter, which receives what TensorBoard does.
  """
  if tensorboard and importlib.util.find_spec('tensorboard') is None:
    raise ConfigurationError(
      'TensorBoard event files need tensorboard, which this Python does not have. ' + _WITHOUT
    )
  advice = 'Use letters, digits and dashes.'
  name = foreign_names.checked(name, 'create_writers.name', advice, ConfigurationError)
  folder = pathlib.Path(model_dir) / name
  if jax.process_index() != 0:
    return RunWriter(folder, None, (), ())
  lines = JsonLines((pathlib.Path(model_dir) if name == 'train' else folder) / 'metrics.jsonl')
  outputs = [functools.partial(make, str(folder)) for make in clu_writers]
  if tensorboard:
    outputs.insert(0, functools.partial(_event_file, folder))
  return RunWriter(folder, lines, also, outputs)


@dataclasses.dataclass
class RunWriter(contextlib.AbstractContextManager['RunWriter']):
  """A CLU MetricWriter that passes scalars to all outputs, and everything else to CLU writers.

  `event_file.EventFile` shows the methods that are passed on. `writers` open CLU writers in a
  thread, whose failures the next call raises. After `flush` or `close` everything is on disk.
  `lines` is metrics.jsonl, None in the processes that write nothing. A context manager that closes.
  """

  folder: pathlib.Path
  lines: JsonLines | None
  also: Sequence[Show]
  writers: Sequence[Callable[[], Any]]

  def __post_init__(self):
    self._thread = ThreadPoolExecutor(1, thread_name_prefix='tensorboard')
    self._pending: list[Future] = []
    self._opened = [self.submit(opened) for opened in self.writers]

  def submit(self, function: Callable, *args: Any) -> Future:
    """Calls a function in the thread, after the calls before; a later call raises its failure."""
    self._raise_failures(wait=False)
    self._pending.append(self._thread.submit(function, *args))
    return self._pending[-1]

  def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
    """Writes numbers of Python, numpy or jax (waiting for these); None is an unknown value.

    Texts are written to metrics.jsonl only.
    """
    if self.lines is None:
      return
    found = {
      key: value if value is None or isinstance(value, str) else np.asarray(value).item()
      for key, value in scalars.items()
    }
    self.lines.write({'step': int(step), **found})
    numbers = {key: value for key, value in found.items() if not isinstance(value, str)}
    for show in self.also:
      show(step, numbers)
    known = {self._tag(key): value for key, value in numbers.items() if value is not None}
    self._submit('write_scalars', step, known)

  def _submit(self, method: str, *args: Any) -> None:
    """Calls a method of all CLU writers, in the thread; a Future among `args` is its result."""

    def call(opened: Future) -> None:
      writer = opened.result()
      message = f'{type(writer).__name__} cannot write in {self.folder}'
      with storage_errors(message, _ADVICE, also=(Exception,)):
        getattr(writer, method)(*(a.result() if isinstance(a, Future) else a for a in args))

    for opened in self._opened:
      self.submit(call, opened)

  write_images = functools.partialmethod(_submit, 'write_images')
  write_texts = functools.partialmethod(_submit, 'write_texts')
  write_hparams = functools.partialmethod(_submit, 'write_hparams')

  def flush(self) -> None:
    """Waits until everything is on disk."""
    if self.lines is not None:
      self.lines.sync()
      self._submit('flush')
      self._raise_failures(wait=True)

  def close(self) -> None:
    """Flushes and closes; the writer cannot be used afterwards."""
    if self.lines is not None:
      try:
        self.flush()
        self._submit('close')
        self._raise_failures(wait=True)
      finally:
        self.lines.close()
        self._thread.shutdown()

  def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
    end_after(self.close, error)

  def _tag(self, name: str) -> str:
    """The name of a number in TensorBoard, with its group."""
    if name.startswith('hooks/'):
      return name
    if self.folder.name != 'train':
      return f'validation/{name}'
    group = next((g for g, names in _GROUPS.items() if name.startswith(names)), 'learning')
    return f'{group}/{name}'

  def _raise_failures(self, wait: bool) -> None:
    """Raises the first failure of the completed calls, or, with `wait`, of all calls."""
    while self._pending and (wait or self._pending[0].done()):
      self._pending.pop(0).result()


def _event_file(folder: pathlib.Path) -> Any:
  try:
    from valkyrie.monitoring.event_file import EventFile  # noqa: PLC0415 - a second, in the thread
  except ImportError as error:
    raise ConfigurationError(
      f'TensorBoard event files need tensorboard, and importing it failed: {error}. {_WITHOUT}'
    ) from error
  with storage_errors(f'TensorBoard event files in {folder} cannot be written', _ADVICE):
    return EventFile(folder)
