"""Event files of TensorBoard, written with its own package and without TensorFlow."""

from collections.abc import Mapping
import io
import itertools
import os
import pathlib
import socket
import time
from typing import Any

import numpy as np
from PIL import Image
from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore  (generated)
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore  (the same)
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.image import metadata as image_metadata
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard.util.tensor_util import make_tensor_proto

from valkyrie.storage import held_folder

_number = itertools.count()  # of the files of this process
_MOST_BYTES = 2**26


class EventFile:
  """A new event file in a folder, with the methods of CLU's MetricWriter that a run calls.

  Events are written by `flush` and `close`, which raise an OSError if the file system refuses; a
  later call goes on at the same byte. The events that wait so are at most 64 MiB.
  """

  def __init__(self, folder: pathlib.Path, begin: int | None = None):
    """Makes the file. TensorBoard then drops what earlier files have of the steps from `begin` on.

    May raise an OSError.
    """
    folder = held_folder.place(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # TensorBoard reads the files of a folder in the order of their names.
    name = f'{int(time.time()):010}.{socket.gethostname()}.{os.getpid()}.{next(_number)}'
    self._file = open(folder / f'events.out.tfevents.{name}', 'xb', buffering=0)  # noqa: SIM115
    self._left = bytearray()
    self._records = RecordWriter(_Appended(self._left))
    self._write(file_version='brain.Event:2')
    for _ in range(0 if begin is None else 2):  # the first one of all files drops nothing
      self._write(step=begin, session_log=SessionLog(status=SessionLog.START))

  def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
    """Writes numbers in float32, the precision of TensorBoard."""
    for tag, value in scalars.items():
      self._write(step=step, summary=scalar_pb(tag, value))

  def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
    """Writes texts in Markdown."""
    for tag, text in texts.items():
      self._write(step=step, summary=text_pb(tag, text))

  def write_images(self, step: int, images: Mapping[str, np.ndarray]) -> None:
    """Writes images [N, H, W, 3], uint8."""
    for tag, array in images.items():
      height, width = array.shape[1:3]
      content = [str(width).encode(), str(height).encode(), *map(_png, array)]
      tensor = make_tensor_proto(np.array(content, object))
      metadata = image_metadata.create_summary_metadata(None, None)
      value = Summary.Value(tag=tag, tensor=tensor, metadata=metadata)
      self._write(step=step, summary=Summary(value=[value]))

  def write_hparams(self, hparams: Mapping[str, Any]) -> None:
    """Writes hyperparameters, once."""
    self._write(step=0, summary=hparams_pb(dict(hparams)))

  def flush(self) -> None:
    """Waits until everything is in the file."""
    while self._left:
      del self._left[: self._file.write(self._left)]

  def close(self) -> None:
    """Flushes and closes the file."""
    self.flush()
    self._file.close()

  def _write(self, **fields: Any) -> None:
    if len(self._left) < _MOST_BYTES:
      self._records.write(Event(wall_time=time.time(), **fields).SerializeToString())


class _Appended(io.RawIOBase):
  """A file to write, which appends to an array of bytes."""

  def __init__(self, content: bytearray):
    self._content = content

  def write(self, data: Any) -> int:
    self._content += data
    return len(data)


def _png(image: np.ndarray) -> bytes:
  file = io.BytesIO()
  Image.fromarray(image).save(file, 'png')
  return file.getvalue()
