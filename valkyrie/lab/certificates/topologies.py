"""TPU slices by name, such as 'v4:4x4x2' and '2xv6e:8x8', and devices to compile for them.

`gpu_nodes` has GPUs by name, such as 'h100:8'.
"""

from collections.abc import Mapping, Sequence
import importlib.util
import itertools
import math
import os
import re
from typing import Any

import jax

from valkyrie import packages
from valkyrie.config.suggest import did_you_mean
from valkyrie.errors import ConfigurationError
from valkyrie.lab.certificates import gpu_nodes
from valkyrie.monitoring.chips import GPUS, TPUS

# The slices that Google offers, with their sides in ascending order: cloud.google.com/tpu/docs. The
# larger ones of v4 and v5p consist of whole cubes of 4 x 4 x 4 chips.
_CUBES = itertools.combinations_with_replacement(range(4, 33, 4), 3)
_WHOLE_CUBES = [shape for shape in _CUBES if math.prod(shape) <= 512]
_SHAPES: Mapping[int | None, Sequence[tuple[int, ...]]] = {  # by the axes of the network
  2: [(1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)],
  3: [(1, 2, 2), (2, 2, 2), (2, 2, 4), (2, 4, 4), *_WHOLE_CUBES],
}
_COUNTED_BY_CHIP = {'v4': 2, 'v5p': 2}  # cores, which names such as v4-64 count
_ENVIRONMENT = {
  'TPU_SKIP_MDS_QUERY': '1',  # do not ask the metadata server for the type of this machine
  'TPU_WORKER_HOSTNAMES': 'localhost',
  # The lock protects the chips of this machine, which a compilation does not use.
  'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
}


def parse(name: str) -> tuple[int, str, tuple[int, ...]]:
  """'v4:4x4x2' as (1, 'v4', (4, 4, 2)), and '2xv4:4x4x2', two such slices, as (2, ...).

  Raises a ConfigurationError if there is no such slice.
  """
  slices = 1
  one_slice = name
  count, _, rest = name.partition('x')
  if re.fullmatch(r'[1-9]\d{0,2}', count):
    slices = int(count)
    one_slice = rest
  chip, _, shape = one_slice.partition(':')
  by_size = re.fullmatch(r'(v\w+)-(\d{1,5})', chip)
  if by_size and by_size[1] in TPUS:
    family = by_size[1]
    chips = int(by_size[2]) // _COUNTED_BY_CHIP.get(family, 1)
    raise ConfigurationError(
      f'--topology={name}: the slice is named by its sides here. Use one of '
      f'{_listed(family, _nearest((chips,), _SHAPES[TPUS[family].axes]))}.'
    )
  if chip not in TPUS:
    raise ConfigurationError(
      f'--topology={name}: the chip {chip!r} is unknown. Use one of {", ".join(TPUS)}, as in '
      f'v4:4x4x2, or a GPU of {", ".join(GPUS)}, as in h100:8.'
      f'{did_you_mean(chip, [*TPUS, *GPUS])}'
    )
  shapes = _SHAPES[TPUS[chip].axes]
  if not re.fullmatch(r'\d{1,4}(x\d{1,4}){1,2}', shape):
    raise ConfigurationError(
      f'--topology={name}: the sides of the slice are missing or invalid. Write them as in '
      f'{_name(chip, shapes[2])}.'
    )
  sides = tuple(int(side) for side in shape.split('x'))
  if not _exists(sides, shapes):
    nearest = _listed(chip, _nearest(sides, shapes))
    raise ConfigurationError(
      f'--topology={name}: {chip} has no slice of this shape. Use one of the nearest: {nearest}'
    )
  return slices, chip, sides


def _listed(chip: str, shapes: Sequence[tuple[int, ...]]) -> str:
  described = []
  for shape in shapes:
    chips = math.prod(shape)
    described.append(f'{_name(chip, shape)} ({chips} chips)')
  return ', '.join(described)


def _exists(sides: tuple[int, ...], shapes: Sequence[tuple[int, ...]]) -> bool:
  """Whether there is such a slice; in three dimensions, the first two sides have to be even."""
  are_three = len(sides) == 3
  if are_three and (sides[0] % 2 or sides[1] % 2):
    return False
  return tuple(sorted(sides)) in shapes


def _nearest(sides: tuple[int, ...], shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
  """The three shapes whose numbers of chips differ from the asked one by the smallest factors."""
  chips = max(math.prod(sides), 1)
  log_chips = math.log(chips)

  def distance(shape):
    log_ratio = math.log(math.prod(shape)) - log_chips
    return abs(log_ratio)

  return sorted(shapes, key=distance)[:3]


def devices(name: str) -> Sequence[Any]:
  """The devices of slices or nodes, one per chip; raises as `parse`, or without their compiler."""
  nodes = gpu_nodes.named(name)
  if nodes is not None:
    return gpu_nodes.devices(name, nodes)
  slices, chip, sides = parse(name)
  if importlib.util.find_spec('libtpu') is None:
    raise ConfigurationError(
      f'--topology={name}: libtpu, the compiler for TPUs, is not installed. Install it, also on a '
      f'machine without TPUs: {packages.install("jax[tpu]")}'
    )
  for variable, value in _ENVIRONMENT.items():
    os.environ.setdefault(variable, value)
  chips = math.prod(sides)
  cores = 1
  options = {}
  if TPUS[chip].axes == 3:  # v4 and v5p chips have two cores, which form one device
    cores = 2
    options['chip_config_name'] = 'megacore'
  os.environ.setdefault('TPU_ACCELERATOR_TYPE', f'{chip}-{cores * chips}')
  # Otherwise the first computation would make JAX search for chips on this machine.
  jax.config.update('jax_platforms', 'cpu')
  from jax.experimental import topologies  # noqa: PLC0415, after the variables that it reads

  chips_of_host = (2, 2, 1)
  if chips == 1:
    chips_of_host = (1, 1, 1)
  topology = topologies.get_topology_desc(
    platform='tpu',
    topology_name=f'{chip}:{_joined(sides)}',
    num_slices=slices,
    chips_per_host_bounds=chips_of_host,
    **options,
  )
  return topology.devices


def wraps(chip: str, sides: Sequence[int]) -> tuple[bool, ...]:
  """Whether each axis of a slice is a ring, with a link from its end to its beginning.

  A v4 or v5p slice consists of cubes of 4 x 4 x 4 chips whose faces are connected by optical
  switches. It is a torus if every side is a multiple of 4; otherwise, as for 4 x 4 x 2, no axis is
  a ring. An axis of v5e and v6e is a ring only if it spans a whole side of a pod, 16 chips.
  (cloud.google.com/tpu/docs/v4; jax-ml.github.io/scaling-book/tpus; MaxText's
  accelerator_to_spec_map.)
  """
  if TPUS[chip].axes == 3:
    is_torus = all(side % 4 == 0 for side in sides)
    return (is_torus,) * len(sides)
  return tuple(side == 16 for side in sides)


def _name(chip: str, shape: Sequence[int]) -> str:
  longest_first = sorted(shape, reverse=True)
  return f'{chip}:{_joined(longest_first)}'


def _joined(sides: Sequence[int]) -> str:
  """'4x4x2'."""
  return 'x'.join(map(str, sides))
