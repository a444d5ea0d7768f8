"""What a run would need, asked of the real compiler before any chip is there.

    python -m valkyrie.main --gin_file=gin/v4_32.gin --run_mode=precompile --topology=v4:4x4x2

Nothing is allocated and no data is read: every phase's train step is compiled from shapes.
"""

from collections.abc import Mapping, Sequence
import inspect
import json
import pathlib
import time
from typing import Any

import gin
import jax

from valkyrie import partitioning
from valkyrie.certificates import chips, collectives, hlo, topologies
from valkyrie.compilation import abstract_state, trace_step
from valkyrie.errors import StorageError
from valkyrie.models import language_model
from valkyrie.monitoring.report import in_units
from valkyrie.train import train
from valkyrie.training.train_step import make_train_step


@gin.configurable
def precompile(model_dir: str, topology: str | None = None) -> None:
  """Compiles the train step of every phase, and writes and prints what each one needs.

  Args:
    model_dir: where precompile.json goes.
    topology: a TPU slice, such as 'v4:4x4x2'; None means the devices of this machine.

  Raises:
    ConfigurationError: where a step needs more memory than a chip has, with what would help.
  """
  devices = jax.devices() if topology is None else topologies.devices(topology)
  with partitioning.on_devices(devices):
    certificates = _certificates(topology)
  _write(pathlib.Path(model_dir) / 'precompile.json', certificates)
  for certificate in certificates:
    print(report(certificate))


def _settings() -> Mapping[str, Any]:
  """What `train` would be called with."""
  signature = inspect.signature(inspect.unwrap(train)).parameters
  defaults = {n: p.default for n, p in signature.items() if p.default is not p.empty}
  return {**defaults, **gin.get_bindings(train)}


def _certificates(topology: str | None) -> list[dict[str, Any]]:
  """One for each phase; phases of one shape have one program."""
  settings = _settings()
  rows, seed = settings['batch_size'], settings['seed']
  layout = settings['partitioner']()
  layout.check_batch(rows)
  model = language_model.transform(settings['model'])
  curriculum, optimizer = settings['curriculum'](), settings['optimizer']()
  abstract = abstract_state(model, optimizer, layout, seed, rows)
  done: dict[tuple, dict[str, Any]] = {}
  for phase in curriculum.phases:
    if phase.shape in done:
      continue
    step = make_train_step(model, optimizer, curriculum, phase, seed=seed, remat=settings['remat'])
    traced = trace_step(
      step, phase.tokens_per_row, layout, abstract, rows, not settings['hunt_nan']
    )
    began = time.perf_counter()
    compiled = traced.lower().compile()
    seconds = time.perf_counter() - began
    done[phase.shape] = {
      'topology': topology,
      'device_kind': layout.mesh.devices.flat[0].device_kind,
      'chips': layout.mesh.size,
      'mesh': dict(layout.mesh.shape),
      'layout': _layout(layout),
      'rows': rows,
      'chunk_size': phase.chunk_size,
      'chunks': phase.chunks,
      'backprop_chunks': phase.backprop_chunks,
      'parameters': sum(leaf.size for leaf in jax.tree.leaves(abstract.params)),
      **_memory(compiled, chips.of_kind(layout.mesh.devices.flat[0].device_kind)),
      'compile_seconds': round(seconds, 1),
      'flops_per_token': 3 * model.forward_flops,
      **_traffic(hlo.parse(compiled.as_text() or '')),
    }
  return [{'phase': n, **done[phase.shape]} for n, phase in enumerate(curriculum.phases)]


def _layout(layout: partitioning.Partitioner) -> str:
  rules = [
    f'{logical} over {axes if isinstance(axes, str) else "+".join(axes)}'
    for logical, axes in layout.axis_rules.items()
    if axes
  ]
  return ', '.join(rules) or 'one device'


def _memory(compiled: jax.stages.Compiled, chip: chips.Chip | None) -> dict[str, Any]:
  used = compiled.memory_analysis()
  assert used is not None, 'CPUs, GPUs and TPUs all tell'
  total = (
    used.argument_size_in_bytes
    + used.temp_size_in_bytes
    + used.output_size_in_bytes
    - used.alias_size_in_bytes
  )
  return {
    'argument_bytes': used.argument_size_in_bytes,
    'temporary_bytes': used.temp_size_in_bytes,
    'output_bytes': used.output_size_in_bytes,
    'alias_bytes': used.alias_size_in_bytes,
    'total_bytes': total,
    'hbm_bytes': chip and chip.hbm_bytes,
    'fits': chip and total <= chip.hbm_bytes,
    'code_bytes': used.generated_code_size_in_bytes,
  }


def _traffic(module: hlo.Module) -> dict[str, Any]:
  sent = collectives.of_module(module)
  largest = collectives.largest_in_loops(sent)
  return {
    'instructions': sum(len(c.instructions) for c in module.computations.values()),
    'collective_bytes': collectives.by_kind(sent),
    'rare_collective_bytes': collectives.by_kind(sent, rare=True),
    'largest_collective_in_loops': largest
    and {
      'kind': largest.kind,
      'bytes': round(largest.bytes),
      'times': largest.times,
      'source': largest.source,
    },
  }


def report(c: Mapping[str, Any]) -> str:
  """A certificate for a person to read."""
  sent = c['collective_bytes']
  lines = [
    f'phase {c["phase"]}: {c["rows"]} rows of {c["chunks"]} x {c["chunk_size"]:,} tokens, gradient '
    f'through {c["backprop_chunks"]} chunks, on {c["chips"]} x {c["device_kind"]}, {c["layout"]}',
    f'  memory of a chip: {in_units(c["total_bytes"])} (arguments {in_units(c["argument_bytes"])}, '
    f'temporaries {in_units(c["temporary_bytes"])})'
    + (f' of {in_units(c["hbm_bytes"])}' if c['hbm_bytes'] else ''),
    f'  compiled in {c["compile_seconds"]} s: {c["instructions"]:,} instructions, '
    f'{in_units(c["code_bytes"])} of code',
    f'  a chip sends in a step: {in_units(sum(sent.values()))} '
    f'({", ".join(f"{kind} {in_units(size)}" for kind, size in sent.items())})',
  ]
  if c['rare_collective_bytes']:
    lines.append(f'  and in branches seldom taken: {c["rare_collective_bytes"]}')
  if largest := c['largest_collective_in_loops']:
    lines.append(
      f'  the largest in a loop: {largest["kind"]} of {in_units(largest["bytes"])}, '
      f'{largest["times"]:,} times, {largest["source"]}'
    )
  return '\n'.join(lines)


def _write(path: pathlib.Path, certificates: Sequence[Mapping[str, Any]]) -> None:
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(certificates, indent=2) + '\n')
  except OSError as error:
    raise StorageError(f'{path} cannot be written: {error}: pass another --model_dir') from error
