"""Work of a compiled program, instruction by instruction: products, bytes and cycles.

**Products** are operations of matrix products: 2 for each multiplication. TPUs compile products to
convolutions, and their batches to dimensions of a window. As in XLA's own analysis, multiplications
with padding do not count.

**Bytes** are read from and written to a chip's HBM. Each instruction of the schedule reads its
operands and writes its results, once; the intermediate values of a fusion stay on the chip. Arrays
in other memory spaces are excluded (`S(1)` is the vector memory of a TPU core, `S(3)` the common
memory of a v4), and so are instructions that only rename bytes. For a buffer that is sliced or
updated in place, only the slice is included. This is an estimate from the program's text: a large
product may read an operand several times, and a cache, as on CPUs and GPUs, may reduce the traffic.

**Cycles** are what the compiler of a TPU program expects of most instructions, as its text shows.
They include what a roofline leaves out, such as elementwise work, heads that do not fill a matrix
unit, and the start of a small program. They assume that nothing overlaps.
"""

from collections.abc import Iterable, Sequence
import dataclasses
import itertools
import math
import re

import numpy as np

from valkyrie.lab.certificates import collectives, hlo
from valkyrie.monitoring.chips import Chip

_SCOPES = {name: re.compile(rf'(?:^|[/(]){name}(?:$|[/)])') for name in ('attention', 'scan')}
_KERNEL = 'custom_call_target="tpu_custom_call"'
# The scope of `models.attention.kernels`: the logits that a splash attention computes, and the
# queries, or keys, of a block. The kernels compute each logit with so many products.
_SPLASH = re.compile(r'splash_(\d+)_(\d+)/.*splash_mha_(fwd|dq|dkv)')
_PRODUCTS = {'fwd': 2, 'dq': 3, 'dkv': 4}

# No traffic: these name a value, wait, or end an operation that was counted at its start.
_FREE = (
  'parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast', 'after-all', 'partition-id',
  'replica-id', 'optimization-barrier', 'add-dependency', 'domain',
)  # fmt: skip
_FREE_CALLS = ('AllocateBuffer', 'ConcatBitcast', 'AssumeGatherIndicesInBound', 'Sharding')
_SLICES = ('dynamic-slice', 'slice', 'gather')
_SAME_BYTES = ('bitcast', 'optimization-barrier')

Dims = tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work(hlo.Transfer):
  """An instruction; its `bytes` are its HBM traffic.

  part: 'communication' for a collective, 'kernels' for a program of Pallas, 'attention' or 'scan'
    inside a jax.named_scope of this name; otherwise 'products' for a matrix product, and 'memory'
    for the rest: norms, activations, copies, the optimizer.
  flops: 2 for each multiplication of a matrix product, whose factors may be `int8`.
  cycles: expected by the compiler; 0 if the text has none.
  """

  part: str
  flops: int
  int8: bool
  cycles: int


def of_module(module: hlo.Module) -> list[Work]:
  """All instructions with work; a conditional takes the branch that moves least."""

  def read(instruction: hlo.Instruction) -> Work | None:
    if instruction.opcode == 'call':
      return None
    flops = flops_of(instruction)
    moved = bytes_of(instruction)
    if _KERNEL in instruction.attributes:  # with an estimate by its author
      flops = int(instruction.find(r'"cost_estimate":\{[^{}]*"flops":"(\d+)"') or 0)
      if splash := _SPLASH.search(instruction.op_name):
        flops, again = _of_splash(instruction, *splash.groups())
        moved += again
    return Work(
      bytes=moved,
      source=f'{instruction.op_name} {instruction.name}'.strip(),
      part=_part(instruction, flops),
      flops=flops,
      int8=_is_int8(instruction),
      cycles=int(instruction.find(r'"estimated_cycles":"(\d+)"') or 0),
    )

  found = hlo.transfers(module, read)
  return [one for one in found if one.bytes or one.flops or one.cycles]


def _of_splash(instruction: hlo.Instruction, logits: str, block: str, kind: str) -> tuple[int, int]:
  """The operations of a kernel, and the bytes that it reads more than once.

  For each block of logits it reads a block of keys and values again, or of queries and gradients.
  """
  largest = max(instruction.arrays, key=lambda array: len(array.dims))
  products = 2 * int(logits) * largest.dims[-1]
  again = products // int(block) * largest.bits // 8
  return _PRODUCTS[kind] * products, again


def _part(instruction: hlo.Instruction, flops: int) -> str:
  if instruction.opcode.removesuffix('-start') in (*collectives.KINDS, 'send', 'recv'):
    return 'communication'
  if _KERNEL in instruction.attributes:
    return 'kernels'
  scopes = (name for name, scope in _SCOPES.items() if scope.search(instruction.op_name))
  return next(scopes, 'products' if flops else 'memory')


def _is_int8(instruction: hlo.Instruction) -> bool:
  if instruction.opcode == 'fusion':
    return any(map(_is_int8, instruction.called('calls')[0].instructions.values()))
  is_product = instruction.opcode in ('dot', 'convolution')
  return is_product and all(factor.arrays[0].bits == 8 for factor in instruction.operands)


def seconds(works: Sequence[Work], chip: Chip, plain_cycles: float = 0.0) -> dict[str, list[float]]:
  """The time of each part except communication, which `collectives` estimates.

  {part: [by roofline, by cycles]}, if its instructions run one after the other. By roofline, each
  takes the longer of its products at the peak and its bytes at HBM's bandwidth; by cycles, what the
  compiler expects. A Pallas kernel is assumed to take `plain_cycles` for each operation, as the
  same products take without it, or its roofline if they are 0.
  """
  spent: dict[str, list[float]] = {}
  for one in works:
    if one.part != 'communication':
      peak = chip.peak_int8 if one.int8 else chip.peak_flops
      roofline = max(one.flops / peak, one.bytes / chip.hbm_bytes_per_second)
      expected = one.flops * plain_cycles if one.part == 'kernels' else one.cycles
      cycles = expected / chip.cycles_per_second or roofline * (one.part == 'kernels')
      both = spent.setdefault(one.part, [0.0, 0.0])
      both[0] += one.times * roofline
      both[1] += one.times * cycles
  return spent


def flops_of(instruction: hlo.Instruction) -> int:
  """Operations of one execution, including those inside a fusion; 0 for a call, branch or loop."""
  if instruction.opcode == 'fusion':
    return sum(map(flops_of, instruction.called('calls')[0].instructions.values()))
  if instruction.opcode not in ('dot', 'convolution'):
    return 0
  left, right = (operand.arrays[0].dims for operand in instruction.operands)
  out = instruction.arrays[0].dims
  if instruction.opcode == 'convolution':
    return 2 * _multiplications(instruction, left, right, out)
  contracted = instruction.find(r'lhs_contracting_dims=\{([\d,]*)\}').split(',')
  return 2 * math.prod(out) * math.prod(left[int(number)] for number in contracted if number)


def _multiplications(instruction: hlo.Instruction, left: Dims, right: Dims, out: Dims) -> int:
  """The multiplications of a convolution.

  `dim_labels=0bf_0io->0bf` names the dimensions of input, kernel and output: b is the batch, f, i
  and o are features, and numbers are dimensions of the window.
  """
  labels = re.split(r'_|->', instruction.find(r'dim_labels=([\w?>-]+)'))
  inputs, kernel, outputs = (
    dict(zip(names, dims, strict=True))
    for names, dims in zip(labels, (left, right, out), strict=True)
  )
  groups = int(instruction.find(r'batch_group_count=(\d+)') or 1)
  count = outputs['b'] * outputs['f'] * kernel['i'] // groups
  # `window={size=2x3 stride=1x2 pad=0_0x1_1}` as {'size': ['2', '3'], ...}.
  found = re.findall(r'(\w+)=(\S+)', instruction.find(r'window=\{([^}]*)\}'))
  window = {name: values.split('x') for name, values in found}
  for number in (label for label in labels[0] if label.isdecimal()):
    of_place = {name: values[int(number)] for name, values in window.items()}
    count *= _meetings(inputs[number], kernel[number], outputs[number], of_place)
  return count


def _meetings(inputs: int, kernel: int, outputs: int, window: dict[str, str]) -> int:
  """The pairs of an output and a place of the kernel that meet an input, not padding or a gap."""
  stride = int(window.get('stride', 1))
  gap = int(window.get('lhs_dilate', 1))
  before = int(window.get('pad', '0_0').split('_')[0])
  places = int(window.get('rhs_dilate', 1)) * np.arange(kernel) - before
  met = places[:, None] + stride * np.arange(outputs)
  return int(((met >= 0) & (met <= gap * (inputs - 1)) & (met % gap == 0)).sum())


def bytes_of(instruction: hlo.Instruction) -> int:
  """The bytes of one execution of an instruction, unless it is a call, a branch or a loop."""
  opcode = instruction.opcode
  results = instruction.arrays
  operands = [operand.arrays for operand in instruction.operands]
  free = opcode == 'custom-call' and any(call in instruction.attributes for call in _FREE_CALLS)
  if free or opcode in _FREE or opcode.endswith('-done'):
    return 0
  if opcode == 'fusion':
    (inner,) = instruction.called('calls')
    read = [
      _read_inside(inner.parameters[n]) for n, operand in enumerate(operands) if _in_hbm(operand)
    ]
    return sum(read) + _written(inner.root, results)
  if opcode in ('dynamic-update-slice', 'scatter'):
    updates = operands[1 if opcode == 'dynamic-update-slice' else -1]
    accesses = 2 if opcode == 'scatter' else 1
    return _in_hbm(updates) + (accesses * _size(updates) if _in_hbm(results) else 0)
  if opcode in (*_SLICES, 'copy-start', 'slice-start'):
    # copy-start: (destination, source, semaphore); slice-start: ((source), destination, semaphore)
    made = {'copy-start': results[:1], 'slice-start': results[1:2]}.get(opcode, results)
    return (_size(made) if _in_hbm(operands[0]) else 0) + _in_hbm(made)
  read = sum(map(_in_hbm, operands))
  if opcode.endswith('-start'):  # repeats the operands; the result is the largest part
    return read + max(_in_hbm([array]) for array in results)
  return read + _in_hbm(results)


def _size(arrays: Iterable[hlo.ArrayShape]) -> int:
  return sum(array.padded_bytes for array in arrays)


def _in_hbm(arrays: Iterable[hlo.ArrayShape]) -> int:
  """Bytes of the arrays in HBM."""
  return _size(array for array in arrays if array.space == 0)


def _read_inside(value: hlo.Instruction) -> int:
  """Bytes of a parameter that a fusion reads: its slices, if no instruction reads all of it."""
  whole = _size(value.arrays)
  read = 0
  for user in value.users:
    if user.opcode in _SAME_BYTES:
      read += _read_inside(user)
    elif user.opcode in _SLICES and user.operands[0] is value:
      read += _size(user.arrays)
    elif user.opcode == 'dynamic-update-slice' and user.operands[0] is value:
      continue  # updated in place
    elif user.opcode == 'fusion':
      (inner,) = user.called('calls')
      places = [number for number, operand in enumerate(user.operands) if operand is value]
      read += sum(_read_inside(inner.parameters[number]) for number in places)
    elif user.opcode != 'tuple':
      return whole
  return min(read, whole)


def _written(root: hlo.Instruction, results: hlo.Arrays) -> int:
  """Bytes that a fusion writes: only the update of a buffer that it updates in place."""
  arrays = iter(results)
  total = 0
  for made in root.operands if root.opcode == 'tuple' else [root]:
    written = _in_hbm(itertools.islice(arrays, len(made.arrays)))
    while made.opcode in _SAME_BYTES:
      made = made.operands[0]  # noqa: PLW2901
    if written and made.opcode == 'dynamic-update-slice':
      written = _size(made.operands[1].arrays)
    total += written
  return total
