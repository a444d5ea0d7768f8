"""Data-sheet figures of accelerators."""

from typing import NamedTuple

GIB = 2**30


class Chip(NamedTuple):
  """A TPU chip, one JAX device. For v4 and v5p that is a chip with both of its cores.

  device_kind: JAX's name for the device.
  peak_flops: dense bfloat16 FLOP/s.
  hbm_bytes: memory that a program can use. The runtime keeps the rest.
  link_bytes_per_second: bandwidth of one link between neighbors, in one direction.
  axes: dimensions of the network. A chip has a link to both of its neighbors along each.
  cycles_per_second: the clock of its cores.
  peak_int8: dense int8 operations/s.
  dcn_bytes_per_second: its share of the network that joins slices, in one direction.
  """

  device_kind: str
  peak_flops: float
  hbm_bytes: int
  hbm_bytes_per_second: float
  link_bytes_per_second: float
  axes: int
  cycles_per_second: float
  peak_int8: float
  dcn_bytes_per_second: float


# FLOP/s, int8 operations/s: the vendors' data sheets.
# Memory: the limit that the compiler names where a program does not fit ("Used 63.80G of 30.75G
# hbm"), as public reports quote it (v4: github.com/erfanzar/EasyDeL/issues/166).
# Bandwidths: "How to Scale Your Model", jax-ml.github.io/scaling-book/tpus. Its links are the rates
# reached in practice, 10% below Google's data sheets (cloud.google.com/tpu/docs).
# Clocks: FLOP/s / (2 x multipliers of the matrix units of a chip): 8 units of 128 x 128 for v4 and
# v5p, 4 for v5e, 4 of 256 x 256 for v6e.
TPUS = {
  'v4': Chip('TPU v4', 275e12, int(30.75 * GIB), 1.2e12, 4.5e10, 3, 1.05e9, 275e12, 6.25e9),
  'v5e': Chip('TPU v5 lite', 197e12, int(15.75 * GIB), 8.1e11, 4.5e10, 2, 1.5e9, 394e12, 3.125e9),
  'v5p': Chip('TPU v5', 459e12, int(95.74 * GIB), 2.8e12, 9e10, 3, 1.75e9, 918e12, 6.25e9),
  'v6e': Chip('TPU v6 lite', 918e12, int(31.25 * GIB), 1.6e12, 9e10, 2, 1.75e9, 1836e12, 1.25e10),
}


class Gpu(NamedTuple):
  """An NVIDIA GPU on a board of eight.

  name: the beginning of JAX's name for the device.
  peak_flops: dense bfloat16 FLOP/s.
  hbm_bytes: all of its memory.
  nvlink_bytes_per_second: to the other GPUs of its node, in one direction.
  network_bytes_per_second: its share of the InfiniBand between nodes, in one direction.
  """

  name: str
  peak_flops: float
  hbm_bytes: int
  hbm_bytes_per_second: float
  nvlink_bytes_per_second: float
  network_bytes_per_second: float


# NVIDIA's data sheets of the SXM boards, with half of NVLink's sum of both directions. The network
# is a DGX's: 200 Gb/s a GPU for A100, 400 Gb/s for the others. The sizes of the memory are
# those of github.com/openxla/xla, xla/backends/gpu/target_config/specs.
GPUS = {
  'a100': Gpu('NVIDIA A100', 312e12, 85100068864, 2.039e12, 3e11, 2.5e10),
  'h100': Gpu('NVIDIA H100', 989e12, 84942979072, 3.35e12, 4.5e11, 5e10),
  'h200': Gpu('NVIDIA H200', 989e12, 151397597184, 4.8e12, 4.5e11, 5e10),
  'b200': Gpu('NVIDIA B200', 2250e12, 191514411008, 7.67e12, 9e11, 5e10),
}


def of_kind(device_kind: str) -> Chip | None:
  """The TPU chip of a JAX device kind, such as 'TPU v4'; None for other devices."""
  return next((chip for chip in TPUS.values() if chip.device_kind == device_kind), None)


def peak_flops(device_kind: str) -> float | None:
  """The dense bfloat16 peak of a JAX device kind, in FLOP/s; None if unknown.

  The peak of a CPU depends on clock and load, and scripts/experiment bench measures it.
  """
  peaks = {chip.device_kind: chip.peak_flops for chip in TPUS.values()}
  gpu = (gpu.peak_flops for gpu in GPUS.values() if device_kind.startswith(gpu.name))
  return peaks.get(device_kind) or next(gpu, None)
