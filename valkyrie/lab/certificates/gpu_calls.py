"""Operations and bytes of a GPU program's library calls: cuBLAS's products, cuDNN's attention.

XLA writes what a call computes into its `backend_config`, as JSON.
"""

import math
import re

from valkyrie.lab.certificates import hlo
from valkyrie.lab.certificates.hlo import Arrays, Instruction

_PRODUCT = '"__cublas$'
_ATTENTION = '"__cudnn$fmha'
# Forward: scores and sums of values. Backward: scores again, and gradients of scores, q, k and v.
_PRODUCTS_FORWARD = 2
_PRODUCTS_BACKWARD = 5


def is_library_call(instruction: Instruction) -> bool:
  """Whether an instruction calls cuBLAS or cuDNN's attention."""
  target = instruction.find(r'custom_call_target=("[^"]*)')
  return target.startswith((_PRODUCT, _ATTENTION))


def flops_of(call: Instruction) -> int:
  """2 for each multiplication of a library call's matrix products."""
  if _ATTENTION in call.attributes:
    return _attention_flops(call)
  contracted = call.find(r'"lhs_contracting_dimensions":\s*\[([^\]]*)\]')
  left = call.operands[0].arrays[0].dims
  depth = math.prod(left[dimension] for dimension in hlo.integers(contracted))
  return 2 * math.prod(call.arrays[0].dims) * depth


def results_of(call: Instruction) -> Arrays:
  """The arrays that a call writes, without the bytes in which it works."""
  last = call.arrays[-1]
  is_workspace = len(call.arrays) > 1 and last.bits == 8 and len(last.dims) == 1
  return call.arrays[:-1] if is_workspace else call.arrays


def _attention_flops(call: Instruction) -> int:
  logits = call.find(r'"intermediate_tensor_shape":\s*\{[^\[]*"dimensions":\s*\[([^\]]*)\]')
  *batch, queries, keys = hlo.integers(logits)
  window = int(call.find(r'"sliding_window_length":\s*"?(\d+)') or 0)
  is_causal = re.search(r'"mask_type":\s*"[A-Z_]*CAUSAL', call.attributes) is not None
  pairs = queries * keys
  if window and window < keys:
    pairs = queries * window
  elif is_causal:
    pairs = queries * (queries + 1) // 2 + queries * max(keys - queries, 0)
  width = call.operands[0].arrays[0].dims[-1]
  is_backward = 'Backward"' in call.attributes
  products = _PRODUCTS_BACKWARD if is_backward else _PRODUCTS_FORWARD
  return products * 2 * math.prod(batch) * pairs * width
