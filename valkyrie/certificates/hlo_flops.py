"""Operations of the matrix products of a compiled program: 2 for each multiplication.

TPUs compile products to convolutions, and their batches to dimensions of a window. As in XLA's own
analysis, multiplications with padding do not count.
"""

import math
import re

import numpy as np

from valkyrie.certificates import hlo

Dims = tuple[int, ...]


def of_instruction(
  module: hlo.Module, computation: hlo.Computation, instruction: hlo.Instruction
) -> int:
  """Operations of one execution, with those inside a fusion; none of a call, branch or loop."""
  if instruction.opcode == 'fusion':
    inner = module.computations[instruction.called('calls')[0]]
    return sum(of_instruction(module, inner, one) for one in inner.instructions)
  if instruction.opcode not in ('dot', 'convolution'):
    return 0
  left, right = (computation.by_name[name].arrays[0].dims for name in instruction.operands)
  out = instruction.arrays[0].dims
  if instruction.opcode == 'convolution':
    return 2 * _multiplications(instruction, left, right, out)
  contracted = instruction.find(r'lhs_contracting_dims=\{([\d,]*)\}').split(',')
  return 2 * math.prod(out) * math.prod(left[int(number)] for number in contracted if number)


def _multiplications(instruction: hlo.Instruction, left: Dims, right: Dims, out: Dims) -> int:
  """Those of a convolution.

  `dim_labels=0bf_0io->0bf` names the dimensions of input, kernel and output: b is the batch, f, i
  and o are features, and numbers those of the window.
  """
  labels = re.split(r'_|->', instruction.find(r'dim_labels=([\w?>-]+)'))
  inputs, kernel, outputs = (
    dict(zip(names, dims, strict=True))
    for names, dims in zip(labels, (left, right, out), strict=True)
  )
  groups = int(instruction.find(r'batch_group_count=(\d+)') or 1)
  count = outputs['b'] * outputs['f'] * kernel['i'] // groups
  window = _window(instruction)
  for number in (label for label in labels[0] if label.isdecimal()):
    of_place = {name: values[int(number)] for name, values in window.items()}
    count *= _meetings(inputs[number], kernel[number], outputs[number], of_place)
  return count


def _window(instruction: hlo.Instruction) -> dict[str, list[str]]:
  """`window={size=2x3 stride=1x2 pad=0_0x1_1}` as {'size': ['2', '3'], ...}."""
  found = re.findall(r'(\w+)=(\S+)', instruction.find(r'window=\{([^}]*)\}'))
  return {name: values.split('x') for name, values in found}


def _meetings(inputs: int, kernel: int, outputs: int, window: dict[str, str]) -> int:
  """The pairs of an output and a place of the kernel that meet an input, not padding or a gap."""
  stride, gap = int(window.get('stride', 1)), int(window.get('lhs_dilate', 1))
  before = int(window.get('pad', '0_0').split('_')[0])
  places = int(window.get('rhs_dilate', 1)) * np.arange(kernel) - before
  met = places[:, None] + stride * np.arange(outputs)
  return int(((met >= 0) & (met <= gap * (inputs - 1)) & (met % gap == 0)).sum())
