"""Where a run's numbers go: metrics.jsonl, TensorBoard and the console, through CLU's interface.

    model_dir/metrics.jsonl    one JSON object a line, from training
    model_dir/train/           TensorBoard's files, written by CLU

CLU's writers import TensorFlow, which takes seconds that no step waits for: a thread of its own
imports them and writes to TensorBoard, in order, while metrics.jsonl and the console are written at
once. Until it has, no other code of this process may import seqio or a part of TensorFlow: Python
would find TensorFlow half there. (Token stores are built in a process of their own.)
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
import importlib.util
import os
import pathlib
from typing import Any

import gin
import jax
import numpy as np

from valkyrie.config.computation import may_change_on_resume
from valkyrie.errors import ConfigurationError, StorageError, ValkyrieError, storage_errors
from valkyrie.monitoring.json_lines import JsonLines

Console = Callable[[int, Mapping[str, Any]], None]


@may_change_on_resume()
@gin.configurable
def create_writers(
  model_dir: str | os.PathLike,
  name: str = 'train',
  console: Console | None = None,
  tensorboard: bool = True,
) -> 'RunWriter':
  """Starts importing CLU's writers, and returns at once with a writer that can be used.

  Args:
    model_dir: the directory of the run.
    name: of the stream. 'train' writes model_dir/metrics.jsonl and model_dir/train/; any other
      writes both in model_dir/name/.
    console: shows the scalars of a step to people, e.g. `Progress.show`; None shows nothing.
    tensorboard: False writes no files for TensorBoard, and needs none of their packages.

  Raises:
    ConfigurationError: where the packages that TensorBoard's files need are not installed.
    StorageError: where metrics.jsonl cannot be opened.
  """
  needed = ('clu', 'tensorboard', 'tensorflow') if tensorboard else ()
  missing = [package for package in needed if importlib.util.find_spec(package) is None]
  if missing:
    raise ConfigurationError(
      f"Writing TensorBoard's files needs {', '.join(missing)}, which this Python does not have. "
      'Install the packages that setup.py names, or set create_writers.tensorboard = False.'
    )
  events = pathlib.Path(model_dir) / name
  lines = (pathlib.Path(model_dir) if name == 'train' else events) / 'metrics.jsonl'
  silent = jax.process_index() != 0
  if tensorboard:
    _quiet_tensorflow()
  return RunWriter(events if tensorboard else None, lines, console, silent)


class RunWriter:
  """CLU's MetricWriter: scalars go everywhere, everything else to TensorBoard.

  Only the first process of a run writes (`silent` is for the others), and only lines where there is
  no place for `events`. A failure surfaces in the next call; after `flush` or `close` everything is
  on disk. A context manager that closes.
  """

  def __init__(
    self, events: pathlib.Path | None, lines: pathlib.Path, console: Console | None, silent: bool
  ):
    self._events, self._console, self._silent = events, console, silent
    if silent:
      return
    self._lines = JsonLines(lines)
    self._under_way: list[Future] = []
    self._thread = ThreadPoolExecutor(1, thread_name_prefix='tensorboard')
    if events is not None:
      self._tensorboard = self._thread.submit(_import_tensorboard, events)
      self._under_way.append(self._tensorboard)

  def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
    """Writes numbers: Python's, numpy's or jax's (which are waited for); None where unknown."""
    if self._silent:
      return
    numbers = {key: _number(value) for key, value in scalars.items()}
    self._lines.write({'step': int(step), **numbers})
    if self._console is not None:
      self._console(step, numbers)
    known = {key: value for key, value in numbers.items() if isinstance(value, int | float)}
    self._later('write_scalars', step, known)

  def write_summaries(self, step, values, metadata=None) -> None:
    """Writes raw tensors to TensorBoard."""
    self._later('write_summaries', step, values, metadata)

  def write_images(self, step, images) -> None:
    """Writes images [N, H, W, C] to TensorBoard."""
    self._later('write_images', step, images)

  def write_videos(self, step, videos) -> None:
    """Hands videos to CLU, whose TensorBoard writer leaves them out with a warning."""
    self._later('write_videos', step, videos)

  def write_audios(self, step, audios, *, sample_rate) -> None:
    """Writes audio [N, T, C] to TensorBoard."""
    self._later('write_audios', step, audios, sample_rate=sample_rate)

  def write_texts(self, step, texts) -> None:
    """Writes texts to TensorBoard."""
    self._later('write_texts', step, texts)

  def write_histograms(self, step, arrays, num_buckets=None) -> None:
    """Writes histograms to TensorBoard."""
    self._later('write_histograms', step, arrays, num_buckets)

  def write_hparams(self, hparams) -> None:
    """Writes hyper-parameters to TensorBoard, once."""
    self._later('write_hparams', hparams)

  def flush(self) -> None:
    """Waits until everything that was written is on disk."""
    if not self._silent:
      self._lines.sync()
      self._later('flush')
      self._surface(wait=True)

  def close(self) -> None:
    """Flushes and closes; the writer cannot be used afterwards."""
    if not self._silent:
      try:
        self.flush()
        self._later('close')
        self._surface(wait=True)
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
      error.add_note(str(failure))  # the first error is the one to see

  def _later(self, method: str, *args: Any, **kwargs: Any) -> None:
    if self._silent or self._events is None:
      return
    self._surface(wait=False)

    def write():
      writer = self._tensorboard.result()
      message = f"TensorBoard's files in {self._events} cannot be written"
      advice = 'Make room there, and run the same command again.'
      with storage_errors(message, advice, also=(Exception,)):
        getattr(writer, method)(*args, **kwargs)

    self._under_way.append(self._thread.submit(write))

  def _surface(self, wait: bool) -> None:
    """Raises the first failure among the calls that are done, or, with `wait`, among all."""
    while self._under_way and (wait or self._under_way[0].done()):
      self._under_way.pop(0).result()


def _number(value: Any) -> int | float | str | None:
  return value if value is None or isinstance(value, str) else np.asarray(value).item()


def _quiet_tensorflow() -> None:
  """Leaves out what TensorFlow prints about CUDA and oneDNN, though it only writes numbers here.

  Called before its thread starts, since changing the environment under running threads is not safe,
  and after jax began, which has read its own log level by then and keeps it.
  """
  os.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'
  os.environ.setdefault('TF_ENABLE_ONEDNN_OPTS', '0')


def _import_tensorboard(events: pathlib.Path) -> Any:
  """CLU's writer of TensorBoard's files; runs in the writer's thread."""
  try:
    import tensorflow as tf  # noqa: PLC0415 - seconds, which only this thread waits for

    for kind in ('GPU', 'TPU'):  # TensorFlow would take the devices' memory away from jax
      tf.config.set_visible_devices([], kind)
    from clu import metric_writers  # noqa: PLC0415

    return metric_writers.SummaryWriter(str(events))
  except ImportError as error:
    raise ConfigurationError(
      f"Writing TensorBoard's files needs clu, tensorboard and tensorflow, and importing them "
      f'failed: {error}. Install again the packages that setup.py names.'
    ) from error
  except Exception as error:
    raise StorageError(
      f"TensorBoard's files cannot be written in {events}: {error}. Name another --model_dir."
    ) from error
