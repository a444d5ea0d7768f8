"""The devices of a TPU slice that is not here, by its name: 'v4:4x4x2', 'v6e:8x8'."""

from collections.abc import Sequence
from importlib import metadata
import importlib.util
import itertools
import math
import os
import pathlib
import re
from typing import Any

import jax

from valkyrie.config.suggest import did_you_mean
from valkyrie.errors import ConfigurationError
from valkyrie.monitoring.chips import TPUS

_LOCK = pathlib.Path('/tmp/libtpu_lockfile')
_MOST_CHIPS = 512

# The slices of a pod that Google lends, their sides in rising order: cloud.google.com/tpu/docs. Of
# v4 and v5p those of whole cubes of 4 x 4 x 4 come to these.
_SHAPES_2D = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_SHAPES_3D = ((1, 2, 2), (2, 2, 2), (2, 2, 4), (2, 4, 4))
_CUBES = tuple(
  sides
  for sides in itertools.combinations_with_replacement(range(4, 33, 4), 3)
  if math.prod(sides) <= _MOST_CHIPS
)
_ENVIRONMENT = {
  'TPU_SKIP_MDS_QUERY': '1',  # ask no metadata server which machine this is
  'TPU_WORKER_HOSTNAMES': 'localhost',
  # The lock is for the chips of this machine, which compiling for others does not touch.
  'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
}


def parse(name: str) -> tuple[str, tuple[int, ...]]:
  """('v4', (4, 4, 2)) of 'v4:4x4x2'.

  Raises:
    ConfigurationError: there is no such chip, or no slice of it of that shape.
  """
  chip, _, shape = name.partition(':')
  if chip not in TPUS:
    raise ConfigurationError(
      f'--topology={name}: there is no chip {chip!r}; there are {", ".join(TPUS)}.'
      f'{did_you_mean(chip, TPUS)} Write it as in v4:4x4x2.'
    )
  if not re.fullmatch(r'\d{1,4}(x\d{1,4}){1,2}', shape):
    raise ConfigurationError(
      f'--topology={name}: expected the sides of the slice after {chip}:, as in '
      f'{chip}:{_text(_shapes(chip)[2])}.'
    )
  sides = tuple(int(side) for side in shape.split('x'))
  if tuple(sorted(sides)) not in _shapes(chip) or (len(sides) == 3 and (sides[0] | sides[1]) % 2):
    raise ConfigurationError(
      f'--topology={name}: no slice of {chip} has that shape. The nearest that exist: '
      f'{", ".join(_nearest(chip, sides))}.'
    )
  return chip, sides


def devices(name: str) -> Sequence[Any]:
  """One device a chip, for compiling; nothing can run on them.

  Raises:
    ConfigurationError: the name is not that of a slice, or libtpu, which compiles for it, is
      missing or kept from us.
  """
  chip, sides = parse(name)
  if importlib.util.find_spec('libtpu') is None and 'TPU_LIBRARY_PATH' not in os.environ:
    raise ConfigurationError(
      f"--topology={name}: libtpu, the TPUs' compiler, is not installed here. It needs no TPU: "
      "pip install 'valkyrie[tpu]'"
    )
  for variable, value in _ENVIRONMENT.items():
    os.environ.setdefault(variable, value)
  cores = 2 if TPUS[chip].axes == 3 else 1
  os.environ.setdefault('TPU_ACCELERATOR_TYPE', f'{chip}-{cores * math.prod(sides)}')
  # Else JAX would look for chips on this machine as soon as a number is computed.
  jax.config.update('jax_platforms', 'cpu')
  from jax.experimental import topologies  # noqa: PLC0415, after the variables that it reads

  try:
    return topologies.get_topology_desc(
      platform='tpu',
      topology_name=name,
      num_slices=1,
      chips_per_host_bounds=(1, 1, 1) if math.prod(sides) == 1 else (2, 2, 1),
      # The two cores of a v4 or v5p chip as one device, which others have anyway.
      **({'chip_config_name': 'megacore'} if cores == 2 else {}),
    ).devices
  except jax.errors.JaxRuntimeError as error:
    if 'lockfile' not in str(error):
      raise
    raise ConfigurationError(
      f'--topology={name}: libtpu is in use: {_LOCK} is held by {_holder()}, and '
      f'ALLOW_MULTIPLE_LIBTPU_LOAD={os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"]}. Wait for it, or set '
      'ALLOW_MULTIPLE_LIBTPU_LOAD=1: compiling touches no chip of this machine.'
    ) from error


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


def compiler(name: str | None) -> str:
  """What compiles for a slice, once `devices` has been asked for it: 'libtpu 0.0.42.1'.

  For the devices of this machine, None: 'jaxlib 0.10.2'.
  """
  if name is None:
    return f'jaxlib {metadata.version("jaxlib")}'
  used, installed = os.environ['TPU_LIBRARY_PATH'], importlib.util.find_spec('libtpu')
  if installed and pathlib.Path(used).parent == pathlib.Path(installed.origin or '').parent:
    return f'libtpu {metadata.version("libtpu")}'
  return f'libtpu at {used}'


def _holder() -> str:
  """'process 123 (python -m ...)', as far as Linux tells."""
  try:
    inode = _LOCK.stat().st_ino
    for line in pathlib.Path('/proc/locks').read_text().splitlines():
      fields = line.split()
      if fields[5].endswith(f':{inode}'):
        command = pathlib.Path('/proc', fields[4], 'cmdline').read_text().replace('\0', ' ')
        return f'process {fields[4]} ({command.strip()[:200]})'
  except (OSError, IndexError):
    pass
  return 'another process'


def _shapes(chip: str) -> tuple[tuple[int, ...], ...]:
  return _SHAPES_3D + _CUBES if TPUS[chip].axes == 3 else _SHAPES_2D


def _text(sides: Sequence[int]) -> str:
  return 'x'.join(map(str, sides))


def _nearest(chip: str, sides: Sequence[int]) -> list[str]:
  """The slices whose number of chips is nearest, at most three, fewer chips first."""
  chips = math.prod(sides)

  def distance(shape):
    return abs(math.log(math.prod(shape) / max(chips, 1)))

  nearest = sorted(sorted(_shapes(chip), key=distance)[:3], key=math.prod)
  return [
    f'{chip}:{_text(sorted(shape, reverse=True))} ({math.prod(shape)} chips)' for shape in nearest
  ]
