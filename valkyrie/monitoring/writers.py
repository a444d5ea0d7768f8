"""Writers of metrics to metrics.jsonl, TensorBoard and the console, with CLU's interface.

metrics.jsonl, a JSON object per line and step, and the console are written immediately. Pictures,
TensorBoard and each bound CLU writer are watchers of the run: see `watcher`. TensorBoard groups the
numbers: learning/, throughput/, memory/ and hooks/, and validation/ of evaluations.
"""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import functools
import importlib.util
import os
import pathlib
import sys
import time
from typing import Any

import gin
import jax
import numpy as np

from valkyrie.config.computation import may_change_on_resume
from valkyrie.distributed import heartbeat
from valkyrie.errors import ConfigurationError, StorageError, end_after
from valkyrie.monitoring.json_lines import JsonLines
from valkyrie.monitoring.watcher import AT_THE_END, PATIENCE, Watcher, may_pass
from valkyrie.storage import foreign_names

Show = Callable[[int, Mapping[str, Any]], None]
_WITHOUT = 'Install the packages of setup.py, or set create_writers.tensorboard = False.'
_PAUSE = 1.0  # seconds between two attempts to write metrics.jsonl at the end
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
  begin: int | None = None,
  say: Callable[[str], None] | None = None,
  patience: float = PATIENCE,
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
    begin: the first step that is written, if an earlier process may have written it too, and
      TensorBoard is to drop what that one wrote; None keeps all.
    say: prints what a writer has lost, by default to standard error.
    patience: seconds for which what a file system refuses is tried again.
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
  outputs = [(_name_of(make), functools.partial(make, str(folder))) for make in clu_writers]
  if tensorboard:
    outputs.insert(0, ('TensorBoard', functools.partial(_event_file, folder, begin)))
  return RunWriter(folder, lines, also, outputs, say or _say, patience)


def _name_of(make: Callable) -> str:
  return getattr(make, '__name__', type(make).__name__)


def _say(text: str) -> None:
  print(f'valkyrie: {text}', file=sys.stderr, flush=True)


class _Output:
  """A CLU writer that is opened and called by a watcher."""

  def __init__(self, watcher: Watcher, make: Callable[[], Any]):
    self.watcher = watcher
    self._make = make
    self._writer: Any = None
    watcher.call('open', self._open)

  def _open(self) -> None:
    try:
      self._writer = self._make()
    except Exception as error:
      if not isinstance(error, OSError):  # there is nothing to call
        self.watcher.leaves_after_an_error = True
      raise

  def call(self, method: str, *arguments: Any) -> None:
    """Calls a method of the writer, after the calls before."""
    self.watcher.call(method, self._call, method, *arguments)

  def _call(self, method: str, *arguments: Any) -> None:
    if self._writer is None:
      self._open()
    getattr(self._writer, method)(*arguments)


@dataclasses.dataclass
class RunWriter(contextlib.AbstractContextManager['RunWriter']):
  """A CLU MetricWriter that passes scalars to all outputs, and everything else to CLU writers.

  `event_file.EventFile` shows the methods that are passed on. `writers` are names and functions
  that open a CLU writer. Only metrics.jsonl, `lines`, can end a run, when `patience` is over; it is
  None in the processes that write nothing. A context manager that closes.
  """

  folder: pathlib.Path
  lines: JsonLines | None
  also: Sequence[Show]
  writers: Sequence[tuple[str, Callable[[], Any]]]
  say: Callable[[str], None] = _say
  patience: float = PATIENCE

  def __post_init__(self):
    self._outputs = [_Output(self._watcher(name), make) for name, make in self.writers]
    self._pictures = self._watcher('pictures')

  def _watcher(self, name: str) -> Watcher:
    return Watcher(f'{name} of {self.folder}', self.say, self.patience)

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
    self._call('write_scalars', step, known)

  def _call(self, method: str, *arguments: Any) -> None:
    """Calls a method of all CLU writers, and lets them write what they hold."""
    for output in self._outputs:
      output.call(method, *arguments)
      if method.startswith('write_'):
        output.call('flush')

  write_images = functools.partialmethod(_call, 'write_images')
  write_texts = functools.partialmethod(_call, 'write_texts')
  write_hparams = functools.partialmethod(_call, 'write_hparams')

  def draw(self, step: int, draw: Callable[[], Mapping[str, np.ndarray]]) -> None:
    """Calls a function that writes pictures, in a thread, and passes on the images it returns."""
    if self.lines is not None:
      self._pictures.call('draw', lambda: self.write_images(step, draw()))

  def flush(self) -> None:
    """Waits until everything is on disk."""
    if self.lines is None:
      return
    self._sync(self.lines)
    self._call('flush')
    for watcher in (self._pictures, *(output.watcher for output in self._outputs)):
      watcher.wait()

  def close(self) -> None:
    """Flushes and closes; the writer cannot be used afterwards.

    Raises a StorageError if metrics.jsonl cannot be written.
    """
    if self.lines is None:
      return
    try:
      self._sync(self.lines)
    finally:
      self.lines.close()
      self._pictures.close()
      self._call('close')
      for output in self._outputs:
        output.watcher.close()

  def _sync(self, lines: JsonLines) -> None:
    """Waits until all lines are on disk, for as long as the patience."""
    until = time.monotonic() + self.patience
    is_said = False
    while True:
      try:
        lines.sync()
      except StorageError as error:
        if not may_pass(error):  # the run was lost to another trainer
          raise
        if time.monotonic() >= until:
          heartbeat.beat(transient=True)
          raise
        if not is_said:
          self.say(f'tried again for up to {self.patience:g} s: {error}')
        is_said = True
        heartbeat.beat()
        time.sleep(_PAUSE)
      else:
        return

  def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
    if error is not None:
      self.patience = min(self.patience, AT_THE_END)
    end_after(self.close, error)

  def _tag(self, name: str) -> str:
    """The name of a number in TensorBoard, with its group."""
    if name.startswith('hooks/'):
      return name
    if self.folder.name != 'train':
      return f'validation/{name}'
    group = next((g for g, names in _GROUPS.items() if name.startswith(names)), 'learning')
    return f'{group}/{name}'


def _event_file(folder: pathlib.Path, begin: int | None) -> Any:
  try:
    from valkyrie.monitoring.event_file import EventFile  # noqa: PLC0415 - a second, in the thread
  except ImportError as error:
    raise ConfigurationError(
      f'TensorBoard event files need tensorboard, and importing it failed: {error}. {_WITHOUT}'
    ) from error
  return EventFile(folder, begin)
