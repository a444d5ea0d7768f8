"""Parser for the text of an optimized XLA program, and sums over its loops, branches and calls.

`jax.stages.Compiled.as_text()` is the only public form of the program. The parser knows the part of
its grammar that is necessary to follow data through loops and to count the iterations of a loop.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import dataclasses
import functools
import math
import operator
import re
from typing import Any, NamedTuple, TypeVar

# Bits of a value of the types without a size in their name. Tokens and opaque values have no bits.
_BITS = {'pred': 8, 'token': 0, 'opaque': 0}


class ArrayShape(NamedTuple):
  """`bf16[8,128]{1,0:T(8,128)(2,1)S(3)}`.

  minor_to_major: the dimensions in the order of the layout, the contiguous one first.
  tile: the first tile of the layout, over the most minor dimensions; () without tiles.
  space: the memory space; 0 is the device's main memory.
  """

  dtype: str
  dims: tuple[int, ...]
  minor_to_major: tuple[int, ...] = ()
  tile: tuple[int, ...] = ()
  space: int = 0

  @property
  def bytes(self) -> int:
    """Bytes without padding."""
    return math.prod(self.dims) * _bits(self.dtype) // 8

  @property
  def padded_bytes(self) -> int:
    """Bytes in memory, with the most minor dimensions rounded up to whole tiles."""
    dims = [self.dims[number] for number in self.minor_to_major]
    for place, tile in enumerate(self.tile[::-1][: len(dims)]):
      dims[place] = -(-dims[place] // tile) * tile
    return math.prod(dims) * _bits(self.dtype) // 8


Arrays = tuple[ArrayShape, ...]  # of a value, including those inside nested tuples


@dataclasses.dataclass(eq=False)
class Instruction:
  """`%name = arrays opcode(%operands), attributes`; `literal` is the text inside the brackets."""

  computation: 'Computation'
  name: str
  arrays: Arrays
  opcode: str
  operands: list['Instruction']
  literal: str
  attributes: str
  users: list['Instruction'] = dataclasses.field(default_factory=list)

  def find(self, pattern: str) -> str:
    """The first group of a regular expression in the attributes, or ''."""
    found = re.search(pattern, self.attributes)
    return found.group(1) if found else ''

  def called(self, *attributes: str) -> list['Computation']:
    """The computations of attributes such as body=%x or branch_computations={%a, %b}."""
    values = [self.find(rf'\b{name}=(\{{[^}}]*\}}|%?[\w.-]+)') for name in attributes]
    return [self.computation.others[name] for name in re.findall(r'[\w.-]+', ' '.join(values))]

  @property
  def op_name(self) -> str:
    """The operation's name in jax, or ''."""
    return self.find(r'op_name="([^"]*)"')


@dataclasses.dataclass(eq=False)
class Computation:
  """Instructions in execution order, `parameters` by number, and `others` of the program."""

  name: str
  others: Mapping[str, 'Computation']
  instructions: dict[str, Instruction] = dataclasses.field(default_factory=dict)
  parameters: dict[int, Instruction] = dataclasses.field(default_factory=dict)
  root: Instruction = dataclasses.field(init=False)


class Module(NamedTuple):
  """The program of one of `partitions` devices."""

  entry: Computation
  computations: Mapping[str, Computation]
  partitions: int


_COMPUTATION = re.compile(
  r'^(ENTRY )?%?([\w.-]+) \(.*\{\n((?:.*\n)*?)\}(?:, execution_thread=.*)?$', re.MULTILINE
)
_INSTRUCTION = re.compile(r'\s+(ROOT )?%?([\w.-]+) = ')
_OPCODE = re.compile(r' ([a-z][\w-]*)\(')
_ARRAY = re.compile(r'([a-z]\w*)\[([\d,<=]*)\](\{[^{}]*\})?')


def parse(text: str) -> Module:
  """Parses the output of `as_text()`; raises a ValueError if the syntax of a line is unknown."""
  computations: dict[str, Computation] = {}
  entry = None
  for is_entry, name, body in _COMPUTATION.findall(text):
    # A line without indent continues the line before: the metadata of a Pallas kernel is JSON.
    lines = re.sub(r'\n(?=\S)', '', body).splitlines()
    computations[name] = computation = Computation(name, computations)
    for line in filter(str.strip, lines):
      _add(computation, line)
    entry = computation if is_entry else entry
  if entry is None:
    raise ValueError('The text has no ENTRY computation.')
  partitions = re.match(r'.*num_partitions=(\d+)', text)
  return Module(entry, computations, int(partitions.group(1)) if partitions else 1)


def _add(computation: Computation, line: str) -> None:
  """Adds the instruction of a line, whose operands stand above it."""
  head = _INSTRUCTION.match(line)
  if head is None:
    raise ValueError(f'Expected an instruction, found {line[:200]!r}.')
  arrays, at = _arrays(line, head.end())
  opcode = _OPCODE.match(line, at)
  if opcode is None:
    raise ValueError(f'Expected an opcode in {line[:200]!r}.')
  end = _closing(line, opcode.end() - 1)
  inside = line[opcode.end() : end]
  operands = [computation.instructions[name] for name in re.findall(r'%([\w.-]+)', inside)]
  is_root, name = head.groups()
  made = Instruction(computation, name, arrays, opcode.group(1), operands, inside, line[end + 1 :])
  computation.instructions[name] = made
  for operand in dict.fromkeys(operands):
    operand.users.append(made)
  if made.opcode == 'parameter':
    computation.parameters[int(inside)] = made
  if is_root:
    computation.root = made


def _closing(line: str, at: int) -> int:
  """The index of the bracket that closes the one at `at`."""
  depth = 0
  for mark in re.compile(r'[(){}]|"(?:[^"\\]|\\.)*"').finditer(line, at):
    depth += {'(': 1, '{': 1, ')': -1, '}': -1}.get(mark.group(), 0)
    if depth == 0:
      return mark.start()
  raise ValueError(f'Expected a closing bracket in {line[:200]!r}.')


def _arrays(line: str, at: int) -> tuple[Arrays, int]:
  """The arrays of the shape at index `at`, which may be a tuple, and the index after it."""
  single = _ARRAY.match(line, at)
  if single is None and line[at] != '(':
    raise ValueError(f'Expected a shape, found {line[at : at + 80]!r}.')
  end = single.end() if single else _closing(line, at) + 1
  found = _ARRAY.findall(line, at, end)
  if len(found) != line.count('[', at, end):
    raise ValueError(f'Expected a tuple of arrays, found {line[at:end]!r}.')
  return tuple(_array(*array) for array in found), end


@functools.cache
def _array(dtype: str, dims: str, layout: str) -> ArrayShape:
  sizes = tuple(int(size.strip('<=')) for size in dims.split(',') if size)
  order, _, rest = (layout or '{}')[1:-1].partition(':')
  minor_to_major = tuple(int(number) for number in order.split(',') if number)
  tile = re.match(r'T\(([\d,]+)\)', rest)
  space = re.search(r'S\((\d+)\)', rest)
  return ArrayShape(
    dtype,
    sizes,
    minor_to_major or tuple(reversed(range(len(sizes)))),
    tuple(int(size) for size in tile.group(1).split(',')) if tile else (),
    int(space.group(1)) if space else 0,
  )


def _bits(dtype: str) -> int:
  """8 for s8 and f8e4m3fn, 16 for bf16, 64 for c64."""
  if dtype in _BITS:
    return _BITS[dtype]
  digits = re.search(r'\d+', dtype)
  if digits is None:
    raise ValueError(f'The element type {dtype} is unknown.')
  return int(digits.group())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transfer:
  """An instruction that moves data, or does other work of a subclass.

  bytes, source: moved in one execution, and the operation's name in jax.
  times: executions per step.
  rare: whether it is in a branch that is not the usual one.
  """

  bytes: float
  source: str
  times: int = 1
  in_loop: bool = False
  rare: bool = False


_Transfer = TypeVar('_Transfer', bound=Transfer)


def transfers(module: Module, read: Callable[[Instruction], _Transfer | None]) -> list[_Transfer]:
  """All transfers of a program, including those in its loops, branches and calls.

  `read` returns the transfer of an instruction, or None to read the computations that it calls. The
  branch of a conditional that moves least is the usual one. A loop without a known trip count is
  counted once.
  """

  @functools.cache
  def within(computation: Computation) -> list[_Transfer]:
    return [part for i in computation.instructions.values() for part in of_one(i)]

  def of_one(instruction: Instruction) -> Iterator[_Transfer]:
    if instruction.opcode == 'while':
      trips = trip_count(instruction)
      for computation in instruction.called('body', 'condition'):
        for part in within(computation):
          times = part.times * (1 if trips is None else trips)
          yield dataclasses.replace(part, times=times, in_loop=True)
    elif instruction.opcode == 'conditional':
      names = ('branch_computations', 'true_computation', 'false_computation')
      branches = [within(branch) for branch in instruction.called(*names)]
      usual = min(range(len(branches)), key=lambda number: total(branches[number]))
      for number, branch in enumerate(branches):
        for part in branch:
          yield part if number == usual else dataclasses.replace(part, rare=True)
    elif (one := read(instruction)) is not None:
      yield one
    elif instruction.opcode in ('call', 'fusion', 'async-start'):
      for computation in instruction.called('calls', 'to_apply'):
        yield from within(computation)

  return within(module.entry)


def total(found: Iterable[Transfer], *, rare: bool = False) -> float:
  """Bytes per step in the usual branches, or with `rare` in the other ones."""
  return sum(t.bytes * t.times for t in found if t.rare == rare)


_SAME_VALUE = (
  'copy', 'bitcast', 'convert', 'reshape', 'copy-done', 'copy-start', 'optimization-barrier',
)  # fmt: skip
_OPERATIONS = {
  'add': operator.add,
  'subtract': operator.sub,
  **{name: getattr(operator, name.lower()) for name in ('LT', 'LE', 'GT', 'GE', 'NE')},
}
_MOST_TRIPS = 10**6


def trip_count(loop: Instruction) -> int | None:
  """The number of iterations of a `while`; None if the text does not show it.

  CPUs and GPUs write it. Otherwise the loop is executed, as far as its condition reads it.
  """
  if known := loop.find(r'known_trip_count.{1,4}n":"(\d+)"'):
    return int(known)
  condition, body = loop.called('condition', 'body')
  carry = functools.partial(_evaluated, loop.operands[0], ())
  for trips in range(_MOST_TRIPS):
    goes_on = _evaluated(condition.root, (carry,))
    if not goes_on:
      return None if goes_on is None else trips
    carry = functools.cache(functools.partial(_evaluated, body.root, (carry,)))
  return None


def _evaluated(made: Instruction, arguments: Sequence[Callable[[], Any]]) -> Any:
  """A number, or the functions that return the elements of a tuple; None if it is unknown."""
  operands = [
    functools.cache(functools.partial(_evaluated, operand, arguments)) for operand in made.operands
  ]
  operation = _OPERATIONS.get(made.find(r'direction=(\w\w)') or made.opcode)
  value = None
  if made.opcode in _SAME_VALUE:
    value = operands[0]()
  elif made.opcode == 'tuple':
    value = operands
  elif made.opcode == 'get-tuple-element':
    elements = operands[0]()
    value = elements and elements[int(made.find(r'index=(\d+)'))]()
  elif made.opcode == 'parameter' and arguments:
    value = arguments[int(made.literal)]()
  elif made.opcode == 'fusion':
    value = _evaluated(made.called('calls')[0].root, operands)
  elif made.opcode == 'constant' and re.fullmatch(r'-?\d+', made.literal):
    value = int(made.literal)
  elif operation is not None:
    numbers = [operand() for operand in operands]
    value = None if None in numbers else operation(*numbers)
  return value
