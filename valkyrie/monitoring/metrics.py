"""Metrics of text and speed, computed from sums over tokens on the host."""

from collections.abc import Sequence
import math

Metrics = dict[str, float | None]
BY_POSITION = 'loss_by_position/'


def text_metrics(loss_sum: float, weight_sum: float, tokens_per_byte: float | None) -> Metrics:
  """The quality of the predictions.

  Args:
    loss_sum: weighted negative log-likelihood, in nats.
    weight_sum: sum of the token weights. If it is 0, the loss is NaN.
    tokens_per_byte: mean number of tokens per byte of text; None if the vocabulary has none.

  Returns:
    loss in nats per token, bits_per_token, and bits_per_byte (None without tokens_per_byte).
  """
  loss = float(loss_sum) / float(weight_sum) if weight_sum else math.nan
  bits = loss / math.log(2)
  return {
    'loss': loss,
    'bits_per_token': bits,
    'bits_per_byte': None if tokens_per_byte is None else bits * tokens_per_byte,
  }


def position_metrics(loss_sums: Sequence[float], weight_sums: Sequence[float]) -> Metrics:
  """The loss as a function of the target's position in its document.

  Args:
    loss_sums: weighted nats of the targets at the positions 2^k to 2^(k+1) - 1, for each k.
    weight_sums: their weights. Bins without weight are left out.

  Returns:
    loss_by_position/P in nats per token, where P = 2^k is the first position of the bin.
  """
  bins = enumerate(zip(loss_sums, weight_sums, strict=True))
  return {f'{BY_POSITION}{2**k}': float(loss / weight) for k, (loss, weight) in bins if weight}


def speed_metrics(
  *,
  tokens: int,
  steps: int,
  seconds: float,
  devices: int,
  flops_per_token: float | None,
  peak_flops: float | None,
) -> Metrics:
  """The speed of `steps` steps.

  Args:
    tokens: tokens that the steps read, over all rows and hosts.
    steps: number of steps.
    seconds: wall time of the steps.
    devices: number of devices of all hosts.
    flops_per_token: FLOPs of the model, forward and backward, without recomputation.
    peak_flops: peak FLOP/s of one device.

  Returns:
    step_seconds, tokens_per_second, tokens_per_second_per_device, tflops_per_second_per_device, and
    mfu, the model FLOPs' share of the peak (Chowdhery et al. 2022, appendix B). A metric that
    needs an argument that is None is None.
  """
  per_device = tokens / seconds / devices
  flops = None if flops_per_token is None else per_device * flops_per_token
  return {
    'step_seconds': seconds / steps,
    'tokens_per_second': tokens / seconds,
    'tokens_per_second_per_device': per_device,
    'tflops_per_second_per_device': None if flops is None else flops / 1e12,
    'mfu': None if flops is None or peak_flops is None else flops / peak_flops,
  }
