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


class ArrayShape(NamedTuple):
  """`bf16[8,128]{1,0:T(8,128)(2,1)S(3)}`.

  bits: of a value, here 16.
  minor_to_major: the dimensions in the order of the layout, the contiguous one first.
  tile: the first tile of the layout, over the most minor dimensions; () without tiles.
  space: the memory space; 0 is the device's main memory.
  """

  bits: int
  dims: tuple[int, ...]
  minor_to_major: tuple[int, ...]
  tile: tuple[int, ...]
  space: int

  @property
  def bytes(self) -> int:
    """Bytes without padding."""
    return math.prod(self.dims) * self.bits // 8

  @property
  def padded_bytes(self) -> int:
    """Bytes in memory, with the most minor dimensions rounded up to whole tiles."""
    dims = [self.dims[number] for number in self.minor_to_major]
    for place, tile in enumerate(self.tile[::-1][: len(dims)]):
      dims[place] = -(-dims[place] // tile) * tile
    return math.prod(dims) * self.bits // 8


Arrays = tuple[ArrayShape, ...]  # of a value, including those inside nested tuples


@dataclasses.dataclass(eq=False, repr=False)  # they refer to one another
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


@dataclasses.dataclass(eq=False, repr=False)  # they refer to one another
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
# A shape ends before ` opcode(`, and the operands end with the bracket before an attribute.
_INSTRUCTION = re.compile(
  r'\s+(ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([a-z][\w-]*)\((.*?)\)(?:, (?=[\w-]+=)(.*))?'
)
_ARRAY = re.compile(r'(pred|token|opaque|[a-z]+(\d+)\w*)\[([\d,<=]*)\](\{[^{}]*\})?')
_BITS = {'pred': 8, 'token': 0, 'opaque': 0}  # the names of other types have theirs: f8e4m3fn


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
  found = _INSTRUCTION.fullmatch(line)
  arrays = _ARRAY.findall(found[3]) if found else []
  if found is None or len(arrays) != found[3].count('['):
    raise ValueError(f'Expected an instruction, found {line[:200]!r}.')
  is_root, name, _, opcode, inside, attributes = found.groups()
  operands = [computation.instructions[name] for name in re.findall(r'%([\w.-]+)', inside)]
  shapes = tuple(_array(*array) for array in arrays)
  made = Instruction(computation, name, shapes, opcode, operands, inside, attributes or '')
  computation.instructions[name] = made
  for operand in dict.fromkeys(operands):
    operand.users.append(made)
  if opcode == 'parameter':
    computation.parameters[int(inside)] = made
  if is_root:
    computation.root = made


@functools.cache
def _array(dtype: str, bits: str, dims: str, layout: str) -> ArrayShape:
  order, _, rest = layout[1:-1].partition(':')
  tile = re.match(r'T\(([\d,]+)\)', rest)
  space = re.search(r'S\((\d+)\)', rest)
  sizes = integers(dims)
  return ArrayShape(
    bits=int(bits or _BITS[dtype]),
    dims=sizes,
    minor_to_major=integers(order) or tuple(reversed(range(len(sizes)))),
    tile=integers(tile[1]) if tile else (),
    space=int(space[1]) if space else 0,
  )


def integers(text: str) -> tuple[int, ...]:
  """The integers in a text such as '8,<=128'."""
  return tuple(map(int, re.findall(r'\d+', text)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transfer:
  """An instruction that moves data, or does other work of a subclass.

  bytes, source: moved in one execution, and the operation's name in jax.
  times: executions per step.
  """

  bytes: float
  source: str
  times: int = 1
  in_loop: bool = False


_Transfer = TypeVar('_Transfer', bound=Transfer)


def transfers(module: Module, read: Callable[[Instruction], _Transfer | None]) -> list[_Transfer]:
  """All transfers of a program, including those in its loops, usual branches and calls.

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
      usual = min(map(within, instruction.called(*names)), key=total)
      yield from usual
    elif (one := read(instruction)) is not None:
      yield one
    elif instruction.opcode in ('call', 'fusion', 'async-start'):
      for computation in instruction.called('calls', 'to_apply'):
        yield from within(computation)

  return within(module.entry)


def total(found: Iterable[Transfer]) -> float:
  """Bytes per step."""
  return sum(t.bytes * t.times for t in found)


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
