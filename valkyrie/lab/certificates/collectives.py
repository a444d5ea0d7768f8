"""Bytes that a compiled program sends between chips, and the time that this takes on a TPU slice.

Loops are multiplied out. Bytes are counted per chip and step for ring algorithms, which send the
least possible; n is the number of chips in a group:

  all-gather           (n-1)/n of its result
  reduce-scatter       (n-1)/n of its operand
  all-reduce           twice that: a reduce-scatter and an all-gather
  all-to-all           (n-1)/n of its operand
  collective-permute   its operand

An operation that is split into a start and a done is counted once. What crosses slices, libtpu
divides into collectives within each slice and one between chips at the same place in each, a `send`
to its host; n is then the number of slices.

The time is an estimate, not a measurement: links have their full bandwidth, and nothing overlaps
with other work. A collective over several axes of a torus uses the links of all these axes at once,
in both directions along a ring and in one direction along a line ("How to Scale Your Model",
jax-ml.github.io/scaling-book/sharding), or the links of fewer axes if the compiler reports an
algorithm with fewer dimensions. A permutation takes as long as its busiest link; each message takes
the shortest route, one axis after the other.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
import dataclasses
import functools
import math
import re
from typing import NamedTuple

from jax.sharding import Mesh
import numpy as np

from valkyrie.lab.certificates import hlo
from valkyrie.sharding.mesh import SLICE

KINDS = (
  'all-gather', 'all-reduce', 'reduce-scatter', 'all-to-all', 'collective-permute',
  'collective-broadcast', 'ragged-all-to-all',
)  # fmt: skip
_ORDER = r'\[([\d,]+)\](?:T\(([\d,]+)\))?'  # `[2,2,8]T(1,0,2)`: reshape and transpose


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective(hlo.Transfer):
  """An instruction whose `bytes` a chip sends.

  kind: one of `KINDS`.
  operand_bytes: bytes of a chip's operands.
  groups: partitions [groups, n]; for a permutation, its (source, target) pairs [pairs, 2].
  dimensions: number of network axes that the compiler's algorithm uses at once; None if unknown.
  between_slices: whether the chips have the same place in the slices, which the groups then number.
  """

  kind: str
  operand_bytes: int
  groups: np.ndarray
  dimensions: int | None = None
  between_slices: bool = False


def of_module(module: hlo.Module) -> list[Collective]:
  """All collectives; a conditional takes the branch that sends least."""
  read = functools.partial(_read, partitions=module.partitions)
  return [one for one in hlo.transfers(module, read) if one.bytes]


def by_kind(collectives: Sequence[Collective]) -> dict[str, int]:
  """The `hlo.total` of each kind of collective."""
  kinds = dict.fromkeys(c.kind for c in collectives)
  return {kind: round(hlo.total(c for c in collectives if c.kind == kind)) for kind in kinds}


def largest_in_loops(collectives: Sequence[Collective]) -> Collective | None:
  """The largest collective in a loop. If it has the size of a parameter, the layout is wrong."""
  return max((c for c in collectives if c.in_loop), key=lambda c: c.bytes, default=None)


class Torus(NamedTuple):
  """The network of a slice, and the positions of a program's partitions in it.

  places: coordinates of each partition's chip, [partitions, axes], in the order of the mesh.
  rings: whether each axis is a ring.
  sides: length of each axis, in chips.
  dcn_bytes_per_second: what a chip sends over the data-center network, which joins slices.
  """

  places: np.ndarray
  rings: tuple[bool, ...]
  sides: tuple[int, ...]
  dcn_bytes_per_second: float


def seconds(collective: Collective, network: Torus, link_bytes_per_second: float) -> float:
  """Seconds of one execution of a collective."""
  if collective.between_slices:
    return collective.bytes / network.dcn_bytes_per_second
  if collective.kind == 'collective-permute':
    load = _busiest_link(collective.groups, network)
    return load * collective.operand_bytes / link_bytes_per_second
  group = network.places[collective.groups[0]]
  spans = [len(set(along)) for along in group.T]
  links = {
    axis: 2 if network.rings[axis] and span == network.sides[axis] else 1
    for axis, span in enumerate(spans)
    if span > 1
  }
  if not links:
    return 0.0
  if collective.kind.endswith('all-to-all'):
    # Half of the bytes cross the middle of the longest axis, a quarter in each direction.
    longest = max(links, key=lambda axis: spans[axis] / links[axis])
    rate = 4 * links[longest] * link_bytes_per_second / spans[longest]
    return collective.operand_bytes / rate
  used = sorted(links.values(), reverse=True)[: collective.dimensions or len(links)]
  return collective.bytes / (sum(used) * link_bytes_per_second)


def mesh_axes(collective: Collective, mesh: Mesh) -> tuple[str, ...]:
  """The mesh axes that a collective crosses."""
  if collective.between_slices:
    return (SLICE,)
  group = np.stack(np.unravel_index(collective.groups, mesh.devices.shape))  # [axes, groups, n]
  crossed = (group != group[..., :1]).any(axis=(1, 2))
  return tuple(name for name, is_one in zip(mesh.axis_names, crossed, strict=True) if is_one)


def by_mesh_axes(
  collectives: Sequence[Collective], mesh: Mesh, network: Torus, link_bytes_per_second: float
) -> dict[str, float]:
  """Seconds per step by the mesh axes crossed, e.g. {'x+y': 0.1}."""
  spent: dict[str, float] = defaultdict(float)
  for collective in collectives:
    once = seconds(collective, network, link_bytes_per_second)
    spent['+'.join(mesh_axes(collective, mesh))] += collective.times * once
  return spent


def _busiest_link(pairs: np.ndarray, network: Torus) -> int:
  """The number of messages of a permutation on its busiest link."""
  load = Counter()
  for source, target in pairs:
    at = [int(place) for place in network.places[source]]
    for axis, goal in enumerate(int(place) for place in network.places[target]):
      side = network.sides[axis]
      ring = network.rings[axis]
      ahead = (goal - at[axis]) % side if ring else goal - at[axis]
      step = -1 if ahead < 0 or (ring and 2 * ahead > side) else 1
      while at[axis] != goal:
        load[(*at, axis, step)] += 1
        at[axis] = (at[axis] + step) % side if ring else at[axis] + step
  return max(load.values(), default=0)


def _read(instruction: hlo.Instruction, partitions: int) -> Collective | None:
  kind = instruction.opcode.removesuffix('-start')
  between = kind == 'send' and instruction.find(r'_xla_megascale_transfer_type="(\w+)"')
  if kind not in KINDS and not between:
    return None
  size = sum(array.bytes for operand in instruction.operands for array in operand.arrays)
  if between:
    kind = between.lower().replace('_', '-')
    slices = instruction.find(r'_xla_megascale_target="?\{+([\d,]+)\}') or '0,1'  # a permutation
    groups = np.arange(len(slices.split(',')))[None]
  elif kind == 'collective-permute':
    pairs = instruction.find(r'source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}')
    groups = np.asarray(re.findall(r'\{(\d+),(\d+)\}', pairs), int).reshape(-1, 2)
  else:
    groups = replica_groups(instruction.attributes, partitions)
  if kind == 'all-reduce' and instruction.computation.name.startswith('all-reduce-scatter'):
    # On TPUs a reduce-scatter is a fusion of this name: an all-reduce and a slice of its result.
    kind = 'reduce-scatter'
  n = groups.shape[1]
  sent = {
    'all-gather': size * (n - 1),
    'all-reduce': 2 * size * (n - 1) / n,
    'collective-broadcast': size * (n > 1),
    'collective-permute': size * np.ptp(groups, axis=1).any(),  # unless none leaves its chip
    'one-to-one': size,
  }
  dimensions = instruction.find(r'"(?:emitter|strategy)":"[^"]*?(\d)D')
  return Collective(
    kind=f'{kind} between slices' if between else kind,
    operand_bytes=size,
    bytes=float(sent.get(kind, size * (n - 1) / n)),
    groups=groups,
    source=instruction.op_name or instruction.name,
    dimensions=int(dimensions) if dimensions else None,
    between_slices=bool(between),
  )


def replica_groups(attributes: str, partitions: int) -> np.ndarray:
  """The groups of partitions that communicate, [groups, n], from any of their notations.

  `{{0,1},{2,3}}` is a list, and `{}` is one group of all partitions. `[2,2]<=[2,2]T(1,0)` is the
  numbers in order, reshaped, transposed and reshaped. In `mesh['x'=2,'y'=2],
  device_ids=([2,2]T(1,0)) {'y'}`, a group has the partitions, in this order on the mesh, that
  differ only along the named axes. For another notation a ValueError is raised.
  """
  text = attributes.partition('replica_groups=')[2]
  if listed := re.match(r'\{((?:\{[\d,]*\},?)*)\}', text):
    rows = [row.split(',') for row in re.findall(r'\{([\d,]+)\}', listed.group(1))]
    return np.asarray(rows or [range(partitions)], int)
  if iota := re.match(rf'\[([\d,]+)\]<={_ORDER}', text):
    sizes, dims, order = iota.groups()
    return _in_order(dims, order).reshape(hlo.integers(sizes))
  mesh = re.match(rf'mesh\[([^\]]*)\](?:, *device_ids=\({_ORDER}\))? *\{{([^}}]*)\}}', text)
  if mesh is None:
    raise ValueError(f'The notation of the replica groups is unknown: {text[:120]!r}.')
  axes, dims, order, over = mesh.groups()
  sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", axes)}
  return _over_axes(_in_order(dims or str(math.prod(sizes.values())), order), sizes, over)


def _in_order(dims: str, order: str | None) -> np.ndarray:
  """The numbers from 0 on, reshaped, transposed if `order` is given, and flattened."""
  numbers = np.arange(math.prod(hlo.integers(dims))).reshape(hlo.integers(dims))
  return (numbers.transpose(hlo.integers(order)) if order else numbers).reshape(-1)


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
