"""Time of collectives on a torus, calculated by hand."""

import dataclasses
import types

import numpy as np
import pytest

from valkyrie.lab.certificates import collectives, topologies
from valkyrie.lab.certificates.collectives import Collective
from valkyrie.monitoring import chips

RATE = chips.TPUS['v4'].link_bytes_per_second
DCN = 3e9
SIZE = 9_000_000_000  # at 45 GB/s, 0.2 s over one link


def network(*sides, rings=None):
  """Partitions in the order of their coordinates, the last axis fastest."""
  places = np.stack(np.unravel_index(np.arange(np.prod(sides)), sides), axis=1)
  return collectives.Torus(places, rings or (False,) * len(sides), sides, DCN)


def collective(kind, groups, size=SIZE, dimensions=None):
  groups = np.asarray(groups)
  n = groups.shape[1]
  sent = {'all-gather': size * (n - 1), 'all-reduce': 2 * size * (n - 1) / n}.get(kind, size)
  return Collective(
    kind=kind,
    operand_bytes=size,
    bytes=sent,
    groups=groups,
    source='here',
    dimensions=dimensions,
  )


LINE = [[0, 1, 2, 3]]


@pytest.mark.parametrize(
  'collective, network, seconds',
  [
    # The end of a line receives everything over one link; every chip of a ring over two.
    (collective('all-gather', LINE), network(4), 0.6),
    (collective('all-gather', LINE), network(4, rings=(True,)), 0.3),
    # A part of a ring is a line.
    (collective('all-gather', LINE), network(8, rings=(True,)), 0.6),
    # Three axes at once, or as many as the algorithm uses.
    (collective('all-reduce', [range(32)]), network(4, 4, 2), 0.4 * 31 / 32 / 3),
    (collective('all-reduce', [range(32)], dimensions=1), network(4, 4, 2), 0.4 * 31 / 32),
    (collective('all-reduce', [range(64)]), network(4, 4, 4, rings=(True,) * 3), 0.4 * 63 / 64 / 6),
    # Each of four chips sends half of SIZE over the middle: SIZE over one link in each direction.
    (collective('all-to-all', LINE), network(4), 0.2),
    (collective('all-to-all', LINE), network(4, rings=(True,)), 0.1),
    # Messages to neighbors use different links, also one back along a line; jumps of two share one.
    (collective('collective-permute', [[0, 1], [1, 2], [2, 3]]), network(4), 0.2),
    (collective('collective-permute', [[0, 1], [1, 2], [2, 3], [3, 0]]), network(4), 0.2),
    (collective('collective-permute', [[0, 2], [1, 3]]), network(4), 0.4),
    (collective('collective-permute', [[3, 0]]), network(4, rings=(True,)), 0.2),
    (collective('all-reduce', [[0]]), network(1), 0.0),
  ],
)
def test_seconds(collective, network, seconds):
  assert collectives.seconds(collective, network, RATE) == pytest.approx(seconds)


def test_mesh_axes_of_collectives():
  mesh = types.SimpleNamespace(devices=np.arange(8).reshape(2, 4), axis_names=('rows', 'time'))
  along_time = collective('all-gather', [[0, 1, 2, 3], [4, 5, 6, 7]])
  along_rows = collective('all-reduce', [[0, 4], [1, 5], [2, 6], [3, 7]])
  halo = collective('collective-permute', [[0, 1], [1, 2], [2, 3], [4, 5]])
  everywhere = dataclasses.replace(collective('all-reduce', [range(8)]), times=3)
  assert collectives.mesh_axes(along_time, mesh) == ('time',)
  assert collectives.mesh_axes(along_rows, mesh) == ('rows',)
  assert collectives.mesh_axes(halo, mesh) == ('time',)
  between = dataclasses.replace(collective('all-reduce', [[0, 1]]), between_slices=True)
  spent = collectives.by_mesh_axes([halo, everywhere, between], mesh, network(2, 4), RATE)
  assert spent == pytest.approx({'time': 0.2, 'rows+time': 3 * 0.4 * 7 / 8 / 2, 'slice': 3.0})


@pytest.mark.parametrize(
  'chip, sides, rings',
  [
    ('v4', (4, 4, 2), (False, False, False)),
    ('v4', (4, 4, 4), (True, True, True)),
    ('v5p', (4, 8, 2), (False, False, False)),
    ('v5e', (8, 16), (False, True)),
    ('v6e', (16, 16), (True, True)),
  ],
)
def test_rings_of_slices(chip, sides, rings):
  assert topologies.wraps(chip, sides) == rings
