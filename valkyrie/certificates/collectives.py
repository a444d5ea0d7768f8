"""Bytes that a compiled program sends between chips, with its loops multiplied out.

Bytes are counted per chip and step for ring algorithms, which send the least possible; n is the
number of chips in a group:

  all-gather           (n-1)/n of its result
  reduce-scatter       (n-1)/n of its operand
  all-reduce           twice that: a reduce-scatter and an all-gather
  all-to-all           (n-1)/n of its operand
  collective-permute   its operand

An operation that is split into a start and a done counts once. Of the branches of a conditional,
the one that sends least counts as the usual one. The collectives of the others are marked as rare.
"""

from collections.abc import Iterator, Mapping, Sequence
import math
import re
from typing import NamedTuple

import numpy as np

from valkyrie.certificates import hlo

KINDS = (
  'all-gather',
  'all-reduce',
  'reduce-scatter',
  'all-to-all',
  'collective-permute',
  'collective-broadcast',
  'ragged-all-to-all',
)
_ORDER = r'\[([\d,]+)\](?:T\(([\d,]+)\))?'  # `[2,2,8]T(1,0,2)`: reshape and transpose


class Collective(NamedTuple):
  """An instruction that sends data.

  kind: one of `KINDS`.
  operand_bytes: bytes of a chip's operands.
  bytes: bytes that a chip sends in one execution.
  times: executions per step.
  in_loop: whether it is inside a loop.
  rare: whether it is in a branch that is not the usual one.
  groups: partitions [groups, n]; for a permutation, its (source, target) pairs [pairs, 2].
  source: the operation's name in jax.
  dimensions: number of network axes that the compiler's algorithm uses at once; None if unknown.
  """

  kind: str
  operand_bytes: int
  bytes: float
  times: int
  in_loop: bool
  rare: bool
  groups: np.ndarray
  source: str
  dimensions: int | None = None

  @property
  def group_size(self) -> int:
    """n; for a permutation, 2."""
    return self.groups.shape[1]


def of_module(module: hlo.Module) -> list[Collective]:
  """All collectives of a program, including those in its loops and branches."""
  found: dict[str, list[Collective]] = {}

  def within(computation: hlo.Computation) -> list[Collective]:
    if computation.name not in found:
      found[computation.name] = [
        collective
        for instruction in computation.instructions
        for collective in of_instruction(computation, instruction)
      ]
    return found[computation.name]

  def of_instruction(
    computation: hlo.Computation, instruction: hlo.Instruction
  ) -> Iterator[Collective]:
    if instruction.opcode == 'while':
      times = hlo.trip_count(module, computation, instruction)
      for name in instruction.called('body') + instruction.called('condition'):
        for collective in within(module.computations[name]):
          repeated = collective.times * (1 if times is None else times)
          yield collective._replace(times=repeated, in_loop=True)
    elif instruction.opcode == 'conditional':
      branches = [within(module.computations[name]) for name in hlo.branches(instruction)]
      usual = min(range(len(branches)), key=lambda number: total(branches[number]))
      for number, branch in enumerate(branches):
        for collective in branch:
          yield collective if number == usual else collective._replace(rare=True)
    elif instruction.opcode.removesuffix('-start') in KINDS:
      yield _read(module, computation, instruction)
    elif instruction.opcode in ('call', 'fusion', 'async-start'):
      for name in instruction.called('calls') + instruction.called('to_apply'):
        yield from within(module.computations[name])

  return [collective for collective in within(module.entry) if collective.bytes]


def total(collectives: Sequence[Collective], *, rare: bool = False) -> float:
  """Bytes that a chip sends per step in the usual branches, or with `rare` in the other ones."""
  return sum(c.bytes * c.times for c in collectives if c.rare == rare)


def by_kind(collectives: Sequence[Collective], *, rare: bool = False) -> dict[str, int]:
  """The `total` of each kind of collective."""
  kinds = dict.fromkeys(c.kind for c in collectives if c.rare == rare)
  return {
    kind: round(total([c for c in collectives if c.kind == kind], rare=rare)) for kind in kinds
  }


def largest_in_loops(collectives: Sequence[Collective]) -> Collective | None:
  """The largest collective in a loop. If it has the size of a parameter, the layout is wrong."""
  inside = [c for c in collectives if c.in_loop]
  return max(inside, key=lambda c: c.bytes, default=None)


def _read(
  module: hlo.Module, computation: hlo.Computation, instruction: hlo.Instruction
) -> Collective:
  kind = instruction.opcode.removesuffix('-start')
  size = sum(
    array.bytes
    for name in instruction.operands
    for array in hlo.arrays(computation.by_name[name].shape)
  )
  if kind == 'collective-permute':
    pairs = re.search(r'source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}', instruction.attributes)
    numbers = re.findall(r'\{(\d+),(\d+)\}', pairs.group(1)) if pairs else []
    groups = np.asarray(numbers, int).reshape(-1, 2)
    moves = any(source != target for source, target in groups)
    sent = float(size if moves else 0)
  else:
    groups = replica_groups(instruction.attributes, module.partitions)
    n = groups.shape[1]
    if kind == 'all-gather':
      sent = float(size * (n - 1))
    elif kind == 'all-reduce' and computation.name.startswith('all-reduce-scatter'):
      # On TPUs a reduce-scatter is a fusion of this name: an all-reduce and a slice of its result.
      kind, sent = 'reduce-scatter', size * (n - 1) / n
    elif kind == 'collective-broadcast':
      sent = float(size if n > 1 else 0)
    else:
      sent = (2 if kind == 'all-reduce' else 1) * size * (n - 1) / n
  source = re.search(r'op_name="([^"]*)"', instruction.attributes)
  algorithm = re.search(r'"(?:emitter|strategy)":"[^"]*?(\d)D', instruction.attributes)
  return Collective(
    kind,
    operand_bytes=size,
    bytes=sent,
    times=1,
    in_loop=False,
    rare=False,
    groups=groups,
    source=source.group(1) if source else instruction.name,
    dimensions=int(algorithm.group(1)) if algorithm else None,
  )


def replica_groups(attributes: str, partitions: int) -> np.ndarray:
  """The groups of partitions that communicate, [groups, n], from any of their notations.

  `{{0,1},{2,3}}` is a list, and `{}` is one group of all partitions. `[2,2]<=[2,2]T(1,0)` is the
  numbers in order, reshaped, transposed and reshaped. In `mesh['x'=2,'y'=2],
  device_ids=([2,2]T(1,0)) {'y'}`, a group has the partitions, in this order on the mesh, that
  differ only along the named axes.

  Raises:
    ValueError: the notation is unknown.
  """
  text = attributes.partition('replica_groups=')[2]
  if listed := re.match(r'\{((?:\{[\d,]*\},?)*)\}', text):
    rows = [row.split(',') for row in re.findall(r'\{([\d,]+)\}', listed.group(1))]
    return np.asarray(rows or [range(partitions)], int)
  if iota := re.match(rf'\[([\d,]+)\]<={_ORDER}', text):
    sizes, dims, order = iota.groups()
    return _in_order(dims, order).reshape(_integers(sizes))
  mesh = re.match(rf'mesh\[([^\]]*)\](?:, *device_ids=\({_ORDER}\))? *\{{([^}}]*)\}}', text)
  if mesh is None:
    raise ValueError(f'The notation of the replica groups is unknown: {text[:120]!r}.')
  axes, dims, order, over = mesh.groups()
  sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", axes)}
  return _over_axes(_in_order(dims or str(math.prod(sizes.values())), order), sizes, over)


def _integers(text: str) -> list[int]:
  return [int(number) for number in text.split(',')]


def _in_order(dims: str, order: str | None) -> np.ndarray:
  """The numbers from 0 on, reshaped, transposed if `order` is given, and flattened."""
  numbers = np.arange(math.prod(_integers(dims))).reshape(_integers(dims))
  return (numbers.transpose(_integers(order)) if order else numbers).reshape(-1)


def _over_axes(devices: np.ndarray, sizes: Mapping[str, int], axes: str) -> np.ndarray:
  """Groups over axes such as `'x','y':(2)4`: all of x, and the factor 4 of y after a factor 2."""
  shape, taken = [], []
  parts = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", axes)
  for name, size in sizes.items():
    cuts = sorted(
      (int(before or 1), int(count or size)) for own, before, count in parts if own == name
    )
    at = 1
    for before, count in cuts:
      shape += [before // at, count]
      taken += [False, True]
      at = before * count
    shape.append(size // at)
    taken.append(False)
  grid = devices.reshape(shape)
  order = [i for i, own in enumerate(taken) if not own] + [i for i, own in enumerate(taken) if own]
  size = math.prod(s for s, own in zip(shape, taken, strict=True) if own)
  return grid.transpose(order).reshape(-1, size)
