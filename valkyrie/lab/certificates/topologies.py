"""TPU slices by name, such as 'v4:4x4x2' and '2xv6e:8x8', and devices to compile for them."""

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
from valkyrie.monitoring.chips import TPUS

# The slices that Google offers, with their sides in ascending order: cloud.google.com/tpu/docs. The
# larger ones of v4 and v5p consist of whole cubes of 4 x 4 x 4 chips.
_CUBES = itertools.combinations_with_replacement(range(4, 33, 4), 3)
_SHAPES: Mapping[int | None, Sequence[tuple[int, ...]]] = {  # by the axes of the network
  2: [(1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)],
  3: [(1, 2, 2), (2, 2, 2), (2, 2, 4), (2, 4, 4)] + [s for s in _CUBES if math.prod(s) <= 512],
}
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
  count, _, one = name.partition('x')
  slices, one = (int(count), one) if re.fullmatch(r'[1-9]\d{0,2}', count) else (1, name)
  chip, _, shape = one.partition(':')
  if chip not in TPUS:
    raise ConfigurationError(
      f'--topology={name}: the chip {chip!r} is unknown. Use one of {", ".join(TPUS)}, as in '
      f'v4:4x4x2.{did_you_mean(chip, TPUS)}'
    )
  shapes = _SHAPES[TPUS[chip].axes]
  if not re.fullmatch(r'\d{1,4}(x\d{1,4}){1,2}', shape):
    raise ConfigurationError(
      f'--topology={name}: the sides of the slice are missing or invalid. Write them as in '
      f'{_name(chip, shapes[2])}.'
    )
  sides = tuple(int(side) for side in shape.split('x'))
  if tuple(sorted(sides)) not in shapes or (len(sides) == 3 and (sides[0] | sides[1]) % 2):
    size = math.log(max(math.prod(sides), 1))
    nearest = sorted(shapes, key=lambda shape: abs(math.log(math.prod(shape)) - size))[:3]
    raise ConfigurationError(
      f'--topology={name}: {chip} has no slice of this shape. Use one of the nearest: '
      + ', '.join(f'{_name(chip, one)} ({math.prod(one)} chips)' for one in nearest)
    )
  return slices, chip, sides


def devices(name: str) -> Sequence[Any]:
  """The devices of the slices, one per chip; raises as `parse`, or if libtpu is missing."""
  slices, chip, sides = parse(name)
  if importlib.util.find_spec('libtpu') is None:
    raise ConfigurationError(
      f'--topology={name}: libtpu, the compiler for TPUs, is not installed. Install it, also on a '
      f'machine without TPUs: {packages.install("jax[tpu]")}'
    )
  for variable, value in _ENVIRONMENT.items():
    os.environ.setdefault(variable, value)
  cores = 2 if TPUS[chip].axes == 3 else 1
  os.environ.setdefault('TPU_ACCELERATOR_TYPE', f'{chip}-{cores * math.prod(sides)}')
  # Otherwise the first computation would make JAX search for chips on this machine.
  jax.config.update('jax_platforms', 'cpu')
  from jax.experimental import topologies  # noqa: PLC0415, after the variables that it reads

  return topologies.get_topology_desc(
    platform='tpu',
    topology_name=f'{chip}:{"x".join(map(str, sides))}',
    num_slices=slices,
    chips_per_host_bounds=(1, 1, 1) if math.prod(sides) == 1 else (2, 2, 1),
    # One device per chip: v4 and v5p chips have two cores.
    **({'chip_config_name': 'megacore'} if cores == 2 else {}),
  ).devices


def wraps(chip: str, sides: Sequence[int]) -> tuple[bool, ...]:
  """Whether each axis of a slice is a ring, with a link from its end to its beginning.

  A v4 or v5p slice consists of cubes of 4 x 4 x 4 chips whose faces are connected by optical
  switches. It is a torus if every side is a multiple of 4; otherwise, as for 4 x 4 x 2, no axis is
  a ring. An axis of v5e and v6e is a ring only if it spans a whole side of a pod, 16 chips.
  (cloud.google.com/tpu/docs/v4; jax-ml.github.io/scaling-book/tpus; MaxText's
  accelerator_to_spec_map.)
  """
  if TPUS[chip].axes == 3:
    return (all(side % 4 == 0 for side in sides),) * len(sides)
  return tuple(side == 16 for side in sides)


def _name(chip: str, shape: Sequence[int]) -> str:
  return f'{chip}:{"x".join(map(str, sorted(shape, reverse=True)))}'
