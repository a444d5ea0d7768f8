"""What the arithmetic of training costs, and what a device could do at most."""

# Dense bfloat16 operations a second of one JAX device, from the makers' data sheets. A CPU's peak
# depends on its clock and load, so it is measured where it is needed (scripts/bench).
_PEAK_BFLOAT16 = {
  'TPU v4': 275e12,
  'TPU v5 lite': 197e12,
  'TPU v5': 459e12,
  'TPU v6 lite': 918e12,
  'NVIDIA A100': 312e12,
  'NVIDIA H100': 989e12,
  'NVIDIA H200': 989e12,
}


def train_flops_per_token(forward_flops: int) -> int:
  """Forward and backward, each product of the forward pass having two in the backward one.

  Recomputation is not counted: it is work that the layout chose, not work that the model is.
  """
  return 3 * forward_flops


def peak_flops(device_kind: str) -> float | None:
  """The most operations a second that such a device could do; None where no data sheet is known."""
  known = [name for name in _PEAK_BFLOAT16 if device_kind.startswith(name)]
  return _PEAK_BFLOAT16[max(known, key=len)] if known else None
