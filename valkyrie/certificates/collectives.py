"""Bytes that a compiled program sends between chips, with its loops multiplied out.

Bytes are counted per chip and step for ring algorithms, which send the least possible; n is the
number of chips in a group:

  all-gather           (n-1)/n of its result
  reduce-scatter       (n-1)/n of its operand
  all-reduce           twice that: a reduce-scatter and an all-gather
  all-to-all           (n-1)/n of its operand
  collective-permute   its operand

An operation that is split into a start and a done counts once.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import math
import re

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective(hlo.Transfer):
  """An instruction whose `bytes` a chip sends.

  kind: one of `KINDS`.
  operand_bytes: bytes of a chip's operands.
  groups: partitions [groups, n]; for a permutation, its (source, target) pairs [pairs, 2].
  dimensions: number of network axes that the compiler's algorithm uses at once; None if unknown.
  """

  kind: str
  operand_bytes: int
  groups: np.ndarray
  dimensions: int | None = None

  @property
  def group_size(self) -> int:
    """n; for a permutation, 2."""
    return self.groups.shape[1]


def of_module(module: hlo.Module) -> list[Collective]:
  """All collectives. Of a conditional, the branch that sends least is the usual one."""
  return [one for one in hlo.transfers(module, functools.partial(_read, module)) if one.bytes]


def by_kind(collectives: Sequence[Collective], *, rare: bool = False) -> dict[str, int]:
  """The `hlo.total` of each kind of collective."""
  kinds = dict.fromkeys(c.kind for c in collectives if c.rare == rare)
  return {
    kind: round(hlo.total((c for c in collectives if c.kind == kind), rare=rare)) for kind in kinds
  }


def largest_in_loops(collectives: Sequence[Collective]) -> Collective | None:
  """The largest collective in a loop. If it has the size of a parameter, the layout is wrong."""
  return max((c for c in collectives if c.in_loop), key=lambda c: c.bytes, default=None)


def _read(
  module: hlo.Module, computation: hlo.Computation, instruction: hlo.Instruction
) -> Collective | None:
  kind = instruction.opcode.removesuffix('-start')
  if kind not in KINDS:
    return None
  operands = [computation.by_name[name] for name in instruction.operands]
  size = sum(array.bytes for operand in operands for array in operand.arrays)
  if kind == 'collective-permute':
    pairs = instruction.find(r'source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}')
    groups = np.asarray(re.findall(r'\{(\d+),(\d+)\}', pairs), int).reshape(-1, 2)
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
  dimensions = instruction.find(r'"(?:emitter|strategy)":"[^"]*?(\d)D')
  return Collective(
    kind=kind,
    operand_bytes=size,
    bytes=sent,
    groups=groups,
    source=instruction.op_name or instruction.name,
    dimensions=int(dimensions) if dimensions else None,
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
  places = np.arange(devices.size)
  first, n, stride = places, 1, devices.size  # first: the place of the first device of the group
  parts = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", axes)
  for name, size in sizes.items():
    for before, count in ((int(b or 1), int(c or size)) for own, b, c in parts if own == name):
      step = stride // (before * count)
      first = first - step * (places // step % count)
      n *= count
    stride //= size
  return devices[np.argsort(first, stable=True)].reshape(-1, n)
