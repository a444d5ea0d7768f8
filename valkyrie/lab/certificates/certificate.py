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

from valkyrie import packages
from valkyrie.distributed import compilation_cache
from valkyrie.lab.certificates import collectives, gpu_nodes, hlo, topologies, work
from valkyrie.models.layers import MixerOptions
from valkyrie.monitoring import chips
from valkyrie.training import kernel_check
from valkyrie.training.curriculum import Phase
from valkyrie.training.setup import Setup


def compile_step(
  setup: Setup,
  phase: Phase,
  topology: str | None,
  hbm_bytes: int | None,
  dcn_bytes_per_second: float | None,
) -> dict[str, Any]:
  """Compiles the step of a phase, and returns its certificate; see `precompile`."""
  mesh = setup.partitioner.mesh
  facts = _facts(setup, phase, topology)
  start = time.perf_counter()
  try:
    lowered = setup.trace(phase).lower()
    compiled = lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    refused, _, _ = str(error).partition('\n')
    if 'RESOURCE_EXHAUSTED' not in refused:
      raise
    total = _total_bytes_of_refused(setup, refused)
    return facts | {'total_bytes': total, 'hbm_bytes': hbm_bytes, 'fits': False, 'refused': refused}
  seconds = time.perf_counter() - start
  facts['compile_seconds'] = round(seconds, 1)
  facts['program'] = compilation_cache.keep(compiled, lowered, [*mesh.devices.flat], seconds)
  module = hlo.parse(compiled.as_text() or '')
  works = work.list_work(module)
  sent = collectives.list_collectives(module)
  facts |= _memory(compiled, hbm_bytes)
  facts |= _program(module, works, sent, facts)
  if topology is None:
    return facts
  nodes = gpu_nodes.named(topology)
  if nodes is not None:
    return facts | _gpu_estimates(nodes, works, sent, facts, mesh, dcn_bytes_per_second)
  facts['plain_cycles_per_flop'] = _plain_cycles(setup)
  return facts | _estimates(topology, works, sent, facts, mesh, dcn_bytes_per_second)


def _facts(setup: Setup, phase: Phase, topology: str | None) -> dict[str, Any]:
  """What is known before the step is compiled: its devices, layout, size and parameters."""
  partitioner = setup.partitioner
  mesh = partitioner.mesh
  rows = setup.settings.batch_size
  device = mesh.devices.flat[0]
  device_kind = device.device_kind
  nodes = gpu_nodes.named(topology)
  if nodes is not None:
    device_kind = nodes.gpu.name
  compilers = [f'{name} {version}' for name, version in packages.compilers(device.platform).items()]
  rules = []
  for logical in partitioner.axis_rules:
    names = partitioner.axes_of(logical)
    if names:
      rules.append(f'{logical} over {"+".join(names)}')
  activations = ('batch', 'time', 'activation')
  return {
    'topology': topology,
    'compiler': ', '.join(compilers) or 'unknown',
    'device_kind': device_kind,
    'chips': mesh.size,
    'mesh': dict(mesh.shape),
    'layout': ', '.join(rules) or 'whole on one device',
    'activations': {logical: partitioner.axes_of(logical) for logical in activations},
    'rows': rows,
    'chunk_size': phase.chunk_size,
    'chunks': phase.chunks,
    'backprop_chunks': phase.backprop_chunks,
    'tokens_per_step': rows * phase.tokens_per_row,
    'parameters': sum(jax.tree.leaves(setup.language_model.counts())),
    'flops_per_token': setup.model.about.train_flops_per_token,
  }


def _total_bytes_of_refused(setup: Setup, refused: str) -> int | None:
  """The memory that a step needs which the compiler refused; None if its message does not say."""
  temporaries = re.search(r'temporaries \(([\d.]+)G\)', refused)
  if temporaries is None:
    return None
  arguments = 0
  for leaf in jax.tree.leaves(setup.state):
    shape_on_device = leaf.sharding.shard_shape(leaf.shape)
    arguments += leaf.dtype.itemsize * math.prod(shape_on_device)
  temporary_bytes = float(temporaries.group(1)) * chips.GIB
  return int(temporary_bytes) + arguments


def _plain_cycles(setup: Setup) -> float:
  """The cycles of an operation in the plain forms of the kernels, compiled for one device.

  Only their matrix products count, with what the compiler fuses into them.
  """
  device = setup.partitioner.mesh.devices.flat[0]
  one_device = SingleDeviceSharding(device)
  flops = 0
  cycles = 0
  for _, _, results in kernel_check.kernel_results(setup):
    plain = jax.jit(functools.partial(results, MixerOptions()), out_shardings=one_device)
    compiled = plain.lower().compile()
    module = hlo.parse(compiled.as_text() or '')
    for step in work.list_work(module):
      if step.flops and step.part == 'attention':
        flops += step.flops * step.times
        cycles += step.cycles * step.times
  return cycles / max(flops, 1)


def _memory(compiled: jax.stages.Compiled, hbm_bytes: int | None) -> dict[str, Any]:
  """Memory per chip, where total_bytes is arguments + temporaries + outputs - aliased."""
  analysis = compiled.memory_analysis()
  assert analysis is not None, 'CPUs, GPUs and TPUs have a memory analysis'
  sizes = {
    'argument_bytes': analysis.argument_size_in_bytes,
    'temporary_bytes': analysis.temp_size_in_bytes,
    'output_bytes': analysis.output_size_in_bytes,
  }
  total = sum(sizes.values()) - analysis.alias_size_in_bytes
  fits = None
  if hbm_bytes is not None:
    fits = total <= hbm_bytes
  return {
    **sizes,
    'alias_bytes': analysis.alias_size_in_bytes,
    'total_bytes': total,
    'hbm_bytes': hbm_bytes,
    'fits': fits,
    'code_bytes': analysis.generated_code_size_in_bytes,
  }


def _program(
  module: hlo.Module,
  works: Sequence[work.Work],
  sent: Sequence[collectives.Collective],
  facts: Mapping[str, Any],
) -> dict[str, Any]:
  """Size, operations, communication and HBM traffic of the compiled program, per chip and step.

  executed_instructions, executed_flops: with loops multiplied out, and what is computed again.
  useful_flops: the model's matrix products, once forward and once backward.
  collective_bytes: bytes sent, by kind.
  """
  largest = collectives.largest_in_loops(sent)
  largest_in_loops = None
  if largest:
    largest_in_loops = {'kind': largest.kind, **_transfer(largest)}
  by_traffic = sorted(works, key=lambda step: step.bytes * step.times, reverse=True)
  largest_traffic = [_transfer(step) for step in by_traffic[:5]]
  sizes = [len(computation.instructions) for computation in module.computations.values()]
  flops_of_step = facts['flops_per_token'] * facts['tokens_per_step']
  return {
    'instructions': sum(sizes),
    'executed_instructions': sum(step.times for step in works),
    'useful_flops': flops_of_step // facts['chips'],
    'executed_flops': sum(step.flops * step.times for step in works),
    'collective_bytes': collectives.by_kind(sent),
    'largest_collective_in_loops': largest_in_loops,
    'hbm_traffic_bytes': hlo.total(works),
    'largest_hbm_traffic': largest_traffic,
  }


def _estimates(
  topology: str,
  works: Sequence[work.Work],
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
  places = [device.coords[: len(sides)] for device in mesh.devices.flat]
  network = collectives.Torus(
    places=np.asarray(places),
    rings=topologies.wraps(name, sides),
    sides=sides,
    dcn_bytes_per_second=dcn_bytes_per_second or chip.dcn_bytes_per_second,
  )
  between_slices = [collective for collective in sent if collective.between_slices]
  seconds_by_axes = collectives.by_mesh_axes(sent, mesh, network, chip.link_bytes_per_second)
  parts = work.seconds(works, chip, facts['plain_cycles_per_flop'])
  network_facts = {
    'dcn_bytes': round(hlo.total(between_slices)),
    'dcn_bytes_per_second': network.dcn_bytes_per_second,
  }
  return network_facts | _summary(parts, seconds_by_axes, facts, chip)


def _gpu_estimates(
  nodes: gpu_nodes.Nodes,
  works: Sequence[work.Work],
  sent: Sequence[collectives.Collective],
  facts: Mapping[str, Any],
  mesh: Mesh,
  dcn_bytes_per_second: float | None,
) -> dict[str, Any]:
  """As `_estimates`, on GPUs. Pairs are [without, with a cost of each kernel], see `gpu_nodes`."""
  seconds_by_axes, bytes_between = gpu_nodes.message_seconds(
    sent, mesh, nodes, dcn_bytes_per_second
  )
  parts = gpu_nodes.seconds(works, nodes.gpu)
  network_facts = {
    'dcn_bytes': round(bytes_between),
    'dcn_bytes_per_second': dcn_bytes_per_second or nodes.gpu.network_bytes_per_second,
  }
  return network_facts | _summary(parts, seconds_by_axes, facts, nodes.gpu)


def _summary(
  parts: Mapping[str, list[float]],
  seconds_by_axes: Mapping[str, float],
  facts: Mapping[str, Any],
  chip: chips.Chip | chips.Gpu,
) -> dict[str, Any]:
  """The times of parts and messages, their sums, and what follows from them."""
  communication = sum(seconds_by_axes.values())
  seconds = []
  for column in zip(*parts.values(), strict=True):
    seconds.append(communication + sum(column))
  tokens_per_chip = facts['tokens_per_step'] / facts['chips']
  rates = [tokens_per_chip / total for total in seconds]
  shares = [rate * facts['flops_per_token'] / chip.peak_flops for rate in rates]
  return {
    'estimated_seconds_by_part': {**parts, 'communication': [communication] * 2},
    'estimated_compute_seconds': facts['executed_flops'] / chip.peak_flops,
    'estimated_memory_seconds': facts['hbm_traffic_bytes'] / chip.hbm_bytes_per_second,
    'estimated_communication_seconds': communication,
    'estimated_communication_seconds_by_axes': seconds_by_axes,
    'estimated_instruction_seconds': seconds[0],
    'estimated_cycles_seconds': seconds[1],
    'estimated_tokens_per_second_per_chip': rates,
    'estimated_share_of_peak': shares,
  }


def _transfer(transfer: hlo.Transfer) -> dict[str, Any]:
  """The entry of a transfer in a certificate."""
  return {'bytes': transfer.bytes, 'times': transfer.times, 'source': transfer.source}


def text(certificate: Mapping[str, Any]) -> str:
  """A paragraph with the step, its memory, program, operations, traffic and estimated time."""
  c = certificate
  step = (
    f'phase {c["phase"]}: {c["rows"]} rows of {c["chunks"]} x {c["chunk_size"]:,} tokens, gradient '
    f'through {c["backprop_chunks"]} chunks, on {c["chips"]} x {c["device_kind"]}: {c["layout"]}'
  )
  if 'refused' in c:
    return f'{step}\n  does not fit: {c["refused"]}'
  lines = {
    'memory per chip': _memory_text(c),
    'program': (
      f'{c["parameters"]:,} parameters; {c["compiler"]}, in {c["compile_seconds"]} s: '
      f'{c["instructions"]:,} instructions, {c["code_bytes"] / 1e6:.1f} MB of code'
    ),
    'products': (
      f'{c["useful_flops"] / 1e12:.3g} TFLOP per chip and step for the model; '
      f'the program executes {c["executed_flops"] / c["useful_flops"]:.2f} times as much'
    ),
    'kept for the run': c['program'],
    'memory traffic': f'{c["hbm_traffic_bytes"] / 1e12:.3g} TB per chip and step',
    'bytes sent': _sent_text(c['collective_bytes'], c.get('dcn_bytes', 0)),
  }
  largest = c['largest_collective_in_loops']
  if largest:
    source = largest['source'][-80:]  # paths differ at their ends
    lines['largest in a loop'] = (
      f'{largest["kind"]} of {largest["bytes"] / 1e6:.1f} MB, {largest["times"]:,} times: {source}'
    )
  if 'estimated_instruction_seconds' in c:
    lines |= _estimate_texts(c)
  report = [step]
  for name, value in lines.items():
    report.append(f'  {name:<19} {value}')
  return '\n'.join(report)


def _memory_text(c: Mapping[str, Any]) -> str:
  memory = gib(c['total_bytes'])
  if c['hbm_bytes']:
    memory += f' of {gib(c["hbm_bytes"])}'
  if c['fits'] is not None:
    verdict = 'fits' if c['fits'] else 'DOES NOT FIT'
    memory += f': {verdict}'
  arguments = gib(c['argument_bytes'])
  temporaries = gib(c['temporary_bytes'])
  return f'{memory} (arguments {arguments}, temporaries {temporaries})'


def _sent_text(bytes_by_kind: Mapping[str, int], between: int) -> str:
  """The bytes by kind, and those of them that go between nodes or slices."""
  total = sum(bytes_by_kind.values())
  kinds = [f'{kind} {size / 1e9:.3g}' for kind, size in bytes_by_kind.items()]
  listed = ', '.join(kinds) or 'none'
  sent = f'{total / 1e9:.3g} GB per chip and step ({listed})'
  if between:
    sent += f', {between / 1e9:.3g} GB of it between nodes or slices'
  return sent


def _estimate_texts(c: Mapping[str, Any]) -> dict[str, str]:
  """The lines about time; docs/performance.md explains the two times."""
  pair = (c['estimated_instruction_seconds'], c['estimated_cycles_seconds'])
  seconds = _range(pair, '.3g')
  slow_first = c['estimated_tokens_per_second_per_chip'][::-1]
  rates = _range(slow_first, ',.0f')
  shares = _range(c['estimated_share_of_peak'][::-1], '.0%')

  def by_cycles(item):
    _, (_, seconds_by_cycles) = item
    return seconds_by_cycles

  times_of_parts = c['estimated_seconds_by_part'].items()
  longest_first = sorted(times_of_parts, key=by_cycles, reverse=True)
  parts = [f'{name} {_range(times, ".2g")}' for name, times in longest_first]
  by_axes = c['estimated_communication_seconds_by_axes']
  axes = [f'{name} {spent:.2g}' for name, spent in by_axes.items()]
  return {
    'estimate': (
      f'{seconds} s per step, not measured; {rates} tokens/s per chip, {shares} of peak'
    ),
    'seconds by part': ', '.join(parts),
    'seconds on links': ', '.join(axes) or 'none',
  }


def _range(pair: Sequence[float], form: str) -> str:
  """'1.2 to 3.4', or one number if both are written the same."""
  first, second = (f'{number:{form}}' for number in pair)
  if first == second:
    return first
  return f'{first} to {second}'


def gib(size: float) -> str:
  """'30.75 GiB'."""
  return f'{size / 2**30:.2f} GiB'
