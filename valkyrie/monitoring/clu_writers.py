"""CLU's writers of metrics. The import of this module loads TensorFlow, so a thread imports it."""

from collections.abc import Callable, Sequence
import contextlib
import os
import pathlib
import time
from typing import Any, NamedTuple, cast

from clu import metric_writers
from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore  (generated)
import tensorflow as tf

from valkyrie.monitoring.metric_writer import MetricWriter
from valkyrie.monitoring.watcher import size_of
from valkyrie.storage import held_folder

_MOST_BYTES = 2**26
_NO_STEP = -1  # of hyperparameters

metric_writers.MetricWriter.register(MetricWriter)
with contextlib.suppress(RuntimeError):  # TensorFlow runs already, with settings of its user
  tf.config.set_visible_devices([], 'GPU')  # it would allocate the memory of every GPU


def multi_writer(writers: Sequence[MetricWriter]) -> MetricWriter:
  """CLU's MultiWriter, which passes each call to all of these writers."""
  return cast(MetricWriter, metric_writers.MultiWriter(cast(Any, writers)))


class _Call(NamedTuple):
  step: int
  method: str
  arguments: tuple
  options: dict[str, Any]


class _EventFile(metric_writers.SummaryWriter):
  """CLU's writer of one event file."""

  def drop(self, begin: int) -> None:
    """Tells TensorBoard to drop what earlier files have of the steps from `begin` on."""
    start = Event(
      step=begin,
      wall_time=time.time(),
      session_log=SessionLog(status=SessionLog.START),
    )
    for _ in range(2):  # the first one that TensorBoard reads drops nothing
      tf.raw_ops.ImportEvent(
        writer=self._summary_writer._resource,  # no public function writes an event
        event=start.SerializeToString(),
      )


class TensorBoard(MetricWriter):
  """Event files of TensorBoard, written by CLU's `SummaryWriter`.

  After an error of the file system, a file of TensorFlow ends in the midst of an event, and loses
  without an error what it gets later. The calls are therefore kept until a flush has succeeded:
  the next flush makes another file, in which the last step of the file before is written again.
  The calls that wait have at most 64 MiB; later ones are ignored.
  """

  def __init__(self, folder: pathlib.Path, begin: int | None = None):
    """Makes a file. TensorBoard then drops what earlier files have of the steps from `begin` on.

    None keeps all, so that TensorBoard may show a value twice after an error. Like `flush` and
    `close`, raises an OSError if the file system refuses.
    """
    self._folder = folder
    self._begin = begin
    self._calls: list[_Call] = []  # of the last step that is in a file, and those that wait
    self._done = 0  # of these calls
    self._file: _EventFile | None = None
    self._run(self._open)

  def call(self, method: str, *arguments: Any, **options: Any) -> None:
    """Keeps a call for the next flush."""
    step = arguments[0]
    if method == 'write_hparams':
      step = _NO_STEP
    waiting_calls = self._calls[self._done :]
    waiting = sum(size_of(call.arguments) for call in waiting_calls)
    if waiting < _MOST_BYTES:
      self._calls.append(_Call(step, method, arguments, options))

  def flush(self) -> None:
    """Waits until everything is in the file."""
    self._run(self._flush)

  def close(self) -> None:
    """Flushes and closes the file."""
    self.flush()
    if self._file is not None:
      self._run(self._file.close)

  def _run(self, function: Callable[[], None]) -> None:
    """Calls a function that writes to the file, which is given up if the file system refuses."""
    try:
      function()
    except tf.errors.OpError as error:
      if not _is_refusal(error):
        raise
      self._file = None
      self._done = 0
      raise OSError(error.message) from error

  def _open(self) -> None:
    folder = held_folder.place(self._folder)
    folder.mkdir(parents=True, exist_ok=True)
    self._file = _EventFile(os.fspath(folder))
    if self._begin is not None:
      self._file.drop(self._begin)

  def _flush(self) -> None:
    held_folder.check(self._folder)
    if self._file is None:
      self._open()
    assert self._file is not None
    while self._done < len(self._calls):
      call = self._calls[self._done]
      try:
        getattr(self._file, call.method)(*call.arguments, **call.options)
      except Exception as error:
        if not _is_refusal(error):  # TensorFlow cannot write these values
          del self._calls[self._done]
        raise
      self._done += 1
    self._file.flush()
    self._keep_the_last_step()

  def _keep_the_last_step(self) -> None:
    """Forgets the calls that are in the file, except those that another file would replace."""
    kept = []
    if self._begin is not None:
      steps = [self._begin, *(call.step for call in self._calls)]
      self._begin = max(steps)
      kept = [call for call in self._calls if call.step >= self._begin]
    self._calls = kept
    self._done = len(kept)


def _is_refusal(error: Exception) -> bool:
  """Whether an error is of the file system, and not of the values to write."""
  kinds = tf.errors.InvalidArgumentError | tf.errors.UnimplementedError
  is_of_values = isinstance(error, kinds)
  return isinstance(error, tf.errors.OpError) and not is_of_values
