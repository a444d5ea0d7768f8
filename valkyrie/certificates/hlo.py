"""Parser for the text of an optimized XLA program: computations, instructions, shapes, loops.

`jax.stages.Compiled.as_text()` is the only public form of the program. The parser knows the part of
its grammar that is necessary to follow data through loops and to count the iterations of a loop.
"""

from collections.abc import Iterator, Mapping
import functools
import math
import re
from typing import NamedTuple

# Bits of a value of the types without a size in their name. Tokens and opaque values have no bits.
_BITS = {'pred': 8, 'token': 0, 'opaque': 0}


class ArrayShape(NamedTuple):
  """`bf16[8,128]{1,0:T(8,128)(2,1)S(3)}`.

  dtype: element type.
  dims: sizes of the dimensions.
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
    for place, tile in enumerate(reversed(self.tile)):
      if place < len(dims):
        dims[place] = -(-dims[place] // tile) * tile
    return (math.prod(dims) if dims else 1) * _bits(self.dtype) // 8


Shape = ArrayShape | tuple['Shape', ...]


def arrays(shape: Shape) -> Iterator[ArrayShape]:
  """The arrays of a shape, including those inside tuples."""
  if isinstance(shape, ArrayShape):
    yield shape
  else:
    for part in shape:
      yield from arrays(part)


class Instruction(NamedTuple):
  """`%name = shape opcode(%operands), attributes`; `literal` is the text inside the brackets."""

  name: str
  shape: Shape
  opcode: str
  operands: tuple[str, ...]
  literal: str
  attributes: str
  is_root: bool

  def called(self, attribute: str) -> list[str]:
    """The computations of an attribute such as body=%x or branch_computations={%a, %b}."""
    found = re.search(rf'\b{attribute}=(\{{[^}}]*\}}|%?[\w.-]+)', self.attributes)
    return re.findall(r'[\w.-]+', found.group(1)) if found else []


class Computation:
  """A list of instructions, in execution order."""

  def __init__(self, name: str, instructions: list[Instruction]):
    self.name = name
    self.instructions = instructions
    self.by_name = {instruction.name: instruction for instruction in instructions}

  @functools.cached_property
  def root(self) -> Instruction:
    """The instruction whose value the computation returns."""
    return next(i for i in self.instructions if i.is_root)

  @functools.cached_property
  def parameters(self) -> dict[int, Instruction]:
    """The parameters by number."""
    return {int(i.literal): i for i in self.instructions if i.opcode == 'parameter'}

  @functools.cached_property
  def users(self) -> dict[str, list[Instruction]]:
    """The instructions that read a value, by the name of the value."""
    users: dict[str, list[Instruction]] = {}
    for instruction in self.instructions:
      for name in dict.fromkeys(instruction.operands):
        users.setdefault(name, []).append(instruction)
    return users


class Module(NamedTuple):
  """The program of one of `partitions` devices."""

  entry: Computation
  computations: Mapping[str, Computation]
  partitions: int


_HEADER = re.compile(r'(ENTRY )?%?([\w.-]+) \(.*\{$')
_INSTRUCTION = re.compile(r'\s+(ROOT )?%?([\w.-]+) = ')
_OPCODE = re.compile(r' ([a-z][\w-]*)\(')
_END = re.compile(r'\}(, execution_thread=.*)?$')
_ARRAY = re.compile(r'([a-z]\w*)\[([\d,<=]*)\](\{[^{}]*\})?')
_COMMENT = re.compile(r'/\*.*?\*/')


def parse(text: str) -> Module:
  """Parses the output of `as_text()`.

  Raises:
    ValueError: the syntax of a line is unknown.
  """
  computations: dict[str, Computation] = {}
  name, lines, entry = None, [], None
  for line in text.splitlines():
    if name is None:
      if header := _HEADER.match(line):
        name, lines = header.group(2), []
        entry = name if header.group(1) else entry
    elif _END.match(line):
      computations[name] = Computation(name, list(map(_instruction, lines)))
      name = None
    elif lines and line[:1].strip():  # the metadata of a Pallas kernel is JSON of several lines
      lines[-1] += line
    elif line.strip():
      lines.append(line)
  if entry is None:
    raise ValueError('The text has no ENTRY computation.')
  partitions = re.search(r'num_partitions=(\d+)', text[: text.index('\n')])
  return Module(computations[entry], computations, int(partitions.group(1)) if partitions else 1)


def _instruction(line: str) -> Instruction:
  head = _INSTRUCTION.match(line)
  if head is None:
    raise ValueError(f'Expected an instruction, found {line[:200]!r}.')
  shape, at = _shape(line, head.end())
  opcode = _OPCODE.match(line, at)
  if opcode is None:
    raise ValueError(f'Expected an opcode in {line[:200]!r}.')
  end = _closing(line, opcode.end() - 1)
  inside = line[opcode.end() : end]
  operands = tuple(re.findall(r'%([\w.-]+)', inside))
  return Instruction(
    head.group(2), shape, opcode.group(1), operands, inside, line[end + 1 :], bool(head.group(1))
  )


def _closing(line: str, at: int) -> int:
  """The index of the bracket that closes the one at `at`."""
  depth = 0
  for mark in re.compile(r'[(){}]|"(?:[^"\\]|\\.)*"').finditer(line, at):
    depth += {'(': 1, '{': 1, ')': -1, '}': -1}.get(mark.group(), 0)
    if depth == 0:
      return mark.start()
  raise ValueError(f'Expected a closing bracket in {line[:200]!r}.')


def _shape(line: str, at: int) -> tuple[Shape, int]:
  """The shape at index `at`, and the index after it."""
  if line[at] != '(':
    found = _ARRAY.match(line, at)
    if found is None:
      raise ValueError(f'Expected a shape, found {line[at : at + 80]!r}.')
    return _array(*found.groups()), found.end()
  parts: list[Shape] = []
  at += 1
  while line[at] != ')':
    comment = _COMMENT.match(line, at)
    if comment:
      at = comment.end()
    elif line[at] in ', ':
      at += 1
    else:
      part, at = _shape(line, at)
      parts.append(part)
  return tuple(parts), at + 1


@functools.cache
def _array(dtype: str, dims: str, layout: str | None) -> ArrayShape:
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


def branches(conditional: Instruction) -> list[str]:
  """The computations of the branches of a `conditional`."""
  either = conditional.called('true_computation') + conditional.called('false_computation')
  return conditional.called('branch_computations') or either


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
  """The number of iterations of a `while` of this computation; None if the text does not show it.

  XLA writes it on some platforms. Otherwise the loop must have a counter: its condition compares an
  element of the carry with a constant, and its body adds a constant to that element.
  """
  known = re.search(r'known_trip_count.{1,4}n":"(\d+)"', loop.attributes)
  if known:
    return int(known.group(1))
  (condition,), (body,) = loop.called('condition'), loop.called('body')
  test = _compared(module, module.computations[condition])
  if test is None:
    return None
  index, direction, limit = test
  start = _constant(_element(computation, loop.operands[0], index))
  step = _step(module, module.computations[body], index)
  if start is None or not step:
    return None
  distance = (limit - start) * (1 if step > 0 else -1)
  if direction in ('LE', 'GE'):
    distance += 1
  return max(0, -(-distance // abs(step)))


def _compared(module: Module, condition: Computation) -> tuple[int, str, int] | None:
  """(index of the carry's element, direction, constant) of the comparison of a condition."""
  root, inner, given = condition.root, condition, {}
  while root.opcode == 'fusion':  # some platforms wrap a single comparison
    (called,) = root.called('calls')
    given = {n: _follow(inner, name) for n, name in enumerate(root.operands)}
    inner = module.computations[called]
    root = inner.root
  direction = re.search(r'direction=(\w\w)', root.attributes)
  if root.opcode != 'compare' or direction is None or direction.group(1) not in _MIRRORED:
    return None
  sides = []
  for name in root.operands:
    side = _follow(inner, name)
    if side is not None and side.opcode == 'parameter' and given:
      side = given[int(side.literal)]
    sides.append(side)
  way = direction.group(1)
  for (counter, limit), said in ((sides, way), (sides[::-1], _MIRRORED[way])):
    constant = _constant(limit)
    if counter is not None and counter.opcode == 'get-tuple-element' and constant is not None:
      return _index(counter), said, constant
  return None


_MIRRORED = {'LT': 'GT', 'GT': 'LT', 'LE': 'GE', 'GE': 'LE', 'NE': 'NE'}
_SAME_VALUE = (
  'copy',
  'bitcast',
  'convert',
  'reshape',
  'copy-done',
  'copy-start',
  'optimization-barrier',
)


def _follow(computation: Computation, name: str) -> Instruction | None:
  """The value itself, or the value of which it is a copy."""
  found = computation.by_name.get(name)
  while found is not None and found.opcode in _SAME_VALUE and found.operands:
    found = computation.by_name.get(found.operands[0])
  return found


def _index(element: Instruction) -> int:
  found = re.search(r'index=(\d+)', element.attributes)
  assert found is not None, element
  return int(found.group(1))


def _element(computation: Computation, name: str, index: int) -> Instruction | None:
  """Element `index` of a tuple; None if the value is not a `tuple` instruction."""
  made = _follow(computation, name)
  if made is None or made.opcode != 'tuple':
    return None
  return _follow(computation, made.operands[index])


def _constant(value: Instruction | None) -> int | None:
  if value is not None and value.opcode == 'constant' and re.fullmatch(r'-?\d+', value.literal):
    return int(value.literal)
  return None


def _step(module: Module, body: Computation, index: int) -> int | None:
  """The constant that a body adds to element `index` of the carry; None if it does not."""
  after = _element(body, body.root.name, index)
  if after is None:
    return None
  if after.opcode == 'fusion':
    (called,) = after.called('calls')
    inner = module.computations[called]
    root = inner.root
    given = {
      parameter.name: _follow(body, after.operands[n]) for n, parameter in inner.parameters.items()
    }
  else:
    inner, root, given = body, after, {}
  if root.opcode not in ('add', 'subtract'):
    return None
  moved = None
  for name in root.operands:
    value = _follow(inner, name)
    value = given.get(value.name, value) if value is not None else None
    if (constant := _constant(value)) is not None:
      moved = constant if root.opcode == 'add' else -constant
    elif value is None or value.opcode != 'get-tuple-element' or _index(value) != index:
      return None
  return moved
