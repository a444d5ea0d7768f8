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
from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore  (generated, without types)
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore  (the same)
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.image import metadata as image_metadata
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard.util.tensor_util import make_tensor_proto

from valkyrie.storage import held_folder

_number = itertools.count()  # of the files of this process


class EventFile:
  """A new event file in a folder, with the methods of CLU's MetricWriter that a run calls.

  May raise an OSError.
  """

  def __init__(self, folder: pathlib.Path):
    folder = held_folder.place(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # TensorBoard reads the files of a folder in the order of their names.
    name = f'{int(time.time()):010}.{socket.gethostname()}.{os.getpid()}.{next(_number)}'
    file = open(folder / f'events.out.tfevents.{name}', 'xb')  # noqa: SIM115, closed by close
    self._records = RecordWriter(file)
    self._write(file_version='brain.Event:2')

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
    self._records.flush()

  def close(self) -> None:
    """Flushes and closes the file."""
    self._records.close()

  def _write(self, **fields: Any) -> None:
    self._records.write(Event(wall_time=time.time(), **fields).SerializeToString())


def _png(image: np.ndarray) -> bytes:
  file = io.BytesIO()
  Image.fromarray(image).save(file, 'png')
  return file.getvalue()
