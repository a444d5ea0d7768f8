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

from valkyrie.lab.certificates import collectives, gpu_calls, hlo
from valkyrie.monitoring.chips import Chip

_SCOPES = {name: re.compile(rf'(?:^|[/(]){name}(?:$|[/)])') for name in ('attention', 'scan')}
_KERNEL = 'custom_call_target="tpu_custom_call"'
_COST_ESTIMATE = r'"cost_estimate":\{[^{}]*"flops":"(\d+)"'
# The scope of `models.attention.kernels`: the logits that a splash attention computes, and the
# queries, or keys, of a block. Each kernel computes a logit with so many products.
_SPLASH = re.compile(r'splash_(\d+)_(\d+)/.*splash_mha_(fwd|dq|dkv)')
_PRODUCTS = {'fwd': 2, 'dq': 3, 'dkv': 4}

# These move no bytes: they name a value, wait, or end an operation that was counted at its start.
_FREE = (
  'parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast', 'after-all', 'partition-id',
  'replica-id', 'optimization-barrier', 'add-dependency', 'domain',
)  # fmt: skip
_FREE_CALLS = ('AllocateBuffer', 'ConcatBitcast', 'AssumeGatherIndicesInBound', 'Sharding')
_PRODUCT_OPCODES = ('dot', 'convolution')
_SLICES = ('dynamic-slice', 'slice', 'gather')
# In place: the operand that is the new part of the first one, and how often that part is accessed
# there; a scatter reads what it adds to.
_UPDATES = {'dynamic-update-slice': (1, 1), 'scatter': (-1, 2)}
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


def list_work(module: hlo.Module) -> list[Work]:
  """All instructions with work; a conditional takes the branch that moves least."""
  works = hlo.transfers(module, _read)
  with_work = []
  for work in works:
    if work.bytes or work.flops or work.cycles:
      with_work.append(work)
  return with_work


def _read(instruction: hlo.Instruction) -> Work | None:
  """The work of an instruction; None for a call, whose instructions have it."""
  if instruction.opcode == 'call':
    return None
  flops = flops_of(instruction)
  moved_bytes = bytes_of(instruction)
  if _is_kernel(instruction):
    flops = _number(instruction, _COST_ESTIMATE)  # by its author
    splash = _SPLASH.search(instruction.op_name)
    if splash:
      flops, bytes_again = _splash_work(instruction, *splash.groups())
      moved_bytes += bytes_again
  cycles = _number(instruction, r'"estimated_cycles":"(\d+)"')
  return Work(
    bytes=moved_bytes,
    source=f'{instruction.op_name} {instruction.name}'.strip(),
    part=_part(instruction, flops),
    flops=flops,
    int8=_is_int8(instruction),
    cycles=cycles,
  )


def _number(instruction: hlo.Instruction, pattern: str) -> int:
  """The number that a pattern finds in the attributes; 0 without one."""
  number = instruction.find(pattern)
  return int(number or 0)


def _is_kernel(instruction: hlo.Instruction) -> bool:
  return _KERNEL in instruction.attributes


def _splash_work(
  instruction: hlo.Instruction,
  logits: str,
  block: str,
  kind: str,
) -> tuple[int, int]:
  """The operations of a kernel, and the bytes that it reads more than once.

  For each block of logits it reads a block of keys and values again, or of queries and gradients.
  """
  largest = max(instruction.arrays, key=lambda array: len(array.dims))
  width = largest.dims[-1]
  flops_of_product = 2 * int(logits) * width
  values_again = flops_of_product // int(block)
  bytes_again = values_again * largest.bits // 8
  return _PRODUCTS[kind] * flops_of_product, bytes_again


def _part(instruction: hlo.Instruction, flops: int) -> str:
  opcode = instruction.opcode.removesuffix('-start')
  is_message = opcode in ('send', 'recv')
  if is_message or opcode in collectives.KINDS:
    return 'communication'
  if _is_kernel(instruction):
    return 'kernels'
  for name, scope in _SCOPES.items():
    if scope.search(instruction.op_name):
      return name
  if flops:
    return 'products'
  return 'memory'


def _is_int8(instruction: hlo.Instruction) -> bool:
  if instruction.opcode == 'fusion':
    return any(map(_is_int8, _fused(instruction)))
  if instruction.opcode not in _PRODUCT_OPCODES:
    return False
  return all(factor.arrays[0].bits == 8 for factor in instruction.operands)


def _fused(fusion: hlo.Instruction) -> Iterable[hlo.Instruction]:
  (computation,) = fusion.called('calls')
  return computation.instructions.values()


def seconds(works: Sequence[Work], chip: Chip, plain_cycles: float = 0.0) -> dict[str, list[float]]:
  """The time of each part except communication, which `collectives` estimates.

  {part: [by roofline, by cycles]}, if its instructions run one after the other. By roofline, each
  takes the longer of its products at the peak and its bytes at HBM's bandwidth; by cycles, what the
  compiler expects. A Pallas kernel is assumed to take `plain_cycles` for each operation, as the
  same products take without it, or its roofline if they are 0.
  """
  parts: dict[str, list[float]] = {}
  for work in works:
    if work.part == 'communication':
      continue
    peak = chip.peak_flops
    if work.int8:
      peak = chip.peak_int8
    compute_seconds = work.flops / peak
    memory_seconds = work.bytes / chip.hbm_bytes_per_second
    by_roofline = max(compute_seconds, memory_seconds)
    by_cycles = work.cycles / chip.cycles_per_second
    if work.part == 'kernels':
      cycles = work.flops * plain_cycles
      by_cycles = cycles / chip.cycles_per_second or by_roofline
    sums = parts.setdefault(work.part, [0.0, 0.0])
    sums[0] += work.times * by_roofline
    sums[1] += work.times * by_cycles
  return parts


def flops_of(instruction: hlo.Instruction) -> int:
  """Operations of one execution, including those inside a fusion; 0 for a call, branch or loop."""
  if instruction.opcode == 'fusion':
    return sum(map(flops_of, _fused(instruction)))
  if gpu_calls.is_library_call(instruction):
    return gpu_calls.flops_of(instruction)
  if instruction.opcode not in _PRODUCT_OPCODES:
    return 0
  left, right = (operand.arrays[0].dims for operand in instruction.operands)
  out = instruction.arrays[0].dims
  if instruction.opcode == 'convolution':
    return 2 * _multiplications(instruction, left, right, out)
  dimensions = instruction.find(r'lhs_contracting_dims=\{([\d,]*)\}')
  contracted = hlo.integers(dimensions)
  depth = math.prod(left[dimension] for dimension in contracted)
  return 2 * math.prod(out) * depth


def _multiplications(instruction: hlo.Instruction, left: Dims, right: Dims, out: Dims) -> int:
  """The multiplications of a convolution.

  `dim_labels=0bf_0io->0bf` names the dimensions of input, kernel and output: b is the batch, f, i
  and o are features, and numbers are dimensions of the window.
  """
  dim_labels = instruction.find(r'dim_labels=([\w?>-]+)')
  input_labels, kernel_labels, output_labels = re.split(r'_|->', dim_labels)
  inputs = dict(zip(input_labels, left, strict=True))
  kernel = dict(zip(kernel_labels, right, strict=True))
  outputs = dict(zip(output_labels, out, strict=True))
  group_count = instruction.find(r'batch_group_count=(\d+)')
  groups = int(group_count or 1)
  results = outputs['b'] * outputs['f']
  count = results * kernel['i'] // groups
  # `window={size=2x3 stride=1x2 pad=0_0x1_1}` as {'size': ['2', '3'], ...}.
  written_window = instruction.find(r'window=\{([^}]*)\}')
  settings = re.findall(r'(\w+)=(\S+)', written_window)
  window = {name: values.split('x') for name, values in settings}
  for label in input_labels:
    if label.isdecimal():
      dimension = int(label)
      window_side = {name: values[dimension] for name, values in window.items()}
      count *= _meetings(inputs[label], kernel[label], outputs[label], window_side)
  return count


def _meetings(inputs: int, kernel: int, outputs: int, window: dict[str, str]) -> int:
  """The pairs of an output and a place of the kernel that meet an input, not padding or a gap."""
  stride = int(window.get('stride', 1))
  gap = int(window.get('lhs_dilate', 1))
  spacing = int(window.get('rhs_dilate', 1))
  padding, _, _ = window.get('pad', '0_0').partition('_')
  places = spacing * np.arange(kernel) - int(padding)
  begins = stride * np.arange(outputs)
  last = gap * (inputs - 1)
  met = places[:, None] + begins
  is_inside = (met >= 0) & (met <= last)
  is_input = is_inside & (met % gap == 0)
  return int(is_input.sum())


def bytes_of(instruction: hlo.Instruction) -> int:
  """The bytes of one execution of an instruction, unless it is a call, a branch or a loop."""
  if _is_free(instruction):
    return 0
  results = instruction.arrays
  if gpu_calls.is_library_call(instruction):
    results = gpu_calls.results_of(instruction)
  operands = [operand.arrays for operand in instruction.operands]
  match instruction.opcode:
    case 'fusion':
      moved = _bytes_of_fusion(instruction)
    case opcode if opcode in _UPDATES:
      place, accesses = _UPDATES[opcode]
      moved = _bytes_of_update(operands[place], results, accesses)
    case 'dynamic-slice' | 'slice' | 'gather':
      moved = _bytes_of_slice(operands[0], results)
    case 'copy-start':  # (destination, source, semaphore)
      moved = _bytes_of_slice(operands[0], results[:1])
    case 'slice-start':  # ((source), destination, semaphore)
      moved = _bytes_of_slice(operands[0], results[1:2])
    case opcode if opcode.endswith('-start'):  # repeats the operands; the largest part is new
      read = sum(map(_in_hbm, operands))
      sizes = [_in_hbm([array]) for array in results]
      written = max(sizes)
      moved = read + written
    case _:
      read = sum(map(_in_hbm, operands))
      moved = read + _in_hbm(results)
  return moved


def _is_free(instruction: hlo.Instruction) -> bool:
  opcode = instruction.opcode
  if opcode == 'custom-call':
    is_free = [call in instruction.attributes for call in _FREE_CALLS]
    return any(is_free)
  return opcode in _FREE or opcode.endswith('-done')


def _bytes_of_fusion(fusion: hlo.Instruction) -> int:
  (inner,) = fusion.called('calls')
  read = 0
  for number, operand in enumerate(fusion.operands):
    if _in_hbm(operand.arrays):
      read += _read_inside(inner.parameters[number])
  return read + _written(inner.root, fusion.arrays)


def _bytes_of_update(updates: hlo.Arrays, results: hlo.Arrays, accesses: int) -> int:
  """The bytes of a part of a buffer that is read, and accessed so often in the buffer."""
  read = _in_hbm(updates)
  if _in_hbm(results):
    return read + accesses * _size(updates)
  return read


def _bytes_of_slice(source: hlo.Arrays, results: Sequence[hlo.ArrayShape]) -> int:
  """The bytes of a part of a buffer that is read and written elsewhere."""
  written = _in_hbm(results)
  if _in_hbm(source):
    return _size(results) + written
  return written


def _size(arrays: Iterable[hlo.ArrayShape]) -> int:
  return sum(array.padded_bytes for array in arrays)


def _in_hbm(arrays: Iterable[hlo.ArrayShape]) -> int:
  """Bytes of the arrays in HBM."""
  arrays_in_hbm = [array for array in arrays if array.space == 0]
  return _size(arrays_in_hbm)


def _read_inside(value: hlo.Instruction) -> int:
  """Bytes of a parameter that a fusion reads: its slices, if no instruction reads all of it."""
  whole = _size(value.arrays)
  read = 0
  for user in value.users:
    if user.opcode in _SAME_BYTES:
      read += _read_inside(user)
    elif user.opcode in _SLICES and user.operands[0] is value:
      read += _read_of_slice(user)
    elif user.opcode in _UPDATES and user.operands[0] is value:
      continue  # updated in place
    elif user.opcode == 'fusion':
      (inner,) = user.called('calls')
      for number, operand in enumerate(user.operands):
        if operand is value:
          read += _read_inside(inner.parameters[number])
    elif user.opcode != 'tuple':
      return whole
  return min(read, whole)


def _read_of_slice(part: hlo.Instruction) -> int:
  """Bytes of a slice inside a fusion: those of its own slices, if nothing reads all of it."""
  whole = _size(part.arrays)
  readers = list(_readers(part))
  if not readers or any(reader.opcode not in _SLICES for reader in readers):
    return whole
  parts_read = map(_read_of_slice, readers)
  return min(sum(parts_read), whole)


def _readers(value: hlo.Instruction) -> Iterable[hlo.Instruction]:
  """What reads a value, also by another name."""
  for user in value.users:
    if user.opcode in _SAME_BYTES and user.users:
      yield from _readers(user)
    else:
      yield user


def _written(root: hlo.Instruction, results: hlo.Arrays) -> int:
  """Bytes that a fusion writes: only the update of a buffer that it updates in place."""
  values = [root]
  if root.opcode == 'tuple':
    values = root.operands
  arrays = iter(results)
  total = 0
  for value in values:
    arrays_of_value = itertools.islice(arrays, len(value.arrays))
    written = _in_hbm(arrays_of_value)
    source = value
    while source.opcode in _SAME_BYTES:
      source = source.operands[0]
    if written and source.opcode in _UPDATES:
      place, accesses = _UPDATES[source.opcode]
      updates = source.operands[place]
      written = accesses * _size(updates.arrays)
    total += written
  return total
