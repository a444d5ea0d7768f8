"""Writers of metrics to metrics.jsonl, TensorBoard and the console, with CLU's interface.

    model_dir/metrics.jsonl    one JSON object per line and step, from training
    model_dir/train/           TensorBoard event files

TensorBoard groups the numbers: learning/, throughput/, memory/ and hooks/, and validation/ of
evaluations.

A thread writes to TensorBoard, in order, while metrics.jsonl and the console are written
immediately. Scalars, texts, images, histograms and hyperparameters need no TensorFlow. From the
first audio or raw tensor on CLU's writer takes over, which imports TensorFlow in some seconds. No
other thread may import TensorFlow meanwhile: it would find a partially imported module.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
import importlib.util
import os
import pathlib
import threading
import time
from typing import Any

import gin
import jax
import numpy as np

from valkyrie.config.computation import may_change_on_resume
from valkyrie.distributed.standard_streams import without_noise
from valkyrie.errors import ConfigurationError, StorageError, ValkyrieError, storage_errors
from valkyrie.monitoring.json_lines import JsonLines
from valkyrie.storage import foreign_names

_IMPORT = threading.Lock()  # of TensorFlow, by the writers of a run

Show = Callable[[int, Mapping[str, Any]], None]
_GROUPS = {
  'throughput': ('step_seconds', 'tokens_per_second', 'tflops_per_second', 'mfu'),
  'memory': ('host_memory', 'device_memory'),
}


@may_change_on_resume()
@gin.configurable
def create_writers(
  model_dir: str | os.PathLike,
  name: str = 'train',
  also: Sequence[Show] = (),
  tensorboard: bool = True,
) -> 'RunWriter':
  """Returns a writer that can be used immediately, and starts to import TensorBoard's package.

  Args:
    model_dir: the directory of the run.
    name: name of the stream. 'train' writes model_dir/metrics.jsonl and model_dir/train/; any other
      name writes both in model_dir/name/.
    also: called with the scalars of each step, such as `Progress.show`.
    tensorboard: whether to write TensorBoard event files.

  Raises:
    ConfigurationError: the package for TensorBoard event files is not installed, or the name leads
      out of model_dir.
    StorageError: metrics.jsonl cannot be opened.
  """
  if tensorboard and importlib.util.find_spec('tensorboard') is None:
    raise ConfigurationError(
      'TensorBoard event files need tensorboard, which this Python does not have. Install the '
      'packages of setup.py, or set create_writers.tensorboard = False.'
    )
  if tensorboard:
    _quiet_tensorflow()
  if jax.process_index() != 0:
    return RunWriter(None, None, ())
  advice = 'Use letters, digits and dashes.'
  name = foreign_names.checked(name, 'create_writers.name', advice, ConfigurationError)
  events = pathlib.Path(model_dir) / name
  lines = (pathlib.Path(model_dir) if name == 'train' else events) / 'metrics.jsonl'
  return RunWriter(events if tensorboard else None, lines, also)


class RunWriter:
  """A CLU MetricWriter of scalars to all outputs, and of everything else to TensorBoard.

  A path that is None is left out: all outputs in the processes of a run that are not the first.
  A failure in the thread is raised by the next call. After `flush` or `close` everything is on
  disk. A context manager that closes.
  """

  def __init__(self, events: pathlib.Path | None, lines: pathlib.Path | None, also: Sequence[Show]):
    self._events, self._also = events, tuple(also)
    self._lines = None if lines is None else JsonLines(lines)
    self._pending: list[Future] = []
    self._thread = ThreadPoolExecutor(1, thread_name_prefix='tensorboard')
    if events is not None:
      self._tensorboard = self._thread.submit(_TensorBoard, events)
      self._pending.append(self._tensorboard)

  def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
    """Writes numbers of Python, numpy or jax (waiting for these); None is an unknown value.

    Texts go to the JSON lines alone.
    """
    if self._lines is None:
      return
    numbers = {key: _number(value) for key, value in scalars.items()}
    self._lines.write({'step': int(step), **numbers})
    numbers = {key: value for key, value in numbers.items() if not isinstance(value, str)}
    for show in self._also:
      show(step, numbers)
    known = {self._tag(key): value for key, value in numbers.items() if value is not None}
    self._submit('write_scalars', step, known)

  def write_summaries(self, step, values, metadata=None) -> None:
    """Writes raw tensors to TensorBoard."""
    self._submit('write_summaries', step, values, metadata)

  def write_images(self, step, images) -> None:
    """Writes images [N, H, W, C] to TensorBoard."""
    self._submit('write_images', step, images)

  def write_videos(self, step, videos) -> None:
    """Passes videos to CLU, whose TensorBoard writer skips them with a warning."""
    self._submit('write_videos', step, videos)

  def write_audios(self, step, audios, *, sample_rate) -> None:
    """Writes audio [N, T, C] to TensorBoard."""
    self._submit('write_audios', step, audios, sample_rate=sample_rate)

  def write_texts(self, step, texts) -> None:
    self._submit('write_texts', step, texts)

  def write_histograms(self, step, arrays, num_buckets=None) -> None:
    self._submit('write_histograms', step, arrays, num_buckets)

  def write_hparams(self, hparams) -> None:
    """Writes hyperparameters to TensorBoard, once."""
    self._submit('write_hparams', hparams)

  def flush(self) -> None:
    if self._lines is not None:
      self._lines.sync()
      self._submit('flush')
      self._raise_failures(wait=True)

  def close(self) -> None:
    """Flushes and closes; the writer cannot be used afterwards."""
    if self._lines is not None:
      try:
        self.flush()
        self._submit('close')
        self._raise_failures(wait=True)
      finally:
        self._lines.close()
        self._thread.shutdown()

  def __enter__(self) -> 'RunWriter':
    return self

  def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
    try:
      self.close()
    except ValkyrieError as failure:
      if error is None:
        raise
      error.add_note(str(failure))  # the first error is the one to report

  def _tag(self, name: str) -> str:
    """The name of a number in TensorBoard, behind that of its group."""
    if self._events is None or name.startswith('hooks/'):
      return name
    if self._events.name != 'train':
      return f'validation/{name}'
    group = next((g for g, names in _GROUPS.items() if name.startswith(names)), 'learning')
    return f'{group}/{name}'

  def _submit(self, method: str, *args: Any, **kwargs: Any) -> None:
    if self._events is None:
      return
    self._raise_failures(wait=False)

    def write():
      writer = self._tensorboard.result().with_method(method)
      message = f'TensorBoard event files in {self._events} cannot be written'
      advice = 'Make room there, and run the same command again.'
      with storage_errors(message, advice, also=(Exception,)):
        getattr(writer, method)(*args, **kwargs)

    self._pending.append(self._thread.submit(write))

  def _raise_failures(self, wait: bool) -> None:
    """Raises the first failure of the completed calls, or, with `wait`, of all calls."""
    while self._pending and (wait or self._pending[0].done()):
      self._pending.pop(0).result()


def _number(value: Any) -> int | float | str | None:
  return value if value is None or isinstance(value, str) else np.asarray(value).item()


def _quiet_tensorflow() -> None:
  """Suppresses TensorFlow's messages about CUDA and oneDNN, which do not matter here.

  To be called before the thread starts, because changing the environment under running threads is
  not safe, and after the start of jax, which reads its log level from the same variable.
  """
  os.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'
  os.environ.setdefault('TF_ENABLE_ONEDNN_OPTS', '0')


class _TensorBoard:
  """The writer of event files in one folder; belongs to the thread of a RunWriter."""

  def __init__(self, events: pathlib.Path):
    self._events = events
    try:
      from valkyrie.monitoring.event_file import EventFile  # noqa: PLC0415 - in the thread

      self._writer: Any = EventFile(events)
    except ImportError as error:
      raise _not_imported('tensorboard', error) from error
    except OSError as error:
      raise StorageError(
        f'TensorBoard event files in {events} cannot be written: {error}. Name another --model_dir.'
      ) from error

  def with_method(self, method: str) -> Any:
    """A writer with this method of CLU's MetricWriter."""
    if not hasattr(self._writer, method):
      # TensorBoard reads one file after the other, so that all that follows goes to the new one. It
      # orders them by their names, which have the second.
      self._writer.close()
      time.sleep(1)
      self._writer = _clu_writer(self._events)
    return self._writer


def _clu_writer(events: pathlib.Path) -> Any:
  try:
    with _IMPORT, without_noise():
      import tensorflow as tf  # noqa: PLC0415 - takes seconds

      for kind in ('GPU', 'TPU'):  # else TensorFlow would allocate their memory
        tf.config.set_visible_devices([], kind)
      from clu import metric_writers  # noqa: PLC0415

      return metric_writers.SummaryWriter(str(events))
  except ImportError as error:
    raise _not_imported('clu and tensorflow', error) from error


def _not_imported(packages: str, error: ImportError) -> ConfigurationError:
  return ConfigurationError(
    f'TensorBoard event files need {packages}, and importing them failed: {error}. Reinstall the '
    'packages of setup.py.'
  )
