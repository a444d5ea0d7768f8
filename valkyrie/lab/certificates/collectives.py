"""Bytes that a compiled program sends between chips, and the time that this takes on a TPU slice.

Loops are multiplied out. Bytes are counted per chip and step for ring algorithms, which send the
least possible; n is the number of chips in a group:

  all-gather           (n-1)/n of its result
  reduce-scatter       (n-1)/n of its operand
  all-reduce           twice that: a reduce-scatter and an all-gather
  all-to-all           (n-1)/n of its operand
  collective-permute   its operand

An operation that is split into a start and a done is counted once. libtpu divides a collective that
crosses slices into collectives within each slice, and one between the chips at the same place of
each slice: a `send` to their hosts. Its n is the number of slices.

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
import itertools
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
_SLICES = r'_xla_megascale_target="?\{+([\d,]+)\}'


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


def list_collectives(module: hlo.Module) -> list[Collective]:
  """All collectives; a conditional takes the branch that sends least."""
  read = functools.partial(_read, partitions=module.partitions)
  collectives = hlo.transfers(module, read)
  return [collective for collective in collectives if collective.bytes]


def by_kind(collectives: Sequence[Collective]) -> dict[str, int]:
  """The bytes per step of each kind of collective."""
  sums: dict[str, float] = defaultdict(float)
  for collective in collectives:
    sums[collective.kind] += collective.bytes * collective.times
  return {kind: round(total) for kind, total in sums.items()}


def largest_in_loops(collectives: Sequence[Collective]) -> Collective | None:
  """The largest collective in a loop. If it has the size of a parameter, the layout is wrong."""
  in_loops = [collective for collective in collectives if collective.in_loop]
  return max(in_loops, key=lambda collective: collective.bytes, default=None)


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
  links = {}  # of a chip along each axis that the group crosses
  for axis, span in enumerate(spans):
    if span > 1:
      is_whole_ring = network.rings[axis] and span == network.sides[axis]
      links[axis] = 2 if is_whole_ring else 1
  if not links:
    return 0.0
  if collective.kind.endswith('all-to-all'):
    # Half of the bytes cross the middle of the longest axis, a quarter in each direction.
    longest = max(links, key=lambda axis: spans[axis] / links[axis])
    axis_bytes_per_second = links[longest] * link_bytes_per_second
    rate = 4 * axis_bytes_per_second / spans[longest]
    return collective.operand_bytes / rate
  most_first = sorted(links.values(), reverse=True)
  dimensions = collective.dimensions or len(links)
  used = most_first[:dimensions]
  bytes_per_second = sum(used) * link_bytes_per_second
  return collective.bytes / bytes_per_second


def mesh_axes(collective: Collective, mesh: Mesh) -> tuple[str, ...]:
  """The mesh axes that a collective crosses."""
  if collective.between_slices:
    return (SLICE,)
  places = np.stack(np.unravel_index(collective.groups, mesh.devices.shape))  # [axes, groups, n]
  differs = places != places[..., :1]
  crossed = differs.any(axis=(1, 2))
  return tuple(itertools.compress(mesh.axis_names, crossed))


def by_mesh_axes(
  collectives: Sequence[Collective],
  mesh: Mesh,
  network: Torus,
  link_bytes_per_second: float,
) -> dict[str, float]:
  """Seconds per step by the mesh axes crossed, e.g. {'x+y': 0.1}."""
  sums: dict[str, float] = defaultdict(float)
  for collective in collectives:
    once = seconds(collective, network, link_bytes_per_second)
    axes = '+'.join(mesh_axes(collective, mesh))
    sums[axes] += collective.times * once
  return sums


def _busiest_link(pairs: np.ndarray, network: Torus) -> int:
  """The number of messages of a permutation on its busiest link."""
  load = Counter()
  for source, target in pairs:
    place = network.places[source].tolist()
    goals = network.places[target].tolist()
    for axis, goal in enumerate(goals):
      step = _step_toward(goal, place[axis], axis, network)
      while place[axis] != goal:
        link = (*place, axis, step)
        load[link] += 1
        place[axis] += step
        if network.rings[axis]:
          place[axis] %= network.sides[axis]
  return max(load.values(), default=0)


def _step_toward(goal: int, place: int, axis: int, network: Torus) -> int:
  """1 or -1: the direction of the shortest route along an axis."""
  distance = goal - place
  if network.rings[axis]:
    side = network.sides[axis]
    distance %= side
    if 2 * distance > side:
      return -1
  if distance < 0:
    return -1
  return 1


def _read(instruction: hlo.Instruction, partitions: int) -> Collective | None:
  kind = instruction.opcode.removesuffix('-start')
  if kind == 'send':
    return _read_send(instruction)
  if kind not in KINDS:
    return None
  if kind == 'collective-permute':
    groups = _permuted_pairs(instruction)
  else:
    groups = replica_groups(instruction.attributes, partitions)
  is_fused_scatter = instruction.computation.name.startswith('all-reduce-scatter')
  if kind == 'all-reduce' and is_fused_scatter:
    # On TPUs a reduce-scatter is a fusion of this name: an all-reduce and a slice of its result.
    kind = 'reduce-scatter'
  found = instruction.find(r'"(?:emitter|strategy)":"[^"]*?(\d)D')
  dimensions = None
  if found:
    dimensions = int(found)
  size = _operand_bytes(instruction)
  return Collective(
    kind=kind,
    operand_bytes=size,
    bytes=_sent_bytes(kind, size, groups),
    groups=groups,
    source=instruction.op_name or instruction.name,
    dimensions=dimensions,
  )


def _read_send(instruction: hlo.Instruction) -> Collective | None:
  """The collective between slices that a `send` to a host starts; None for another `send`."""
  transfer_type = instruction.find(r'_xla_megascale_transfer_type="(\w+)"')
  if not transfer_type:
    return None
  kind = transfer_type.lower().replace('_', '-')
  slices = instruction.find(_SLICES) or '0,1'  # a permutation names none
  count = len(slices.split(','))
  groups = np.arange(count)[None]
  size = _operand_bytes(instruction)
  return Collective(
    kind=f'{kind} between slices',
    operand_bytes=size,
    bytes=_sent_bytes(kind, size, groups),
    groups=groups,
    source=instruction.op_name or instruction.name,
    between_slices=True,
  )


def _operand_bytes(instruction: hlo.Instruction) -> int:
  total = 0
  for operand in instruction.operands:
    for array in operand.arrays:
      total += array.bytes
  return total


def _permuted_pairs(instruction: hlo.Instruction) -> np.ndarray:
  """The (source, target) pairs of a permutation, [pairs, 2]."""
  text = instruction.find(r'source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}')
  pairs = re.findall(r'\{(\d+),(\d+)\}', text)
  return np.asarray(pairs, int).reshape(-1, 2)


def _sent_bytes(kind: str, size: int, groups: np.ndarray) -> float:
  """The bytes that a chip sends for operands of `size` bytes; see the module's docstring."""
  n = groups.shape[1]
  match kind:
    case 'all-gather':
      sent = size * (n - 1)
    case 'all-reduce':
      sent = 2 * size * (n - 1) / n
    case 'collective-broadcast':
      sent = size * (n > 1)
    case 'collective-permute':
      leaves_its_chip = np.ptp(groups, axis=1) > 0
      sent = size * leaves_its_chip.any()
    case 'one-to-one':
      sent = size
    case _:
      sent = size * (n - 1) / n
  return float(sent)


def replica_groups(attributes: str, partitions: int) -> np.ndarray:
  """The groups of partitions that communicate, [groups, n], from any of their notations.

  `{{0,1},{2,3}}` is a list, and `{}` is one group of all partitions. `[2,2]<=[2,2]T(1,0)` is the
  numbers in order, reshaped, transposed and reshaped. In `mesh['x'=2,'y'=2],
  device_ids=([2,2]T(1,0)) {'y'}`, a group has the partitions, in this order on the mesh, that
  differ only along the named axes. For another notation a ValueError is raised.
  """
  _, _, text = attributes.partition('replica_groups=')
  listed = re.match(r'\{((?:\{[\d,]*\},?)*)\}', text)
  if listed:
    rows = re.findall(r'\{([\d,]+)\}', listed.group(1))
    groups: list[Sequence[int]] = [hlo.integers(row) for row in rows]
    if not groups:
      groups = [range(partitions)]
    return np.asarray(groups, int)
  iota = re.match(rf'\[([\d,]+)\]<={_ORDER}', text)
  if iota:
    sizes, dims, order = iota.groups()
    numbers = _in_order(hlo.integers(dims), order)
    return numbers.reshape(hlo.integers(sizes))
  mesh = re.match(rf'mesh\[([^\]]*)\](?:, *device_ids=\({_ORDER}\))? *\{{([^}}]*)\}}', text)
  if mesh is None:
    raise ValueError(f'The notation of the replica groups is unknown: {text[:120]!r}.')
  axes, dims, order, group_axes = mesh.groups()
  named_sizes = re.findall(r"'([^']+)'=(\d+)", axes)
  sizes = {name: int(size) for name, size in named_sizes}
  shape = tuple(sizes.values())
  if dims:
    shape = hlo.integers(dims)
  numbers = _in_order(shape, order)
  return _groups_over_axes(numbers, sizes, group_axes)


def _in_order(shape: tuple[int, ...], order: str | None) -> np.ndarray:
  """The numbers from 0 on, reshaped, transposed if `order` is given, and flattened."""
  count = math.prod(shape)
  numbers = np.arange(count).reshape(shape)
  if order:
    numbers = numbers.transpose(hlo.integers(order))
  return numbers.reshape(-1)


def _groups_over_axes(devices: np.ndarray, sizes: Mapping[str, int], axes: str) -> np.ndarray:
  """Groups over axes such as `'x','y':(2)4`: all of x, and the factor 4 of y after a factor 2."""
  places = np.arange(devices.size)
  first = places  # the place of the first device of the group
  n = 1
  parts = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", axes)
  stride = devices.size
  for name, size in sizes.items():
    for part_name, factor_before, factor in parts:
      if part_name == name:
        count = int(factor or size)
        before = int(factor_before or 1)
        step = stride // (before * count)
        index = places // step % count
        first = first - step * index
        n *= count
    stride //= size
  by_group = np.argsort(first, stable=True)
  return devices[by_group].reshape(-1, n)
