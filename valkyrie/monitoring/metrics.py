"""Metrics of text and speed, computed from sums over tokens on the host."""

from collections.abc import Mapping, Sequence
import math
import statistics

Metrics = dict[str, float | None]
BY_POSITION = 'loss_by_position/'
TARGETS_BY_POSITION = 'targets_by_position/'
_LARGEST_EXPONENT = 700  # of a float


def text_metrics(loss_sum: float, weight_sum: float, tokens_per_byte: float | None) -> Metrics:
  """{loss in nats per token, its perplexity, bits_per_token, bits_per_byte, targets}.

  `loss_sum` is the weighted negative log-likelihood in nats of so many targets: without any, the
  loss is NaN. Without `tokens_per_byte`, of the source's text, the bits per byte are None.
  """
  loss = math.nan
  if weight_sum:
    loss = float(loss_sum) / float(weight_sum)
  perplexity = math.inf if loss > _LARGEST_EXPONENT else math.exp(loss)
  bits = loss / math.log(2)
  bits_per_byte = None
  if tokens_per_byte is not None:
    bits_per_byte = bits * tokens_per_byte
  return {
    'loss': loss,
    'perplexity': perplexity,
    'bits_per_token': bits,
    'bits_per_byte': bits_per_byte,
    'targets': float(weight_sum),
  }


def position_metrics(loss_sums: Sequence[float], weight_sums: Sequence[float]) -> Metrics:
  """{loss_by_position/P: nats per token} of the targets at the positions P = 2^k to 2^(k+1) - 1.

  The sums are over the targets of each k, whose weight is targets_by_position/P; bins without
  weight are left out.
  """
  metrics: Metrics = {}
  position = 1
  for loss, weight in zip(loss_sums, weight_sums, strict=True):
    if weight:
      metrics[f'{BY_POSITION}{position}'] = float(loss / weight)
      metrics[f'{TARGETS_BY_POSITION}{position}'] = float(weight)
    position *= 2
  return metrics


def speed_metrics(
  *,
  tokens: int,
  steps: int,
  seconds: float,
  devices: int,
  flops_per_token: float | None,
  peak_flops: float | None,
) -> Metrics:
  """The speed of `steps` steps, of all rows and hosts together, in wall time; None where unknown.

  mfu is the share of the peak FLOP/s of a device that the model's FLOPs, forward and backward
  without recomputation, reach (Chowdhery et al. 2022, appendix B).
  """
  per_device = tokens / seconds / devices
  teraflops = None
  mfu = None
  if flops_per_token is not None:
    flops = per_device * flops_per_token
    teraflops = flops / 1e12
    if peak_flops is not None:
      mfu = flops / peak_flops
  return {
    'step_seconds': seconds / steps,
    'tokens_per_second': tokens / seconds,
    'tokens_per_second_per_device': per_device,
    'tflops_per_second_per_device': teraflops,
    'mfu': mfu,
  }


def step_time_metrics(seconds: Mapping[int, float]) -> Metrics:
  """The standard deviation of the seconds of steps, the slowest one's, and its number.

  {} for fewer than two steps.
  """
  if len(seconds) < 2:
    return {}
  slowest = max(seconds, key=lambda step: seconds[step])
  return {
    'step_seconds_deviation': statistics.pstdev(seconds.values()),
    'step_seconds_slowest': seconds[slowest],
    'slowest_step': slowest,
  }
