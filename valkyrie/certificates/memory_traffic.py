"""Bytes that a compiled program moves to and from a chip's main memory, loops multiplied out.

Each instruction of the schedule reads its operands and writes its results, once; what happens in a
fusion stays on the chip. Not counted is what the layout places in another memory than the main one
(`S(1)`: the vector memory of a TPU's core, `S(3)`: a v4's common memory), what is only another name
for the same bytes, and, of a buffer that is sliced or updated in place, all but the slice.

It is an estimate from the program's text, and not a measurement. A product that is too large for
the chip may read an operand several times, so it may move more; where a cache holds an operand, as
on CPUs and GPUs, it may move less.
"""

from collections.abc import Iterator
import re
from typing import NamedTuple

from valkyrie.certificates import hlo

# These make no bytes move: they name, wait, or are counted where they started.
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
  """One instruction that moves.

  bytes: read and written, once; times: how often it runs in a step.
  source: what the program called it, as jax names its operations, and the instruction.
  """

  bytes: int
  times: int
  source: str


def of_module(module: hlo.Module) -> list[Movement]:
  """Every instruction that moves something; of branches, those of the one that moves least."""
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
  """Bytes in a step."""
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
      if _in_memory(operand)
    )
    return read + _written(inner, shape)
  # Where it comes from, where it goes, and how much it is.
  start, made = (operands or [()])[0], shape
  if opcode == 'copy-start':  # (destination, source, a semaphore)
    made = next(hlo.arrays(shape))
  elif opcode == 'slice-start':  # ((source), destination, a semaphore)
    made = list(hlo.arrays(shape))[1]
  elif opcode in ('dynamic-update-slice', 'scatter'):
    start = made = operands[1 if opcode == 'dynamic-update-slice' else -1]
    made_bytes = _size(made) if _in_memory(shape) else 0
    return _in_memory(start) + (2 if opcode == 'scatter' else 1) * made_bytes
  elif opcode.endswith('-start'):  # it repeats the operands; the largest part is what it makes
    made = max(hlo.arrays(shape), key=_in_memory)
    return sum(map(_in_memory, operands)) + _in_memory(made)
  elif opcode not in _SLICES:
    return sum(map(_in_memory, operands)) + _in_memory(shape)
  return (_size(made) if _in_memory(start) else 0) + _in_memory(made)


def _size(shape: hlo.Shape) -> int:
  return sum(array.padded_bytes for array in hlo.arrays(shape))


def _in_memory(shape: hlo.Shape) -> int:
  """Bytes of a shape that lie in the main memory."""
  return sum(array.padded_bytes for array in hlo.arrays(shape) if array.space == 0)


def _read_inside(module: hlo.Module, fusion: hlo.Computation, value: hlo.Instruction) -> int:
  """What a fusion reads of one of its parameters: slices, where nothing wants it whole."""
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
  """What a fusion writes: of a buffer that it updates in place, the update."""
  if not isinstance(shape, hlo.ArrayShape) and fusion.root.opcode == 'tuple':
    parts = [fusion.by_name[name] for name in fusion.root.operands]
    return sum(_written_as(fusion, made, part) for made, part in zip(parts, shape, strict=True))
  return _written_as(fusion, fusion.root, shape)


def _written_as(fusion: hlo.Computation, made: hlo.Instruction, shape: hlo.Shape) -> int:
  if not _in_memory(shape):
    return 0
  while made.opcode in _SAME_BYTES:
    made = fusion.by_name[made.operands[0]]
  if made.opcode == 'dynamic-update-slice':
    return _size(fusion.by_name[made.operands[1]].shape)
  return _in_memory(shape)
