"""Certificate of a compiled train step: an entry of precompile.json, and its text form."""

from collections.abc import Mapping, Sequence
import functools
import math
import re
import time
from typing import Any

import jax
from jax.sharding import Mesh, SingleDeviceSharding
import numpy as np

from valkyrie.distributed import compilation_cache
from valkyrie.lab.certificates import collectives, hlo, topologies, work
from valkyrie.monitoring import chips
from valkyrie.packages import version
from valkyrie.training.curriculum import Phase
from valkyrie.training.setup import Setup


def of_step(
  setup: Setup,
  phase: Phase,
  topology: str | None,
  hbm_bytes: int | None,
  dcn_bytes_per_second: float | None,
) -> dict[str, Any]:
  """Compiles the step of a phase, and returns its certificate; see `precompile`."""
  mesh = setup.partitioner.mesh
  rows = setup.settings.batch_size
  axes = {logical: setup.partitioner.axes_of(logical) for logical in setup.partitioner.axis_rules}
  rules = [f'{logical} over {"+".join(names)}' for logical, names in axes.items() if names]
  compiler = 'jaxlib' if topology is None else 'libtpu'
  facts = {
    'topology': topology,
    'compiler': f'{compiler} {version(compiler)}',
    'device_kind': mesh.devices.flat[0].device_kind,
    'chips': mesh.size,
    'mesh': dict(mesh.shape),
    'layout': ', '.join(rules) or 'whole on one device',
    'activations': {a: setup.partitioner.axes_of(a) for a in ('batch', 'time', 'activation')},
    'rows': rows,
    'chunk_size': phase.chunk_size,
    'chunks': phase.chunks,
    'backprop_chunks': phase.backprop_chunks,
    'tokens_per_step': rows * phase.tokens_per_row,
    'parameters': sum(jax.tree.leaves(setup.language_model.counts())),
    'flops_per_token': setup.model.about.train_flops_per_token,
  }
  began = time.perf_counter()
  try:
    lowered = setup.trace(phase).lower()
    compiled = lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    refused = str(error).partition('\n')[0]
    if 'RESOURCE_EXHAUSTED' not in refused:
      raise
    leaves = jax.tree.leaves(setup.state)
    arguments = sum(x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape)) for x in leaves)
    temporaries = re.search(r'temporaries \(([\d.]+)G\)', refused)
    total = int(float(temporaries.group(1)) * chips.GIB) + arguments if temporaries else None
    return facts | {'total_bytes': total, 'hbm_bytes': hbm_bytes, 'fits': False, 'refused': refused}
  seconds = time.perf_counter() - began
  facts['compile_seconds'] = round(seconds, 1)
  facts['program'] = compilation_cache.keep(compiled, lowered, [*mesh.devices.flat], seconds)
  module = hlo.parse(compiled.as_text() or '')
  done = work.of_module(module)
  sent = collectives.of_module(module)
  facts |= _memory(compiled, hbm_bytes) | _program(module, done, sent, facts)
  if topology is None:
    return facts
  facts['plain_cycles_per_flop'] = _plain_cycles(setup)
  return facts | _estimates(topology, done, sent, facts, mesh, dcn_bytes_per_second)


def _plain_cycles(setup: Setup) -> float:
  """The cycles of an operation in the plain forms of the kernels, compiled for one device.

  Only their matrix products count, with what the compiler fuses into them.
  """
  one = SingleDeviceSharding(setup.partitioner.mesh.devices.flat[0])
  found = []
  for _, _, results in setup.by_kernels():
    plain = jax.jit(functools.partial(results, False), out_shardings=one)
    compiled = plain.lower().compile()
    found += work.of_module(hlo.parse(compiled.as_text() or ''))
  products = [one for one in found if one.flops and one.part == 'attention']
  flops = sum(one.flops * one.times for one in products)
  return sum(one.cycles * one.times for one in products) / max(flops, 1)


def _memory(compiled: jax.stages.Compiled, hbm_bytes: int | None) -> dict[str, Any]:
  """Memory per chip, where total_bytes is arguments + temporaries + outputs - aliased."""
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


def _program(
  module: hlo.Module,
  done: Sequence[work.Work],
  sent: Sequence[collectives.Collective],
  facts: Mapping[str, Any],
) -> dict[str, Any]:
  """Size, operations, communication and HBM traffic of the compiled program, per chip and step.

  executed_instructions, executed_flops: with loops multiplied out, and what is computed again.
  useful_flops: of the model's matrix products, once forward and once backward.
  collective_bytes: bytes sent, by kind.
  """
  largest = collectives.largest_in_loops(sent)
  most = sorted(done, key=lambda one: -one.bytes * one.times)[:5]
  return {
    'instructions': sum(len(c.instructions) for c in module.computations.values()),
    'executed_instructions': sum(one.times for one in done),
    'useful_flops': facts['flops_per_token'] * facts['tokens_per_step'] // facts['chips'],
    'executed_flops': sum(one.flops * one.times for one in done),
    'collective_bytes': collectives.by_kind(sent),
    'largest_collective_in_loops': largest and {'kind': largest.kind, **_shown(largest)},
    'hbm_traffic_bytes': hlo.total(done),
    'largest_hbm_traffic': [_shown(one) for one in most],
  }


def _estimates(
  topology: str,
  done: Sequence[work.Work],
  sent: Sequence[collectives.Collective],
  facts: Mapping[str, Any],
  mesh: Mesh,
  dcn_bytes_per_second: float | None,
) -> dict[str, Any]:
  """Estimated time and share of peak on a TPU slice, see `collectives`. Nothing is measured.

  Pairs are [by roofline, by cycles], see `work`. estimated_instruction_seconds and
  estimated_cycles_seconds are the sums of the parts by roofline and by cycles; neither is a bound.
  estimated_compute_seconds is operations / peak FLOP/s, and
  estimated_memory_seconds is bytes / HBM bandwidth.
  """
  _, name, sides = topologies.parse(topology)
  chip = chips.TPUS[name]
  network = collectives.Torus(
    places=np.asarray([device.coords[: len(sides)] for device in mesh.devices.flat]),
    rings=topologies.wraps(name, sides),
    sides=sides,
    dcn_bytes_per_second=dcn_bytes_per_second or chip.dcn_bytes_per_second,
  )
  axes = collectives.by_mesh_axes(sent, mesh, network, chip.link_bytes_per_second)
  communication = sum(axes.values())
  parts = work.seconds(done, chip, facts['plain_cycles_per_flop'])
  sums = [communication + sum(column) for column in zip(*parts.values(), strict=True)]
  rates = [facts['tokens_per_step'] / mesh.size / seconds for seconds in sums]
  return {
    'dcn_bytes': round(hlo.total(one for one in sent if one.between_slices)),
    'dcn_bytes_per_second': network.dcn_bytes_per_second,
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


def _shown(one: hlo.Transfer) -> dict[str, Any]:
  return {'bytes': one.bytes, 'times': one.times, 'source': one.source}


def text(c: Mapping[str, Any]) -> str:
  """A paragraph with the step, its memory, program, operations, traffic and estimated time."""
  step = (
    f'phase {c["phase"]}: {c["rows"]} rows of {c["chunks"]} x {c["chunk_size"]:,} tokens, gradient '
    f'through {c["backprop_chunks"]} chunks, on {c["chips"]} x {c["device_kind"]}: {c["layout"]}'
  )
  if 'refused' in c:
    return f'{step}\n  does not fit: {c["refused"]}'
  offered = f' of {gib(c["hbm_bytes"])}' if c['hbm_bytes'] else ''
  verdict = {True: ': fits', False: ': DOES NOT FIT', None: ''}[c['fits']]
  sent = c['collective_bytes']
  kinds = ', '.join(f'{kind} {size / 1e9:.3g}' for kind, size in sent.items()) or 'none'
  lines = {
    'memory per chip': f'{gib(c["total_bytes"])}{offered}{verdict} (arguments '
    f'{gib(c["argument_bytes"])}, temporaries {gib(c["temporary_bytes"])})',
    'program': f'{c["parameters"]:,} parameters; {c["compiler"]}, in {c["compile_seconds"]} s: '
    f'{c["instructions"]:,} instructions, {c["code_bytes"] / 1e6:.1f} MB of code',
    'products': f'{c["useful_flops"] / 1e12:.3g} TFLOP per chip and step for the model; '
    f'the program executes {c["executed_flops"] / c["useful_flops"]:.2f} times as much',
    'kept for the run': c['program'],
    'memory traffic': f'{c["hbm_traffic_bytes"] / 1e12:.3g} TB per chip and step',
    'bytes sent': f'{sum(sent.values()) / 1e9:.3g} GB per chip and step ({kinds})',
  }
  if largest := c['largest_collective_in_loops']:
    lines['largest in a loop'] = (
      f'{largest["kind"]} of {largest["bytes"] / 1e6:.1f} MB, {largest["times"]:,} times: '
      f'{largest["source"][-80:]}'  # paths differ at their ends
    )
  if 'estimated_instruction_seconds' in c:  # docs/performance.md explains the two times
    by_part = sorted(c['estimated_seconds_by_part'].items(), key=lambda one: -one[1][1])
    axes = c['estimated_communication_seconds_by_axes'].items()
    both = (c['estimated_instruction_seconds'], c['estimated_cycles_seconds'])
    rates = c['estimated_tokens_per_second_per_chip']
    shares = c['estimated_share_of_peak']
    lines |= {
      'estimate': f'{_range(both, ".3g")} s per step, not measured; {_range(rates[::-1], ",.0f")} '
      f'tokens/s per chip, {_range(shares[::-1], ".0%")} of peak',
      'seconds by part': ', '.join(f'{name} {_range(times, ".2g")}' for name, times in by_part),
      'seconds on links': ', '.join(f'{name} {seconds:.2g}' for name, seconds in axes) or 'none',
    }
  return '\n'.join([step, *(f'  {name:<19} {value}' for name, value in lines.items())])


def _range(pair: Sequence[float], form: str) -> str:
  """'1.2 to 3.4', or one number if they are equal."""
  return ' to '.join(dict.fromkeys(f'{number:{form}}' for number in pair))


def gib(size: float) -> str:
  """'30.75 GiB'."""
  return f'{size / 2**30:.2f} GiB'
