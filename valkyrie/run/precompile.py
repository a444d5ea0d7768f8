"""What a run would need, asked of the real compiler before any chip is there.

    python -m valkyrie.main --gin_file=gin/v4_32.gin --run_mode=precompile --topology=v4:4x4x2

Nothing is allocated and no data is read: the train step of every phase is compiled from shapes.
"""

from collections.abc import Mapping, Sequence
import inspect
import json
import pathlib
import re
import shlex
import sys
import time
from typing import Any

import gin
import jax

from valkyrie.certificates import certificate, chips, collectives, hlo, remedies, report, topologies
from valkyrie.config.computation import may_change_on_resume
from valkyrie.config.parse import FLAG
from valkyrie.config.redact import redact
from valkyrie.errors import ConfigurationError, StorageError
from valkyrie.run.train import train
from valkyrie.sharding import mesh
from valkyrie.training.curriculum import Phase
from valkyrie.training.setup import Prepared, prepare, trace_step

Certificate = dict[str, Any]


@may_change_on_resume()
@gin.configurable
def precompile(
  model_dir: str,
  topology: str | None = None,
  *,
  hbm_bytes: int | None = None,
  layouts: Sequence[str] | None = None,
) -> None:
  """Compiles the train step of every phase, and writes and prints what each one needs.

  Args:
    model_dir: where precompile.json goes.
    topology: a TPU slice, such as 'v4:4x4x2'; None means the devices of this machine.
    hbm_bytes: memory that a program may have of each device; None takes what the chip offers.
    layouts: gin files to try where a step needs more than that; None takes all of gin/partition.

  Raises:
    ConfigurationError: a step needs more memory than that; the message says what helps.
  """
  devices = jax.devices() if topology is None else topologies.devices(topology)
  chip = chips.of_kind(devices[0].device_kind)
  offered = hbm_bytes or (chip and chip.hbm_bytes)

  with mesh.on_devices(devices):
    certificates = [{'command': _command(), **found} for found in _certificates(topology, offered)]
    _write(pathlib.Path(model_dir) / 'precompile.json', certificates)
    for found in certificates:
      print(report.text(found), flush=True)
    over = [found for found in certificates if found['fits'] is False]
    if over:
      worst = max(over, key=lambda c: c['total_bytes'] or 0)
      said = remedies.advice(
        worst,
        layouts,
        ask=lambda: _certificates(topology, offered, worst['phase'])[0],
        partitioner=_settings()['partitioner'],
      )
      raise ConfigurationError(said)


def _command() -> str:
  """What was typed, without secrets."""

  def shown(argument: str) -> str:
    if not argument.startswith(FLAG):
      return argument
    name, _, value = argument.removeprefix(FLAG).partition('=')
    return FLAG + redact(f'{name} = {value}').replace(' = ', '=', 1)

  return shlex.join(['python', '-m', 'valkyrie.main', *map(shown, sys.argv[1:])])


def _settings() -> Mapping[str, Any]:
  """What `train` would be called with."""
  signature = inspect.signature(inspect.unwrap(train)).parameters
  defaults = {n: p.default for n, p in signature.items() if p.default is not p.empty}
  return {**defaults, **gin.get_bindings(train)}


def _certificates(
  topology: str | None, hbm_bytes: int | None, only: int | None = None
) -> list[Certificate]:
  """One for each phase, or of `only` that one; phases of one shape share a program."""
  settings = _settings()
  run = prepare(**{name: settings[name] for name in inspect.signature(prepare).parameters})
  rows, donate = settings['batch_size'], not settings['hunt_nan']
  done: dict[tuple, Certificate] = {}
  numbers = range(len(run.curriculum.phases)) if only is None else [only]
  for phase in (run.curriculum.phases[number] for number in numbers):
    if phase.shape not in done:
      done[phase.shape] = _certificate(run, phase, rows, donate, topology, hbm_bytes)
  return [{'phase': n, **done[run.curriculum.phases[n].shape]} for n in numbers]


def _certificate(
  run: Prepared,
  phase: Phase,
  rows: int,
  donate: bool,
  topology: str | None,
  hbm_bytes: int | None,
) -> Certificate:
  facts = certificate.describe(run, phase, rows, topology)
  traced = trace_step(
    run.make_step(phase), phase.tokens_per_row, run.layout, run.abstract, rows, donate
  )
  facts |= certificate.operations(traced, run, phase, rows)
  began = time.perf_counter()
  try:
    compiled = traced.lower().compile()
  except jax.errors.JaxRuntimeError as error:
    refused = str(error).partition('\n')[0]
    if 'RESOURCE_EXHAUSTED' not in refused:
      raise
    needed = re.search(r'\(([\d.]+)G\)', refused)
    total = int(float(needed.group(1)) * chips.GIB) if needed else None
    return facts | {
      'total_bytes': total,
      'hbm_bytes': hbm_bytes,
      'fits': False,
      'refused': refused,
    }
  facts['compile_seconds'] = round(time.perf_counter() - began, 1)
  module = hlo.parse(compiled.as_text() or '')
  facts |= certificate.memory(compiled, hbm_bytes) | certificate.program(module)
  return facts | certificate.estimates(facts, collectives.of_module(module), run)


def _write(path: pathlib.Path, certificates: Sequence[Certificate]) -> None:
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(certificates, indent=2) + '\n')
  except OSError as error:
    raise StorageError(f'{path} cannot be written: {error}: pass another --model_dir') from error
