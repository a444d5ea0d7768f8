"""The run mode `precompile`: the memory, communication and time of a run, only from the compiler.

    python -m valkyrie.main --gin_file=gin/v4_32.gin --run_mode=precompile --topology=v4:4x4x2

Nothing is allocated and no data is read: the train step of every phase is compiled from shapes.
"""

from collections.abc import Callable, Sequence
import json
import pathlib
import re
import shlex
import sys
import time
from typing import Any

import gin
import jax

from valkyrie.certificates import certificate, collectives, hlo, remedies, topologies, work
from valkyrie.config.computation import may_change_on_resume
from valkyrie.config.parse import FLAG
from valkyrie.config.redact import redact
from valkyrie.errors import ConfigurationError, storage_errors
from valkyrie.monitoring import chips
from valkyrie.sharding import mesh
from valkyrie.training.curriculum import Phase
from valkyrie.training.setup import Setup, StepSettings

Certificate = dict[str, Any]


@may_change_on_resume()
@gin.configurable
def precompile(
  model_dir: str,
  topology: str | None = None,
  *,
  settings: Callable[[], StepSettings],
  hbm_bytes: int | None = None,
  layouts: Sequence[str] | None = None,
) -> None:
  """Compiles the train step of every phase; writes and prints a certificate of each.

  Args:
    model_dir: the directory of precompile.json.
    topology: a TPU slice, such as 'v4:4x4x2'; None means the devices of this machine.
    settings: the class of the settings that decide the compiled steps.
    hbm_bytes: the memory of a device that a program may use; None takes what the chip has.
    layouts: gin files of partitioners to try if a step needs more; None takes all of gin/partition.

  Raises:
    ConfigurationError: a step needs more memory; the message recommends a change.
  """
  devices = jax.devices() if topology is None else topologies.devices(topology)
  chip = chips.of_kind(devices[0].device_kind)
  offered = hbm_bytes or (chip and chip.hbm_bytes)

  def certificates(only: int | None = None) -> list[Certificate]:
    """One for each phase, or for phase `only`; phases of one shape share a program."""
    setup = Setup(settings())
    phases = setup.curriculum.forms
    numbers = range(len(phases)) if only is None else [only]
    found: dict[tuple, Certificate] = {}
    for phase in (phases[number] for number in numbers):
      if phase.shape not in found:
        found[phase.shape] = _certificate(setup, phase, topology, offered)
    return [{'phase': number, **found[phases[number].shape]} for number in numbers]

  with mesh.target_devices(devices):
    all_found = [{'command': _command(), **found} for found in certificates()]
    path = pathlib.Path(model_dir) / 'precompile.json'
    with storage_errors(f'{path} cannot be written', 'Pass another --model_dir.'):
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_text(json.dumps(all_found, indent=2) + '\n')
    for found in all_found:
      print(certificate.text(found), flush=True)
    over = [found for found in all_found if found['fits'] is False]
    if over:
      worst = max(over, key=lambda c: c['total_bytes'] or 0)
      raise ConfigurationError(
        remedies.advice(
          worst,
          layouts,
          ask=lambda: certificates(worst['phase'])[0],
          partitioner=lambda: settings().partitioner(),
        )
      )


def _command() -> str:
  """The command line without secrets."""

  def shown(argument: str) -> str:
    if not argument.startswith(FLAG):
      return argument
    name, _, value = argument.removeprefix(FLAG).partition('=')
    return FLAG + redact(f'{name} = {value}').replace(' = ', '=', 1)

  return shlex.join(['python', '-m', 'valkyrie.main', *map(shown, sys.argv[1:])])


def _certificate(
  setup: Setup, phase: Phase, topology: str | None, hbm_bytes: int | None
) -> Certificate:
  facts = certificate.describe(setup, phase, topology)
  began = time.perf_counter()
  try:
    compiled = setup.trace(phase).lower().compile()
  except jax.errors.JaxRuntimeError as error:
    refused = str(error).partition('\n')[0]
    if 'RESOURCE_EXHAUSTED' not in refused:
      raise
    needed = re.search(r'\(([\d.]+)G\)', refused)
    total = int(float(needed.group(1)) * chips.GIB) if needed else None
    return facts | {'total_bytes': total, 'hbm_bytes': hbm_bytes, 'fits': False, 'refused': refused}
  facts['compile_seconds'] = round(time.perf_counter() - began, 1)
  module = hlo.parse(compiled.as_text() or '')
  done, sent = work.of_module(module), collectives.of_module(module)
  facts |= certificate.memory(compiled, hbm_bytes)
  facts |= certificate.program(module, done, sent, facts)
  return facts | certificate.estimates(done, sent, facts, setup)
