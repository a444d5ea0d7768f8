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
  out = call.arrays[0].dims
  depth = math.prod(left[dimension] for dimension in hlo.integers(contracted))
  return 2 * math.prod(out) * depth


def results_of(call: Instruction) -> Arrays:
  """The arrays that a call writes, without the bytes in which it works."""
  last = call.arrays[-1]
  is_of_bytes = last.bits == 8 and len(last.dims) == 1
  if is_of_bytes and len(call.arrays) > 1:
    return call.arrays[:-1]
  return call.arrays


def _attention_flops(call: Instruction) -> int:
  logits = call.find(r'"intermediate_tensor_shape":\s*\{[^\[]*"dimensions":\s*\[([^\]]*)\]')
  *batch, queries, keys = hlo.integers(logits)
  window_text = call.find(r'"sliding_window_length":\s*"?(\d+)')
  window = int(window_text or 0)
  is_causal = re.search(r'"mask_type":\s*"[A-Z_]*CAUSAL', call.attributes) is not None
  pairs = queries * keys
  if window and window < keys:
    pairs = queries * window
  elif is_causal:
    triangle = queries * (queries + 1) // 2
    keys_before = max(keys - queries, 0)
    pairs = triangle + queries * keys_before
  width = call.operands[0].arrays[0].dims[-1]
  products = _PRODUCTS_FORWARD
  if 'Backward"' in call.attributes:
    products = _PRODUCTS_BACKWARD
  flops_of_product = 2 * math.prod(batch) * pairs * width
  return products * flops_of_product
