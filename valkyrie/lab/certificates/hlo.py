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

from valkyrie.models.attention.blocks import LARGER_BRANCH


class ArrayShape(NamedTuple):
  """`bf16[8,128]{1,0:T(8,128)(2,1)S(3)}`.

  bits: the bits of a value, here 16.
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
    minor_tiles = self.tile[::-1]
    for place, tile in enumerate(minor_tiles[: len(dims)]):
      tiles = -(-dims[place] // tile)  # rounded up
      dims[place] = tiles * tile
    return math.prod(dims) * self.bits // 8


Arrays = tuple[ArrayShape, ...]  # the arrays of a value, also those inside nested tuples


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
    match = re.search(pattern, self.attributes)
    if match is None:
      return ''
    return match.group(1)

  def called(self, *attributes: str) -> list['Computation']:
    """The computations of attributes such as body=%x or branch_computations={%a, %b}."""
    values = [self.find(rf'\b{name}=(\{{[^}}]*\}}|%?[\w.-]+)') for name in attributes]
    names = re.findall(r'[\w.-]+', ' '.join(values))
    return [self.computation.others[name] for name in names]

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
_BITS = {'pred': 8, 'token': 0, 'opaque': 0}  # other types say it in their names: f8e4m3fn


def parse(text: str) -> Module:
  """Parses the output of `as_text()`; raises a ValueError if the syntax of a line is unknown."""
  computations: dict[str, Computation] = {}
  entry = None
  for is_entry, name, body in _COMPUTATION.findall(text):
    # A line without indent continues the line before: the metadata of a Pallas kernel is JSON.
    lines = re.sub(r'\n(?=\S)', '', body).splitlines()
    computation = Computation(name, computations)
    computations[name] = computation
    for line in filter(str.strip, lines):
      _add(computation, line)
    if is_entry:
      entry = computation
  if entry is None:
    raise ValueError('The text has no ENTRY computation.')
  partitions = re.match(r'.*num_partitions=(\d+)', text)
  count = 1
  if partitions:
    count = int(partitions.group(1))
  return Module(entry, computations, count)


def _add(computation: Computation, line: str) -> None:
  """Adds the instruction of a line, whose operands stand above it."""
  match = _INSTRUCTION.fullmatch(line)
  if match is None:
    raise ValueError(f'Expected an instruction, found {line[:200]!r}.')
  is_root, name, shape, opcode, inside, attributes = match.groups()
  arrays = _ARRAY.findall(shape)
  if len(arrays) != shape.count('['):
    raise ValueError(f'Expected an instruction, found {line[:200]!r}.')
  operand_names = re.findall(r'%([\w.-]+)', inside)
  operands = [computation.instructions[operand] for operand in operand_names]
  array_shapes = [_array(*array) for array in arrays]
  instruction = Instruction(
    computation=computation,
    name=name,
    arrays=tuple(array_shapes),
    opcode=opcode,
    operands=operands,
    literal=inside,
    attributes=attributes or '',
  )
  computation.instructions[name] = instruction
  for operand in dict.fromkeys(operands):
    operand.users.append(instruction)
  if opcode == 'parameter':
    computation.parameters[int(inside)] = instruction
  if is_root:
    computation.root = instruction


@functools.cache
def _array(dtype: str, bits: str, dims: str, layout: str) -> ArrayShape:
  order, _, rest = layout[1:-1].partition(':')
  tile_match = re.match(r'T\(([\d,]+)\)', rest)
  tile = ()
  if tile_match:
    tile = integers(tile_match[1])
  space_match = re.search(r'S\((\d+)\)', rest)
  space = 0
  if space_match:
    space = int(space_match[1])
  sizes = integers(dims)
  row_major = tuple(reversed(range(len(sizes))))
  return ArrayShape(
    bits=int(bits or _BITS[dtype]),
    dims=sizes,
    minor_to_major=integers(order) or row_major,
    tile=tile,
    space=space,
  )


def integers(text: str) -> tuple[int, ...]:
  """The integers in a text such as '8,<=128'."""
  numbers = re.findall(r'\d+', text)
  return tuple(map(int, numbers))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transfer:
  """An instruction that moves data; a subclass may have other work, too.

  bytes: moved in one execution.
  source: the operation's name in jax.
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
  branch of a conditional that moves least is the usual one, but for those in a scope LARGER_BRANCH.
  A loop without a known trip count is counted once.
  """

  @functools.cache
  def in_computation(computation: Computation) -> list[_Transfer]:
    found = []
    for instruction in computation.instructions.values():
      found.extend(in_instruction(instruction))
    return found

  def in_instruction(instruction: Instruction) -> Iterator[_Transfer]:
    if instruction.opcode == 'while':
      yield from in_loop(instruction)
      return
    if instruction.opcode == 'conditional':
      names = ('branch_computations', 'true_computation', 'false_computation')
      branches = map(in_computation, instruction.called(*names))
      choose = max if instruction.op_name.endswith(_LARGER) else min
      yield from choose(branches, key=total)
      return
    transfer = read(instruction)
    if transfer is not None:
      yield transfer
    elif instruction.opcode in ('call', 'fusion', 'async-start'):
      for computation in instruction.called('calls', 'to_apply'):
        yield from in_computation(computation)

  def in_loop(loop: Instruction) -> Iterator[_Transfer]:
    trips = trip_count(loop)
    if trips is None:
      trips = 1
    for computation in loop.called('body', 'condition'):
      for transfer in in_computation(computation):
        times = transfer.times * trips
        yield dataclasses.replace(transfer, times=times, in_loop=True)

  return in_computation(module.entry)


def total(transfers: Iterable[Transfer]) -> float:
  """Bytes per step."""
  return sum(transfer.bytes * transfer.times for transfer in transfers)


_SAME_VALUE = (
  'copy', 'bitcast', 'convert', 'reshape', 'copy-done', 'copy-start', 'optimization-barrier',
)  # fmt: skip
_OPERATIONS = {
  'add': operator.add,
  'subtract': operator.sub,
  **{name: getattr(operator, name.lower()) for name in ('LT', 'LE', 'GT', 'GE', 'NE')},
}
_MOST_TRIPS = 10**6
_LARGER = f'{LARGER_BRANCH}/cond'


def trip_count(loop: Instruction) -> int | None:
  """The number of iterations of a `while`; None if the text does not show it.

  The compilers for CPUs and GPUs write it into the text. For a TPU the loop is executed, as far as
  its condition reads the carry.
  """
  known = loop.find(r'known_trip_count.{1,4}n":"(\d+)"')
  if known:
    return int(known)
  condition, body = loop.called('condition', 'body')
  carry = functools.partial(_evaluate, loop.operands[0], ())
  for trips in range(_MOST_TRIPS):
    goes_on = _evaluate(condition.root, (carry,))
    if goes_on is None:
      return None
    if not goes_on:
      return trips
    next_carry = functools.partial(_evaluate, body.root, (carry,))
    carry = functools.cache(next_carry)
  return None


def _evaluate(instruction: Instruction, arguments: Sequence[Callable[[], Any]]) -> Any:
  """A number, or the functions that return the elements of a tuple; None if it is unknown."""
  operands = []
  for operand in instruction.operands:
    evaluated = functools.partial(_evaluate, operand, arguments)
    operands.append(functools.cache(evaluated))
  opcode = instruction.opcode
  direction = instruction.find(r'direction=(\w\w)')
  operation = _OPERATIONS.get(direction or opcode)
  value = None
  if opcode in _SAME_VALUE:
    value = operands[0]()
  elif opcode == 'tuple':
    value = operands
  elif opcode == 'get-tuple-element':
    elements = operands[0]()
    if elements:
      index = int(instruction.find(r'index=(\d+)'))
      value = elements[index]()
  elif opcode == 'parameter' and arguments:
    number = int(instruction.literal)
    value = arguments[number]()
  elif opcode == 'fusion':
    (inner,) = instruction.called('calls')
    value = _evaluate(inner.root, operands)
  elif opcode == 'constant' and re.fullmatch(r'-?\d+', instruction.literal):
    value = int(instruction.literal)
  elif operation is not None:
    numbers = [operand() for operand in operands]
    if None not in numbers:
      value = operation(*numbers)
  return value
