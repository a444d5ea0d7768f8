"""From sums over tokens to the numbers that are written: arithmetic on numbers of the host."""

from collections.abc import Sequence
import math

Metrics = dict[str, float | None]
BY_POSITION = 'loss_by_position/'


def text_metrics(loss_sum: float, weight_sum: float, tokens_per_byte: float | None) -> Metrics:
  """How well the text is predicted.

  Args:
    loss_sum: weighted negative log-likelihood, in nats.
    weight_sum: of the tokens that count; without any, the result is NaN.
    tokens_per_byte: tokens a byte of text is cut into, None where a vocabulary cannot say.

  Returns:
    loss in nats a token, bits_per_token, and bits_per_byte (None without tokens_per_byte).
  """
  loss = float(loss_sum) / float(weight_sum) if weight_sum else math.nan
  bits = loss / math.log(2)
  return {
    'loss': loss,
    'bits_per_token': bits,
    'bits_per_byte': None if tokens_per_byte is None else bits * tokens_per_byte,
  }


def position_metrics(loss_sums: Sequence[float], weight_sums: Sequence[float]) -> Metrics:
  """The loss by where in its document a target stands, as far as there are any.

  Args:
    loss_sums: weighted nats of the targets at the positions 2^k to 2^(k+1) - 1, for each k.
    weight_sums: their weights.

  Returns:
    loss_by_position/P, in nats a token, where P = 2^k is the first position of its bin.
  """
  bins = enumerate(zip(loss_sums, weight_sums, strict=True))
  return {f'{BY_POSITION}{2**k}': float(loss / weight) for k, (loss, weight) in bins if weight}


def train_flops_per_token(forward_flops: int) -> int:
  """FLOPs per token of a forward and a backward pass, from those of the forward pass.

  The backward pass has two products for each product of the forward pass. Recomputation is not
  counted, because it depends on the layout and not on the model.
  """
  return 3 * forward_flops


def speed_metrics(
  *,
  tokens: int,
  steps: int,
  seconds: float,
  devices: int,
  flops_per_token: float | None,
  peak_flops: float | None,
) -> Metrics:
  """How fast `steps` steps went.

  Args:
    tokens: that the steps read, over all rows and hosts.
    steps: how many they were.
    seconds: of wall time that they took.
    devices: over all hosts.
    flops_per_token: of the model, forward and backward, without recomputation.
    peak_flops: operations a second that one device could do at most.

  Returns:
    step_seconds, tokens_per_second, tokens_per_second_per_device, tflops_per_second_per_device, and
    mfu, the share of the peak that the model's own operations reach (Chowdhery et al. 2022, B).
    What needs an argument that is None is None.
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
