"""The interface of `clu.metric_writers.MetricWriter`, without CLU's import of TensorFlow."""

from collections.abc import Mapping
from typing import Any

import numpy as np

Arrays = Mapping[str, np.ndarray]


class MetricWriter:
  """A writer with the methods of CLU's `MetricWriter`; docs/hooks.md says what each receives.

  A subclass overrides the methods that it needs, or `call`, which receives all others. CLU takes
  every subclass for a `MetricWriter` of its own (`clu_writers`).
  """

  def write_summaries(
    self,
    step: int,
    values: Arrays,
    metadata: Mapping[str, Any] | None = None,
  ) -> None:
    """Writes tensors for a plugin of TensorBoard."""
    self.call('write_summaries', step, values, metadata)

  def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
    """Writes numbers."""
    self.call('write_scalars', step, scalars)

  def write_images(self, step: int, images: Arrays) -> None:
    """Writes images [N, H, W, 3], uint8."""
    self.call('write_images', step, images)

  def write_videos(self, step: int, videos: Arrays) -> None:
    """Writes videos [N, T, H, W, 3]."""
    self.call('write_videos', step, videos)

  def write_audios(self, step: int, audios: Arrays, *, sample_rate: int) -> None:
    """Writes sounds [N, T, channels], from -1 to 1."""
    self.call('write_audios', step, audios, sample_rate=sample_rate)

  def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
    """Writes texts in Markdown."""
    self.call('write_texts', step, texts)

  def write_histograms(
    self,
    step: int,
    arrays: Arrays,
    num_buckets: Mapping[str, int] | None = None,
  ) -> None:
    """Writes histograms of arrays of any shape."""
    self.call('write_histograms', step, arrays, num_buckets)

  def write_hparams(self, hparams: Mapping[str, Any]) -> None:
    """Writes hyperparameters, once."""
    self.call('write_hparams', hparams)

  def flush(self) -> None:
    """Writes what the writer still holds."""
    self.call('flush')

  def close(self) -> None:
    """Flushes and closes; the writer cannot be used afterwards."""
    self.call('close')

  def call(self, method: str, *arguments: Any, **options: Any) -> None:
    """Receives a call of a method that the subclass does not override; ignores it by default."""
