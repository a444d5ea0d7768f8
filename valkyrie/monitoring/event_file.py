"""Event files of TensorBoard, written with its own package and without TensorFlow."""

from collections.abc import Mapping
import io
import itertools
import logging
import os
import pathlib
import socket
import time
from typing import Any
import wave

import numpy as np
from PIL import Image
from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore  (generated, without types)
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore  (the same)
from tensorboard.plugins.audio import metadata as audio_metadata
from tensorboard.plugins.histogram.summary_v2 import histogram_pb
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.image import metadata as image_metadata
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard.util.tensor_util import make_tensor_proto

_number = itertools.count()  # of the files of this process


class EventFile:
  """A new event file in a folder, with CLU's MetricWriter interface; may raise an OSError."""

  def __init__(self, folder: pathlib.Path):
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

  def write_summaries(
    self, step: int, values: Mapping[str, Any], metadata: Mapping[str, Any] | None = None
  ) -> None:
    """Writes tensors, each with the metadata of its TensorBoard plugin if given."""
    for tag, value in values.items():
      found = Summary.Value(tag=tag, tensor=make_tensor_proto(np.asarray(value)))
      if (about := (metadata or {}).get(tag)) is not None:
        about = about if isinstance(about, bytes) else about.SerializeToString()
        found.metadata.ParseFromString(about)
      self._write(step=step, summary=Summary(value=[found]))

  def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
    """Writes texts in Markdown."""
    for tag, text in texts.items():
      self._write(step=step, summary=text_pb(tag, text))

  def write_histograms(
    self, step: int, arrays: Mapping[str, Any], num_buckets: Mapping[str, int] | None = None
  ) -> None:
    """Writes the histogram of the values of each array."""
    for tag, array in arrays.items():
      self._write(
        step=step, summary=histogram_pb(tag, np.asarray(array), (num_buckets or {}).get(tag))
      )

  def write_images(self, step: int, images: Mapping[str, Any]) -> None:
    """Writes images [H, W, C] or [N, H, W, C]: bytes, or floats from 0 to 1."""
    for tag, array in images.items():
      values = np.asarray(array)
      values = values if values.ndim == 4 else values[None]
      if values.dtype != np.uint8:
        values = np.round(255 * np.clip(values, 0, 1)).astype(np.uint8)
      height, width = values.shape[1:3]
      content = [str(width).encode(), str(height).encode(), *map(_png, values)]
      metadata = image_metadata.create_summary_metadata(None, None)
      self.write_summaries(step, {tag: np.array(content, object)}, {tag: metadata})

  def write_videos(self, step: int, videos: Mapping[str, Any]) -> None:
    """Logs a warning: TensorBoard shows no videos."""
    logging.warning('TensorBoard shows no videos: %s of step %d left out', ', '.join(videos), step)

  def write_audios(self, step: int, audios: Mapping[str, Any], *, sample_rate: int) -> None:
    """Writes sounds [N, T, C], floats from -1 to 1, of `sample_rate` values per second."""
    encoding = audio_metadata.Encoding.Value('WAV')
    metadata = audio_metadata.create_summary_metadata(None, None, encoding)
    for tag, array in audios.items():
      content = [(_wav(sound, sample_rate), b'') for sound in np.asarray(array)]  # without labels
      self.write_summaries(step, {tag: np.array(content, object)}, {tag: metadata})

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
  """An image [H, W, C] of 1, 3 or 4 channels as a PNG."""
  file = io.BytesIO()
  Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(file, 'png')
  return file.getvalue()


def _wav(sound: np.ndarray, sample_rate: int) -> bytes:
  """A sound [T, C] as a WAV file with 16 bits per value."""
  file = io.BytesIO()
  with wave.open(file, 'wb') as writer:
    writer.setparams((sound.shape[1], 2, sample_rate, 0, 'NONE', ''))
    values = np.clip(np.round(32768 * sound), -32768, 32767)
    writer.writeframes(values.astype('<i2').tobytes())
  return file.getvalue()
