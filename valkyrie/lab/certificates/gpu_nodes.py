"""GPUs by name, such as 'h100:8' and '4xh100:8', devices to compile for them, and their messages.

jax's CUDA plugin compiles for a GPU by a description of it, without a GPU or a driver.
"""

from collections import defaultdict
from collections.abc import Sequence
import importlib.util
import os
import re
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh
import numpy as np

from valkyrie import packages
from valkyrie.config.suggest import did_you_mean
from valkyrie.errors import ConfigurationError
from valkyrie.lab.certificates import collectives, work
from valkyrie.monitoring.chips import GPUS, Gpu

# What a kernel costs beside its products and bytes, in the slower of the two times. It is fitted to
# steps that one H100 measured (docs/results/one_chip.md) and to nothing else: 8.8 us explains the
# one with cuDNN's attention, and less than 3 us the two without.
KERNEL_SECONDS = 8.8e-6
_LOG_LEVEL = 'TF_CPP_MIN_LOG_LEVEL'
_LOG_LEVEL_OF_JAX = '1'  # jax sets it when it is imported, unless the environment has a value
_COUNTS = (1, 2, 4, 8)  # GPUs of a node that a run can have
# XLA's pool has so much of a GPU in scripts/gpu_environment.
_POOL = 0.9
# The figures of openxla/xla, xla/backends/gpu/target_config/specs, that differ between these GPUs.
_TARGETS = {
  'a100': {
    'core_count': 108,
    'clock_rate_ghz': 1.41,
    'l2_cache_size': 41943040,
    'shared_memory_per_core': 167936,
    'shared_memory_per_block_optin': 166912,
    'fpus_per_core': 64,
    'major': 8,
  },
  'h100': {
    'core_count': 132,
    'clock_rate_ghz': 1.98,
    'l2_cache_size': 52428800,
    'shared_memory_per_core': 233472,
    'shared_memory_per_block_optin': 232448,
    'fpus_per_core': 128,
    'major': 9,
  },
  'b200': {
    'core_count': 148,
    'clock_rate_ghz': 1.965,
    'l2_cache_size': 132644864,
    'shared_memory_per_core': 233472,
    'shared_memory_per_block_optin': 232448,
    'fpus_per_core': 128,
    'major': 10,
  },
}
_TARGETS['h200'] = _TARGETS['h100']  # the same chip with more memory


class Nodes(NamedTuple):
  """`count` nodes with `gpus` of one kind in each, of the name `chip`."""

  count: int
  chip: str
  gpus: int

  @property
  def gpu(self) -> Gpu:
    return GPUS[self.chip]

  @property
  def usable_bytes(self) -> int:
    """The memory of a GPU that a program may use."""
    return int(_POOL * self.gpu.hbm_bytes)


def named(topology: str | None) -> Nodes | None:
  """The nodes of a topology that is meant to name GPUs; None for another one, or without one.

  Such a topology contains the letters and digits of a GPU. Raises as `parse`.
  """
  name = (topology or '').lower()
  if topology is None or not any(chip in name for chip in GPUS):
    return None
  return parse(topology)


def parse(name: str) -> Nodes:
  """'4xh100:8' as four nodes of eight; raises a ConfigurationError if there are no such nodes."""
  match = re.fullmatch(r'(?:([1-9]\d{0,2})x)?([^:]*):?(.*)', name)
  count, chip, gpus = match.groups() if match else (None, name, '')
  if chip not in GPUS:
    raise ConfigurationError(
      f'--topology={name}: the GPU {chip!r} is unknown. Use one of {", ".join(GPUS)}, with 80 GB '
      f'or more, as in h100:8.{did_you_mean(chip, GPUS)} For a part of a card (MIG) or a card with '
      'less memory, use the whole one with --gin.precompile.hbm_bytes=BYTES.'
    )
  if gpus not in map(str, _COUNTS):
    listed = ', '.join(f'{chip}:{number}' for number in _COUNTS)
    raise ConfigurationError(
      f'--topology={name}: expected the GPUs of a node. Use one of {listed}, or several '
      f'nodes, as in 4x{chip}:8.'
    )
  return Nodes(int(count or 1), chip, int(gpus))


def devices(name: str, nodes: Nodes) -> Sequence[Any]:
  """The devices of the nodes of this name; raises a ConfigurationError if the plugin is missing."""
  if importlib.util.find_spec('jax_cuda13_plugin') is None:
    raise ConfigurationError(
      f'--topology={name}: the CUDA plugin of jax, the compiler for GPUs, is not installed. '
      f'Install it, also on a machine without GPUs: {packages.install("jax[cuda13]")}'
    )
  if os.environ.get(_LOG_LEVEL) == _LOG_LEVEL_OF_JAX:
    os.environ[_LOG_LEVEL] = '3'  # the plugin reports that there is no driver
  jax.config.update('jax_platforms', 'cpu')
  jax.local_devices()  # registers the plugin, once
  from jax.experimental import topologies  # noqa: PLC0415, after the variable that it reads

  topology = topologies.get_topology_desc(
    platform='cuda',
    topology_name=nodes.chip,
    target_config=_target_config(nodes),
    topology=f'1x{nodes.count}x{nodes.gpus}',
  )
  return topology.devices


def _target_config(nodes: Nodes) -> str:
  """The description that XLA compiles for, a text of its GpuTargetConfigProto."""
  target = dict(_TARGETS[nodes.chip])
  major = target.pop('major')
  fields = {
    'threads_per_block_limit': 1024,
    'threads_per_warp': 32,
    'shared_memory_per_block': 49152,
    'threads_per_core_limit': 2048,
    'block_dim_limit_x': 2147483647,
    'block_dim_limit_y': 65535,
    'block_dim_limit_z': 65535,
    'registers_per_core_limit': 65536,
    'registers_per_block_limit': 65536,
    'memory_bandwidth': int(nodes.gpu.hbm_bytes_per_second),
    'device_memory_size': nodes.gpu.hbm_bytes,
    **target,
  }
  texts = [f'{field}: {value}' for field, value in fields.items()]
  lines = ' '.join(texts)
  return (
    f'gpu_device_info {{ {lines} cuda_compute_capability {{ major: {major} }} }}\n'
    'platform_name: "CUDA"\n'
    'dnn_version_info { major: 9 minor: 10 }\n'
    'runtime_version { major: 13 minor: 0 patch: 0 }\n'
    f'device_description_str: "{nodes.gpu.name}"\n'
  )


def message_seconds(
  sent: Sequence[collectives.Collective],
  mesh: Mesh,
  nodes: Nodes,
  network_bytes_per_second: float | None,
) -> tuple[dict[str, float], float]:
  """Seconds of messages by the mesh axes that they cross, and the bytes between nodes, per GPU.

  Between nodes a group uses the networks of all of its GPUs in a node, as NCCL's rings do, up to
  the rate of NVLink. Links have their full bandwidth, and nothing overlaps.
  """
  network_rate = network_bytes_per_second or nodes.gpu.network_bytes_per_second
  numbers = np.asarray([device.id for device in mesh.devices.flat])
  node_of = numbers // nodes.gpus
  seconds: dict[str, float] = defaultdict(float)
  bytes_between = 0.0
  for collective in sent:
    group_nodes = node_of[collective.groups]
    differs = group_nodes != group_nodes[:, :1]
    is_between = bool(differs.any())
    rate = nodes.gpu.nvlink_bytes_per_second
    moved = collective.bytes * collective.times
    if is_between:
      bytes_between += moved
      is_in_first_node = group_nodes[0] == group_nodes[0, 0]
      in_a_node = int(is_in_first_node.sum())
      if collective.kind == 'collective-permute':
        in_a_node = 1
      rate = min(rate, in_a_node * network_rate)
    axes = '+'.join(collectives.mesh_axes(collective, mesh))
    seconds[axes] += moved / rate
  return dict(seconds), bytes_between


def seconds(works: Sequence[work.Work], gpu: Gpu) -> dict[str, list[float]]:
  """The time of each part except communication: {part: [without, with the cost of a kernel]}.

  Both have products at the peak and, after them, bytes at the bandwidth of the memory.
  """
  parts: dict[str, list[float]] = {}
  for step in works:
    if step.part == 'communication':
      continue
    compute_seconds = step.flops / gpu.peak_flops
    memory_seconds = step.bytes / gpu.hbm_bytes_per_second
    once = compute_seconds + memory_seconds
    sums = parts.setdefault(step.part, [0.0, 0.0])
    sums[0] += step.times * once
    sums[1] += step.times * (once + KERNEL_SECONDS)
  return parts
