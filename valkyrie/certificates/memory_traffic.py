"""Bytes that a compiled program reads from and writes to a chip's HBM, with loops multiplied out.

Each instruction of the schedule reads its operands and writes its results, once; the intermediate
values of a fusion stay on the chip. The count excludes arrays in other memory spaces (`S(1)` is the
vector memory of a TPU core, `S(3)` the common memory of a v4) and instructions that only rename
bytes. A buffer that is sliced or updated in place counts with the bytes of the slice.

The count is an estimate from the program's text, not a measurement. A large product may read an
operand several times and move more; a cache, as on CPUs and GPUs, may reduce the traffic.
"""

from collections.abc import Iterable
import itertools

from valkyrie.certificates import hlo

# No traffic: these name a value, wait, or end an operation that was counted at its start.
_FREE = (
  'parameter',
  'constant',
  'tuple',
  'get-tuple-element',
  'bitcast',
  'after-all',
  'partition-id',
  'replica-id',
  'optimization-barrier',
  'add-dependency',
  'domain',
)
_FREE_CALLS = ('AllocateBuffer', 'ConcatBitcast', 'AssumeGatherIndicesInBound', 'Sharding')
_SLICES = ('dynamic-slice', 'slice', 'gather')
_SAME_BYTES = ('bitcast', 'optimization-barrier')


def moved(module: hlo.Module, computation: hlo.Computation, instruction: hlo.Instruction) -> int:
  """The bytes of one execution of an instruction, unless it is a call, a branch or a loop."""
  opcode, results = instruction.opcode, instruction.arrays
  operands = [computation.by_name[name].arrays for name in instruction.operands]
  free = opcode == 'custom-call' and any(call in instruction.attributes for call in _FREE_CALLS)
  if free or opcode in _FREE or opcode.endswith('-done'):
    return 0
  if opcode == 'fusion':
    inner = module.computations[instruction.called('calls')[0]]
    read = sum(
      _read_inside(module, inner, inner.parameters[number])
      for number, operand in enumerate(operands)
      if _in_hbm(operand)
    )
    return read + _written(inner, results)
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


def _read_inside(module: hlo.Module, fusion: hlo.Computation, value: hlo.Instruction) -> int:
  """Bytes that a fusion reads of a parameter: its slices, if no instruction reads all of it."""
  whole, read = _size(value.arrays), 0
  for user in fusion.users.get(value.name, ()):
    if user.opcode in _SAME_BYTES:
      read += _read_inside(module, fusion, user)
    elif user.opcode in _SLICES and user.operands[0] == value.name:
      read += _size(user.arrays)
    elif user.opcode == 'dynamic-update-slice' and user.operands[0] == value.name:
      continue  # updated in place
    elif user.opcode == 'fusion':
      inner = module.computations[user.called('calls')[0]]
      for number, name in enumerate(user.operands):
        if name == value.name:
          read += _read_inside(module, inner, inner.parameters[number])
    elif user.opcode != 'tuple':
      return whole
  return min(read, whole)


def _written(fusion: hlo.Computation, results: hlo.Arrays) -> int:
  """Bytes that a fusion writes; for a buffer that it updates in place, those of the update."""
  root, arrays, total = fusion.root, iter(results), 0
  for name in root.operands if root.opcode == 'tuple' else [root.name]:
    made = fusion.by_name[name]
    written = _in_hbm(itertools.islice(arrays, len(made.arrays)))
    while made.opcode in _SAME_BYTES:
      made = fusion.by_name[made.operands[0]]
    if written and made.opcode == 'dynamic-update-slice':
      written = _size(fusion.by_name[made.operands[1]].arrays)
    total += written
  return total
