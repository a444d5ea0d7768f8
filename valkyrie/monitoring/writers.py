"""Writers of metrics to metrics.jsonl, TensorBoard and the console, with CLU's interface.

metrics.jsonl, a JSON object per line and step, and the console are written immediately. Pictures,
CLU's SummaryWriter for TensorBoard, and each bound writer of CLU are called by watchers of the run:
see `watcher`. TensorBoard groups the numbers: learning/, throughput/, memory/ and hooks/, and
validation/ of evaluations.
"""

from collections.abc import Callable, Mapping, Sequence
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
from valkyrie.config.ranges import Seconds
from valkyrie.errors import ConfigurationError, end_after
from valkyrie.monitoring.json_lines import JsonLines
from valkyrie.monitoring.metric_writer import MetricWriter
from valkyrie.monitoring.patience import PATIENCE, tell
from valkyrie.monitoring.watcher import Watcher
from valkyrie.storage import foreign_names

Show = Callable[[int, Mapping[str, Any]], None]
_WITHOUT = 'Install the packages of setup.py, or set create_writers.tensorboard = False.'
_PACKAGES = ('clu', 'tensorboard', 'tensorflow')
_LONGEST_IMPORT = 300.0  # seconds that the end of a run waits for the import
_GROUPS = {
  'throughput': (
    'step_seconds',
    'slowest_step',
    'tokens_per_second',
    'tflops_per_second',
    'mfu',
    'goodput',
  ),
  'memory': ('host_memory', 'device_memory'),
}


@may_change_on_resume()
@gin.configurable(denylist=['model_dir', 'name', 'also', 'begin', 'say'])  # pyright: ignore  (gin has no types)
def create_writers(
  model_dir: str | os.PathLike,
  name: str = 'train',
  also: Sequence[Show] = (),
  tensorboard: bool = True,
  clu_writers: Sequence[Callable[[str], Any]] = (),
  begin: int | None = None,
  say: Callable[[str], None] = tell,
  patience: Seconds = PATIENCE,
) -> 'RunWriter':
  """Returns a writer that can be used immediately, and starts to import CLU's writers.

  A ConfigurationError is raised if a package that TensorBoard needs is not installed, or if the
  name leads out of model_dir; a StorageError if metrics.jsonl cannot be opened.

  Args:
    model_dir: the directory of the run.
    name: the name of the stream. 'train' writes model_dir/metrics.jsonl and model_dir/train/; any
      other name writes both in model_dir/name/.
    also: called with the scalars of each step, such as `Progress.show`.
    tensorboard: write TensorBoard event files.
    clu_writers: each is called with the folder of the event files and returns a CLU MetricWriter,
      such as CLU's SummaryWriter or LoggingWriter, which receives what TensorBoard does.
    begin: the first step that is written, if an earlier process may have written it too:
      TensorBoard then drops the steps of the earlier process from there on. None keeps all.
    say: prints what a writer has lost, by default to standard error.
    patience: seconds for which what a file system refuses is tried again.
  """
  if tensorboard:
    for package in _PACKAGES:
      if importlib.util.find_spec(package) is None:
        raise ConfigurationError(
          f'TensorBoard event files need {package}, which this Python does not have. {_WITHOUT}'
        )
  advice = 'Use letters, digits and dashes.'
  name = foreign_names.checked(name, 'create_writers.name', advice, ConfigurationError)
  folder = pathlib.Path(model_dir) / name
  if jax.process_index() != 0:
    return RunWriter(folder, None, (), ())
  folder_of_lines = folder
  if name == 'train':
    folder_of_lines = pathlib.Path(model_dir)
  lines = JsonLines(folder_of_lines / 'metrics.jsonl', patience, say)
  outputs = []
  for make in clu_writers:
    make_in_folder = functools.partial(make, str(folder))
    outputs.append((_name_of(make), make_in_folder))
  if tensorboard:
    make_in_folder = functools.partial(_tensorboard, folder, begin)
    outputs.insert(0, ('TensorBoard', make_in_folder))
  return RunWriter(folder, lines, also, outputs, say, patience)


def _name_of(make: Callable) -> str:
  return getattr(make, '__name__', type(make).__name__)


class _Lines(MetricWriter):
  """Writes the numbers and texts of a step as a line of a file."""

  def __init__(self, lines: JsonLines):
    self._lines = lines

  def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
    self._lines.write({'step': int(step), **scalars})


class _Console(MetricWriter):
  """Shows the numbers of a step, by a function such as `Progress.show`."""

  def __init__(self, show: Show):
    self._show = show

  def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
    numbers = {}
    for name, value in scalars.items():
      if not isinstance(value, str):
        numbers[name] = value
    self._show(step, numbers)


class _Watched(MetricWriter):
  """Passes each call to another writer, which is opened and called by a watcher."""

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

  def call(self, method: str, *arguments: Any, **options: Any) -> None:
    """Calls a method of the writer, after the calls before, and lets it write what it holds."""
    self.watcher.call(method, self._call, method, arguments, options)
    if method.startswith('write_'):
      self.watcher.call('flush', self._call, 'flush', (), {})

  def _call(self, method: str, arguments: tuple, options: Mapping[str, Any]) -> None:
    if self._writer is None:
      self._open()
    getattr(self._writer, method)(*arguments, **options)


@dataclasses.dataclass
class RunWriter(MetricWriter, contextlib.AbstractContextManager['RunWriter']):
  """A CLU MetricWriter that passes scalars to all outputs, and everything else to CLU's writers.

  `writers` are names and functions that open a writer of CLU. A thread imports CLU, and calls wait
  for it; then CLU's MultiWriter passes them to the watchers of the writers. Only metrics.jsonl,
  `lines`, can end a run, when `patience` is over; it is None in the processes that write nothing.
  A context manager that closes.
  """

  folder: pathlib.Path
  lines: JsonLines | None
  also: Sequence[Show]
  writers: Sequence[tuple[str, Callable[[], Any]]]
  say: Callable[[str], None] = tell
  patience: float = PATIENCE

  def __post_init__(self):
    self._immediate: list[MetricWriter] = []
    if self.lines is not None:
      consoles = [_Console(show) for show in self.also]
      self._immediate = [_Lines(self.lines), *consoles]
    self._pictures = self._watcher('pictures')
    self._watched: list[_Watched] = []
    self._clu = self._watcher("CLU's writers")
    self._clu.longest_call = _LONGEST_IMPORT
    self._multi_writer: MetricWriter | None = None
    self._has_calls = False
    if self.writers:
      self._clu.leaves_after_an_error = True
      self._clu.call('import', self._import)

  def _watcher(self, name: str) -> Watcher:
    return Watcher(f'{name} of {self.folder}', self.say, self.patience)

  def _import(self) -> None:
    """Imports CLU, and lets a watcher open each of its writers."""
    try:
      from valkyrie.monitoring import clu_writers  # noqa: PLC0415 - seconds of TensorFlow
    except ImportError as error:
      raise ConfigurationError(
        f"CLU's writers need TensorFlow, and importing it failed: {error}. {_WITHOUT}"
      ) from error
    self._watched = []
    for name, make in self.writers:
      watched = _Watched(self._watcher(name), make)
      self._watched.append(watched)
    self._multi_writer = clu_writers.multi_writer(self._watched)

  def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
    """Writes numbers of Python, numpy or jax (waiting for these); None is an unknown value.

    Texts are written to metrics.jsonl only.
    """
    if self.lines is None:
      return
    values = {}
    for name, value in scalars.items():
      is_number = value is not None and not isinstance(value, str)
      values[name] = value
      if is_number:
        values[name] = np.asarray(value).item()
    for writer in self._immediate:
      writer.write_scalars(step, values)
    known = {}
    for key, value in values.items():
      if value is not None and not isinstance(value, str):
        known[self._tag(key)] = value
    self.call('write_scalars', step, known)

  def call(self, method: str, *arguments: Any, **options: Any) -> None:
    """Calls a method of all writers of CLU."""
    if self.writers:
      self._has_calls = True
      self._clu.call(method, self._call, method, arguments, options)

  def _call(self, method: str, arguments: tuple, options: Mapping[str, Any]) -> None:
    getattr(self._multi_writer, method)(*arguments, **options)

  def draw(self, step: int, draw: Callable[[], Mapping[str, np.ndarray]]) -> None:
    """Calls a function that writes pictures, in a thread, and passes on the images it returns."""
    if self.lines is not None:
      self._pictures.call('draw', lambda: self.write_images(step, draw()))

  def flush(self) -> None:
    """Waits until everything is on disk."""
    if self.lines is None:
      return
    self.lines.sync()
    self._pictures.wait()
    self.call('flush')
    self._clu.wait()
    for watched in self._watched:
      watched.watcher.wait()

  def close(self) -> None:
    """Flushes and closes; the writer cannot be used afterwards.

    Raises a StorageError if metrics.jsonl cannot be written.
    """
    if self.lines is None:
      return
    try:
      self.lines.close()
    finally:
      self._pictures.close()
      self.call('close')
      self._clu.close()
      for watched in self._watched:
        watched.watcher.close()

  def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
    if error is not None:
      if self.lines is not None:
        self.lines.hasten()
      if not self._has_calls:  # nothing waits for the import
        self._clu.leave()
    end_after(self.close, error)

  def _tag(self, name: str) -> str:
    """The name of a number in TensorBoard, with its group."""
    if name.startswith('hooks/'):
      return name
    if self.folder.name != 'train':
      return f'validation/{name}'
    for group, names in _GROUPS.items():
      if name.startswith(names):
        return f'{group}/{name}'
    return f'learning/{name}'


def _tensorboard(folder: pathlib.Path, begin: int | None) -> MetricWriter:
  from valkyrie.monitoring.clu_writers import TensorBoard  # noqa: PLC0415 - imported before

  return TensorBoard(folder, begin)
