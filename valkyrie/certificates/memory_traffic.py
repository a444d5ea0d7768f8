"""Bytes that a compiled program reads from and writes to a chip's HBM, with loops multiplied out.

Each instruction of the schedule reads its operands and writes its results, once; the intermediate
values of a fusion stay on the chip. The count excludes arrays in other memory spaces (`S(1)` is the
vector memory of a TPU core, `S(3)` the common memory of a v4) and instructions that only rename
bytes. A buffer that is sliced or updated in place counts with the bytes of the slice.

The count is an estimate from the program's text, not a measurement. A large product may read an
operand several times and move more; a cache, as on CPUs and GPUs, may reduce the traffic.
"""

from collections.abc import Iterator
import re
from typing import NamedTuple

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


class Movement(NamedTuple):
  """An instruction that reads or writes HBM.

  bytes: bytes read and written in one execution.
  times: executions per step.
  source: the operation's name in jax and the name of the instruction.
  """

  bytes: int
  times: int
  source: str


def of_module(module: hlo.Module) -> list[Movement]:
  """All instructions with HBM traffic; of a conditional, those of the branch with the least."""
  found: dict[str, list[Movement]] = {}

  def within(name: str) -> list[Movement]:
    if name not in found:
      computation = module.computations[name]
      found[name] = [m for i in computation.instructions for m in of_one(computation, i) if m.bytes]
    return found[name]

  def of_one(computation: hlo.Computation, instruction: hlo.Instruction) -> Iterator[Movement]:
    if instruction.opcode == 'while':
      times = hlo.trip_count(module, computation, instruction)
      for name in instruction.called('body') + instruction.called('condition'):
        for movement in within(name):
          yield movement._replace(times=movement.times * (1 if times is None else times))
    elif instruction.opcode == 'conditional':
      yield from min(map(within, hlo.branches(instruction)), key=total)
    elif instruction.opcode == 'call':
      for name in instruction.called('to_apply'):
        yield from within(name)
    else:
      source = re.search(r'op_name="([^"]*)"', instruction.attributes)
      yield Movement(
        _moved(module, computation, instruction),
        1,
        f'{source.group(1) if source else ""} {instruction.name}'.strip(),
      )

  return within(module.entry.name)


def total(movements: list[Movement]) -> int:
  """Bytes per step."""
  return sum(m.bytes * m.times for m in movements)


def _moved(module: hlo.Module, computation: hlo.Computation, instruction: hlo.Instruction) -> int:
  opcode, shape = instruction.opcode, instruction.shape
  operands = [computation.by_name[name].shape for name in instruction.operands]
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
    return read + _written(inner, shape)
  # `start` is the operand that is read, `made` the value that is written: `_size(made)` bytes each.
  start, made = (operands or [()])[0], shape
  if opcode == 'copy-start':  # (destination, source, semaphore)
    made = next(hlo.arrays(shape))
  elif opcode == 'slice-start':  # ((source), destination, semaphore)
    made = list(hlo.arrays(shape))[1]
  elif opcode in ('dynamic-update-slice', 'scatter'):
    start = made = operands[1 if opcode == 'dynamic-update-slice' else -1]
    made_bytes = _size(made) if _in_hbm(shape) else 0
    return _in_hbm(start) + (2 if opcode == 'scatter' else 1) * made_bytes
  elif opcode.endswith('-start'):  # repeats the operands; the result is the largest part
    made = max(hlo.arrays(shape), key=_in_hbm)
    return sum(map(_in_hbm, operands)) + _in_hbm(made)
  elif opcode not in _SLICES:
    return sum(map(_in_hbm, operands)) + _in_hbm(shape)
  return (_size(made) if _in_hbm(start) else 0) + _in_hbm(made)


def _size(shape: hlo.Shape) -> int:
  return sum(array.padded_bytes for array in hlo.arrays(shape))


def _in_hbm(shape: hlo.Shape) -> int:
  """Bytes of a shape in HBM."""
  return sum(array.padded_bytes for array in hlo.arrays(shape) if array.space == 0)


def _read_inside(module: hlo.Module, fusion: hlo.Computation, value: hlo.Instruction) -> int:
  """Bytes that a fusion reads of a parameter: its slices, if no instruction reads all of it."""
  whole, read = _size(value.shape), 0
  for user in fusion.users.get(value.name, ()):
    if user.opcode in _SAME_BYTES:
      read += _read_inside(module, fusion, user)
    elif user.opcode in _SLICES and user.operands[0] == value.name:
      read += _size(user.shape)
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


def _written(fusion: hlo.Computation, shape: hlo.Shape) -> int:
  """Bytes that a fusion writes; for a buffer that it updates in place, those of the update."""
  if not isinstance(shape, hlo.ArrayShape) and fusion.root.opcode == 'tuple':
    parts = [fusion.by_name[name] for name in fusion.root.operands]
    return sum(_written_as(fusion, made, part) for made, part in zip(parts, shape, strict=True))
  return _written_as(fusion, fusion.root, shape)


def _written_as(fusion: hlo.Computation, made: hlo.Instruction, shape: hlo.Shape) -> int:
  if not _in_hbm(shape):
    return 0
  while made.opcode in _SAME_BYTES:
    made = fusion.by_name[made.operands[0]]
  if made.opcode == 'dynamic-update-slice':
    return _size(fusion.by_name[made.operands[1]].shape)
  return _in_hbm(shape)
