"""Certificate of a compiled train step: an entry of precompile.json."""

from collections.abc import Mapping, Sequence
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from valkyrie.certificates import (
  collectives,
  estimate,
  hlo,
  jaxpr_flops,
  memory_traffic,
  topologies,
)
from valkyrie.monitoring import chips
from valkyrie.training import tbptt
from valkyrie.training.curriculum import Phase
from valkyrie.training.setup import Setup
from valkyrie.types import Batch


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


def operations(traced: jax.stages.Traced, setup: Setup, phase: Phase) -> dict[str, Any]:
  """Operations of the traced step.

  executed_flops: matrix products per chip and step, including recomputation.
  recomputed_flops_per_token: matrix products beyond one forward pass and one backward pass, which
    has twice those of the forward pass.
  """
  done = jaxpr_flops.of_jaxpr(traced.jaxpr)
  tokens = setup.settings.batch_size * phase.tokens_per_row
  per_token = done.products / tokens
  once = 3 * _forward(setup, phase) / phase.chunk_size
  return {
    'executed_flops': done.products // setup.partitioner.mesh.size,
    'executed_flops_per_token': per_token,
    'recomputed_flops_per_token': per_token - once,
    'elementwise_per_token': done.elementwise / tokens,
    'loops_counted_once': done.loops_once,
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


def program(module: hlo.Module) -> dict[str, Any]:
  """Size, communication and HBM traffic of the compiled program, per chip and step.

  collective_bytes: bytes sent, by kind.
  rare_collective_bytes: bytes that rarely taken branches add.
  """
  sent = collectives.of_module(module)
  moved = memory_traffic.of_module(module)
  largest = collectives.largest_in_loops(sent)
  most = sorted(moved, key=lambda m: -m.bytes * m.times)[:5]
  return {
    'instructions': sum(len(c.instructions) for c in module.computations.values()),
    'collective_bytes': collectives.by_kind(sent),
    'rare_collective_bytes': collectives.by_kind(sent, rare=True),
    'largest_collective_in_loops': largest
    and _shown(largest, ('kind', 'bytes', 'times', 'source')),
    'hbm_traffic_bytes': hlo.total(moved),
    'largest_hbm_traffic': [_shown(m, ('bytes', 'times', 'source')) for m in most],
  }


def estimates(
  facts: Mapping[str, Any], sent: Sequence[collectives.Collective], setup: Setup
) -> dict[str, Any]:
  """Estimated time and share of peak on a TPU slice, see `estimate`. Nothing is measured.

  estimated_compute_seconds: operations / peak FLOP/s.
  estimated_memory_seconds: bytes / HBM bandwidth.
  estimated_seconds: the larger of the two, plus communication.
  """
  mesh, topology = setup.partitioner.mesh, facts['topology']
  if topology is None:
    return {}
  name, sides = topologies.parse(topology)
  chip = chips.TPUS[name]
  assert chip.hbm_bytes_per_second and chip.link_bytes_per_second, chip
  places = np.asarray([device.coords[: len(sides)] for device in mesh.devices.flat])
  network = estimate.Torus(places, topologies.wraps(name, sides), sides)
  axes = estimate.by_mesh_axes(sent, mesh, network, chip.link_bytes_per_second)
  compute = facts['executed_flops'] / chip.peak_flops
  memory_seconds = facts['hbm_traffic_bytes'] / chip.hbm_bytes_per_second
  seconds = max(compute, memory_seconds) + sum(axes.values())
  tokens = facts['tokens_per_step'] / mesh.size / seconds
  return {
    'estimated_compute_seconds': compute,
    'estimated_memory_seconds': memory_seconds,
    'estimated_communication_seconds': sum(axes.values()),
    'estimated_communication_seconds_by_axes': axes,
    'estimated_seconds': seconds,
    'estimated_tokens_per_second_per_chip': tokens,
    'estimated_share_of_peak': tokens * facts['flops_per_token'] / chip.peak_flops,
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


def _forward(setup: Setup, phase: Phase) -> int:
  """Operations of one forward pass over a chunk of one row, including the loss."""
  integers = jax.ShapeDtypeStruct((1, phase.chunk_size), jnp.int32)
  floats = jax.ShapeDtypeStruct((1, phase.chunk_size), jnp.float32)
  forward = functools.partial(tbptt.chunk_sums, setup.model, plan=phase.planner)
  traced = jax.make_jaxpr(forward)(
    setup.state.params,
    jax.eval_shape(lambda: setup.model.initial_carry(1)),
    Batch(integers, integers, floats, integers, integers),
  )
  return jaxpr_flops.of_jaxpr(traced).products
