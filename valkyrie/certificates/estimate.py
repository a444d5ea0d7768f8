"""Estimated time of communication on a TPU slice. It is not a measurement.

The links have their full bandwidth, and nothing overlaps with other work.

A collective over several axes of a torus uses the links of all of them at once, in both directions
along a ring and in one direction along a line ("How to Scale Your Model",
jax-ml.github.io/scaling-book/sharding), or the links of fewer axes if the compiler reports an
algorithm with fewer dimensions. A permutation takes as long as its busiest link; each message takes
the shortest route, one axis after the other.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from jax.sharding import Mesh
import numpy as np

from valkyrie.certificates.collectives import Collective


class Torus(NamedTuple):
  """The network of a slice, and the positions of a program's partitions in it.

  places: coordinates of each partition's chip, [partitions, axes], in the order of the mesh.
  rings: whether each axis is a ring.
  sides: length of each axis, in chips.
  """

  places: np.ndarray
  rings: tuple[bool, ...]
  sides: tuple[int, ...]


def seconds(collective: Collective, network: Torus, link_bytes_per_second: float) -> float:
  """Time of one execution of a collective."""
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
    # Half of the bytes cross the middle of the longest axis, one half of them in each direction.
    longest = max(links, key=lambda axis: spans[axis] / links[axis])
    rate = 4 * links[longest] * link_bytes_per_second / spans[longest]
    return collective.operand_bytes / rate
  used = sorted(links.values(), reverse=True)[: collective.dimensions or len(links)]
  return collective.bytes / (sum(used) * link_bytes_per_second)


def mesh_axes(collective: Collective, mesh: Mesh) -> tuple[str, ...]:
  """The mesh axes that a collective crosses."""
  group = np.stack(np.unravel_index(collective.groups, mesh.devices.shape))  # [axes, groups, n]
  crossed = (group != group[..., :1]).any(axis=(1, 2))
  return tuple(name for name, is_one in zip(mesh.axis_names, crossed, strict=True) if is_one)


def by_mesh_axes(
  collectives: Sequence[Collective], mesh: Mesh, network: Torus, link_bytes_per_second: float
) -> dict[str, float]:
  """Seconds per step by the mesh axes crossed, e.g. {'x+y': 0.1}, without rare collectives."""
  spent: dict[str, float] = defaultdict(float)
  for collective in collectives:
    if not collective.rare:
      once = seconds(collective, network, link_bytes_per_second)
      spent['+'.join(mesh_axes(collective, mesh))] += collective.times * once
  return spent


def _busiest_link(pairs: np.ndarray, network: Torus) -> int:
  """The number of messages of a permutation on its busiest link."""
  load = Counter()
  for source, target in pairs:
    at = [int(place) for place in network.places[source]]
    for axis, goal in enumerate(int(place) for place in network.places[target]):
      side, ring = network.sides[axis], network.rings[axis]
      ahead = (goal - at[axis]) % side if ring else goal - at[axis]
      step = -1 if ahead < 0 or (ring and 2 * ahead > side) else 1
      while at[axis] != goal:
        load[(*at, axis, step)] += 1
        at[axis] = (at[axis] + step) % side if ring else at[axis] + step
  return max(load.values(), default=0)
