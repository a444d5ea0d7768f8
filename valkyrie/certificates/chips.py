"""What a chip can do at most and what it offers, from public data sheets."""

from collections.abc import Sequence
from typing import NamedTuple

GIB = 2**30


class Chip(NamedTuple):
  """One chip: of v4 and v5p, that is both of its cores, which JAX shows as one device.

  device_kind: what JAX calls it; `monitoring.flops` knows its peak by it.
  hbm_bytes: of its memory, what a program can have; the rest the runtime keeps.
  hbm_bytes_per_second: to and from that memory.
  link_bytes_per_second: over one link between neighbours, in one direction.
  axes: dimensions of its network, each with a link to both sides.
  """

  device_kind: str
  hbm_bytes: int
  hbm_bytes_per_second: float
  link_bytes_per_second: float
  axes: int


# Memory: what the compiler names as the limit where a program does not fit ("Used 63.80G of 30.75G
# hbm"), as public reports of each chip quote it: of v4, github.com/erfanzar/EasyDeL/issues/166.
# Rates: "How to Scale Your Model", jax-ml.github.io/scaling-book/tpus, whose links are what is
# reached in practice, a tenth less than Google's data sheets (cloud.google.com/tpu/docs) name.
CHIPS = {
  'v4': Chip('TPU v4', int(30.75 * GIB), 1.2e12, 4.5e10, 3),
  'v5e': Chip('TPU v5 lite', int(15.75 * GIB), 8.1e11, 4.5e10, 2),
  'v5p': Chip('TPU v5', int(95.74 * GIB), 2.8e12, 9e10, 3),
  'v6e': Chip('TPU v6 lite', int(31.25 * GIB), 1.6e12, 9e10, 2),
}


def of_kind(device_kind: str) -> Chip | None:
  """The chip that JAX calls by this name; None where no data sheet is known, as of a CPU."""
  return next((chip for chip in CHIPS.values() if chip.device_kind == device_kind), None)


def wraps(name: str, bounds: Sequence[int]) -> tuple[bool, ...]:
  """Which axes of a slice are closed to a ring by a link from their end to their beginning.

  A v4 or v5p slice is made of cubes of 4 x 4 x 4 whose faces optical switches connect: it is a
  torus where every side is a multiple of 4, and has no such link anywhere where one is not, as in
  4 x 4 x 2. v5e and v6e are wired so only along whole sides of a pod, of 16 chips.
  (cloud.google.com/tpu/docs/v4; jax-ml.github.io/scaling-book/tpus; MaxText's
  accelerator_to_spec_map.)
  """
  if CHIPS[name].axes == 3:
    return (all(side % 4 == 0 for side in bounds),) * len(bounds)
  return tuple(side == 16 for side in bounds)
