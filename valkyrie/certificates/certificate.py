"""Certificate of a compiled train step: an entry of precompile.json."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from valkyrie.certificates import (
  collectives,
  estimate,
  hlo,
  topologies,
  work,
)
from valkyrie.monitoring import chips
from valkyrie.training.curriculum import Phase
from valkyrie.training.setup import Setup


def describe(setup: Setup, phase: Phase, topology: str | None) -> dict[str, Any]:
  """The facts known before compiling: the step, the devices and the operations of the model."""
  mesh, rows = setup.partitioner.mesh, setup.settings.batch_size
  return {
    'topology': topology,
    'compiler': topologies.compiler(topology),
    'device_kind': mesh.devices.flat[0].device_kind,
    'chips': mesh.size,
    'mesh': dict(mesh.shape),
    'layout': _layout(setup),
    'rows': rows,
    'chunk_size': phase.chunk_size,
    'chunks': phase.chunks,
    'backprop_chunks': phase.backprop_chunks,
    'tokens_per_step': rows * phase.tokens_per_row,
    'parameters': sum(leaf.size for leaf in jax.tree.leaves(setup.state.params)),
    'flops_per_token': setup.model.about.train_flops_per_token,
  }


def memory(compiled: jax.stages.Compiled, hbm_bytes: int | None) -> dict[str, Any]:
  """Memory per chip.

  total_bytes: arguments + temporaries + outputs - aliased.
  hbm_bytes: memory that a program can use; None if unknown.
  fits: whether total_bytes <= hbm_bytes; None if unknown.
  """
  used = compiled.memory_analysis()
  assert used is not None, 'CPUs, GPUs and TPUs have a memory analysis'
  sizes = {
    'argument_bytes': used.argument_size_in_bytes,
    'temporary_bytes': used.temp_size_in_bytes,
    'output_bytes': used.output_size_in_bytes,
  }
  total = sum(sizes.values()) - used.alias_size_in_bytes
  return {
    **sizes,
    'alias_bytes': used.alias_size_in_bytes,
    'total_bytes': total,
    'hbm_bytes': hbm_bytes,
    'fits': None if hbm_bytes is None else total <= hbm_bytes,
    'code_bytes': used.generated_code_size_in_bytes,
  }


def program(
  module: hlo.Module,
  done: Sequence[work.Work],
  sent: Sequence[collectives.Collective],
  facts: Mapping[str, Any],
) -> dict[str, Any]:
  """Size, operations, communication and HBM traffic of the compiled program, per chip and step.

  executed_instructions: with loops multiplied out.
  useful_flops: of the model's matrix products, once forward and once backward.
  executed_flops: of the program's matrix products, with what it computes again.
  collective_bytes: bytes sent, by kind.
  rare_collective_bytes: bytes that rarely taken branches add.
  """
  largest = collectives.largest_in_loops(sent)
  most = sorted(done, key=lambda one: -one.bytes * one.times)[:5]
  return {
    'instructions': sum(len(c.instructions) for c in module.computations.values()),
    'executed_instructions': sum(one.times for one in done),
    'useful_flops': facts['flops_per_token'] * facts['tokens_per_step'] // facts['chips'],
    'executed_flops': sum(one.flops * one.times for one in done),
    'collective_bytes': collectives.by_kind(sent),
    'rare_collective_bytes': collectives.by_kind(sent, rare=True),
    'largest_collective_in_loops': largest
    and _shown(largest, ('kind', 'bytes', 'times', 'source')),
    'hbm_traffic_bytes': hlo.total(done),
    'largest_hbm_traffic': [_shown(one, ('bytes', 'times', 'source')) for one in most],
  }


def estimates(
  done: Sequence[work.Work],
  sent: Sequence[collectives.Collective],
  facts: Mapping[str, Any],
  setup: Setup,
) -> dict[str, Any]:
  """Estimated time and share of peak on a TPU slice, see `estimate`. Nothing is measured.

  estimated_seconds_by_part: {part: [by instruction, by cycles]}, see `work`.
  estimated_compute_seconds: operations / peak FLOP/s.
  estimated_memory_seconds: bytes / HBM bandwidth.
  estimated_instruction_seconds, estimated_cycles_seconds: the sums of the parts. The time of a step
    lies between them.
  estimated_tokens_per_second_per_chip, estimated_share_of_peak: [by instruction, by cycles].
  """
  mesh, topology = setup.partitioner.mesh, facts['topology']
  if topology is None:
    return {}
  name, sides = topologies.parse(topology)
  chip = chips.TPUS[name]
  assert chip.hbm_bytes_per_second and chip.link_bytes_per_second and chip.cycles_per_second, chip
  places = np.asarray([device.coords[: len(sides)] for device in mesh.devices.flat])
  network = estimate.Torus(places, topologies.wraps(name, sides), sides)
  axes = estimate.by_mesh_axes(sent, mesh, network, chip.link_bytes_per_second)
  communication = sum(axes.values())
  parts = work.seconds(done, chip.peak_flops, chip.hbm_bytes_per_second, chip.cycles_per_second)
  sums = [communication + sum(column) for column in zip(*parts.values(), strict=True)]
  rates = [facts['tokens_per_step'] / mesh.size / seconds for seconds in sums]
  return {
    'estimated_seconds_by_part': {**parts, 'communication': [communication] * 2},
    'estimated_compute_seconds': facts['executed_flops'] / chip.peak_flops,
    'estimated_memory_seconds': facts['hbm_traffic_bytes'] / chip.hbm_bytes_per_second,
    'estimated_communication_seconds': communication,
    'estimated_communication_seconds_by_axes': axes,
    'estimated_instruction_seconds': sums[0],
    'estimated_cycles_seconds': sums[1],
    'estimated_tokens_per_second_per_chip': rates,
    'estimated_share_of_peak': [
      rate * facts['flops_per_token'] / chip.peak_flops for rate in rates
    ],
  }


def _shown(record: Any, fields: Sequence[str]) -> dict[str, Any]:
  return {field: getattr(record, field) for field in fields}


def _layout(setup: Setup) -> str:
  """The axis rules, as 'batch over data, embed over data'."""
  rules = [
    f'{logical} over {"+".join(setup.partitioner.axes_of(logical))}'
    for logical in setup.partitioner.axis_rules
    if setup.partitioner.axes_of(logical)
  ]
  return ', '.join(rules) or 'whole on one device'
