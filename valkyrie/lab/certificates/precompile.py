"""The run mode `precompile`: the memory, communication and time of a run, only from the compiler.

    python -m valkyrie.main --gin_file=gin/v4_32.gin --run_mode=precompile --topology=v4:4x4x2

Nothing is allocated and no data is read: the train step of every phase is compiled from shapes. If
a step needs more memory than a device has, changes that reduce it are compiled, too.
"""

from collections.abc import Callable, Mapping, Sequence
import json
import math
import operator
import pathlib
from typing import Any

import gin
import jax

from valkyrie.config import paths
from valkyrie.config.computation import may_change_on_resume
from valkyrie.config.load import override_gin
from valkyrie.config.parse import FLAG
from valkyrie.config.ranges import PositiveFloat, PositiveInt64
from valkyrie.config.record import bindings
from valkyrie.errors import ConfigurationError
from valkyrie.lab.certificates import certificate, gpu_nodes, topologies
from valkyrie.lab.certificates.certificate import gib
from valkyrie.monitoring import chips
from valkyrie.monitoring.waiting import doing
from valkyrie.sharding import ambient
from valkyrie.sharding.partitioner import Partitioner
from valkyrie.storage import whole_file
from valkyrie.training import kernel_check
from valkyrie.training.curriculum import Curriculum
from valkyrie.training.setup import Setup, StepSettings

Certificate = Mapping[str, Any]
Change = tuple[str, ...]  # flags to add to a run: --gin_file=FILE and --gin.NAME=VALUE

_FILE = '--gin_file='


@may_change_on_resume()
@gin.configurable
def precompile(
  model_dir: str,
  topology: str | None = None,
  *,
  settings: Callable[[], StepSettings],
  hbm_bytes: PositiveInt64 | None = None,
  dcn_bytes_per_second: PositiveFloat | None = None,
  layouts: Sequence[str] | None = None,
) -> None:
  """Compiles the train step of every phase; writes and prints a certificate of each.

  Args:
    model_dir: the directory of precompile.json.
    topology: a TPU slice, such as 'v4:4x4x2', or several, such as '2xv4:4x4x2'; GPUs of a
      node, such as 'h100:8', or several nodes, such as '4xh100:8'; None means the devices of this
      machine.
    hbm_bytes: the memory of a device that a program may use; None takes what the chip or GPU has.
    dcn_bytes_per_second: what a chip sends over the network between slices or nodes; None takes
      the chip's.
    layouts: gin files of partitioners to try if a step needs more; None takes all of gin/partition.

  Raises:
    ConfigurationError: a step needs more memory than a device has; it recommends a change.
  """
  devices = jax.devices() if topology is None else topologies.devices(topology)
  offered_bytes = hbm_bytes or _memory_of(devices[0], topology)

  def certificates(only: int | None = None) -> list[Certificate]:
    """One for each phase, or for phase `only`; phases of one shape share a program."""
    # No chip is here to compare the kernels on.
    setup = Setup(settings())
    setup = setup.with_kernels(kernel_check.asked_lengths(setup))
    phases = dict(enumerate(setup.curriculum.forms))
    if only is not None:
      phases = {only: phases[only]}
    by_shape = {}
    result = []
    for number, phase in phases.items():
      if phase.shape not in by_shape:
        with doing(f'compiling a step of {phase.chunks} x {phase.chunk_size} tokens per row'):
          by_shape[phase.shape] = certificate.compile_step(
            setup, phase, topology, offered_bytes, dcn_bytes_per_second
          )
      result.append({'phase': number, **by_shape[phase.shape]})
    return result

  with ambient.within(devices=devices):
    all_certificates = certificates()
    path = pathlib.Path(model_dir) / 'precompile.json'
    content = json.dumps(all_certificates, indent=2) + '\n'
    whole_file.write_version(path, content.encode())
    for each in all_certificates:
      print(certificate.text(each), flush=True)
    steps = settings().optimizer().train_steps
    sentence = duration(settings().curriculum(), steps, all_certificates)
    if sentence:
      print(sentence, flush=True)
    too_large = [each for each in all_certificates if each['fits'] is False]
    if too_large:
      worst = max(too_large, key=lambda c: c['total_bytes'] or 0)
      report = advice(
        worst,
        layouts,
        ask=lambda: certificates(worst['phase'])[0],
        partitioner=lambda: settings().partitioner(),
      )
      raise ConfigurationError(report)


def _memory_of(device: Any, topology: str | None) -> int | None:
  """The bytes of a device that a program may use; None if they are unknown, as on a CPU."""
  nodes = gpu_nodes.named(topology)
  if nodes is not None:
    return nodes.usable_bytes
  chip = chips.of_kind(device.device_kind)
  if chip and chip.hbm_bytes:
    return chip.hbm_bytes
  if topology is not None:
    return None
  statistics = jax.local_devices()[0].memory_stats() or {}
  return statistics.get('bytes_limit')  # a GPU has a pool of this size


def duration(curriculum: Curriculum, steps: int, found: Sequence[Certificate]) -> str | None:
  """How long a run of so many steps takes, if each form of a phase has an estimate."""
  kinds = ('estimated_instruction_seconds', 'estimated_cycles_seconds')
  counts = curriculum.counts(steps)
  totals = []
  for kind in kinds:
    if not all(kind in each for each in found):
      return None
    seconds = [each[kind] for each in found]
    totals.append(sum(map(operator.mul, counts, seconds)))
  hours = ' to '.join(f'{total / 3600:,.1f}' for total in sorted(totals))
  return (
    f'{steps:,} steps take {hours} hours by these estimates, without evaluations, saves and waits '
    'for data'
  )


def advice(
  worst: Certificate,
  layouts: Sequence[str] | None,
  ask: Callable[[], Certificate],
  partitioner: Callable[[], Partitioner],
) -> str:
  """A report of the memory of the step, the effect of each change, and the change to make.

  `worst` is the certificate of the step with the largest memory; `ask` returns the certificate of
  the step of the current bindings, and `partitioner` their layout. For `layouts` see `precompile`.
  """
  lines = [_memory_sentence(worst)]
  tried = []
  unchanged = _identity(partitioner())
  for changes in _knobs(worst, layouts):
    for change in changes:
      files = [flag.removeprefix(_FILE) for flag in change if flag.startswith(_FILE)]
      flags = [flag for flag in change if flag.startswith(FLAG)]
      try:
        with override_gin(files, flags):
          if _identity(partitioner()) == unchanged:
            continue  # the same layout
          changed = ask()
      except ConfigurationError as error:
        reason, _, _ = str(error).partition('\n')
        changed = {'fits': False, 'total_bytes': None, 'not_possible': reason}
      line = f'{" ".join(change)}: {_outcome(changed)}'
      print(line, flush=True)
      lines.append(f'  {line}')
      tried.append((change, changed))
      if changed['fits']:
        break
  return '\n'.join([*lines, best(tried, worst)])


def _memory_sentence(worst: Certificate) -> str:
  """The beginning of the report: the memory that a step needs, and what there is."""
  size = worst['total_bytes']
  needed = gib(size) if size else 'more memory'
  sentence = f'Phase {worst["phase"]} needs {needed} per device. '
  if worst['hbm_bytes']:
    sentence += f'A device has {gib(worst["hbm_bytes"])}. '
  return sentence + 'These changes were compiled:'


def best(tried: Sequence[tuple[Change, Certificate]], unchanged: Certificate) -> str:
  """A sentence with the fastest change that fits, or else with the one of the smallest memory."""
  fitting = []
  smaller = []
  most = unchanged['total_bytes'] or math.inf
  for change, changed in tried:
    flags = ' '.join(change)
    size = changed['total_bytes']
    if changed['fits']:
      fast, _ = _speeds(changed)
      fitting.append((fast, -size, flags))
    elif size and size < most:
      smaller.append((size, flags))
  if fitting:
    _, _, flags = max(fitting)
    return f'Recommended: add {flags}'
  if smaller:
    size, flags = min(smaller)
    return f'No single change is enough. Recommended: add {flags}, which reduces it to {gib(size)}'
  return 'No change reduces it. Use a smaller model or more chips.'


def _identity(layout: Partitioner) -> tuple[Any, ...]:
  """The current bindings with the resolved layout, which several bindings can give."""
  others = {
    name: value for name, value in bindings().items() if not name.startswith('Partitioner.')
  }
  return others, layout.computation


def _outcome(changed: Certificate) -> str:
  """What a change gives, as a part of a line."""
  if 'not_possible' in changed:
    return f'not possible: {changed["not_possible"]}'
  size = changed['total_bytes']
  memory = gib(size) if size else 'more than a device has'
  verdict = 'fits' if changed['fits'] else 'does not fit'
  outcome = f'{memory}, {verdict}'
  fast, slow = _speeds(changed)
  if fast:
    outcome += f', estimated {slow:,.0f} to {fast:,.0f} tokens/s per chip'
  return outcome


def _speeds(certified: Certificate) -> Sequence[float]:
  return certified.get('estimated_tokens_per_second_per_chip', (0.0, 0.0))


def _knobs(worst: Certificate, layouts: Sequence[str] | None) -> list[list[Change]]:
  """The changes of each knob, in ascending order of their effect."""
  shorter_chunks = []
  for parts in (2, 4, 8, 16):  # into which a chunk is divided
    if worst['chunk_size'] % parts == 0:
      change = (
        f'{FLAG}chunk_size={worst["chunk_size"] // parts}',
        f'{FLAG}chunks={parts * worst["chunks"]}',
        f'{FLAG}backprop_chunks={parts * worst["backprop_chunks"]}',
      )
      shorter_chunks.append(change)
  knobs: list[list[Change]] = [shorter_chunks]
  knobs.append([(f"{FLAG}LanguageModel.remat_policy='nothing'",)])
  if bindings().get('StepSettings.remat_chunks') is False:
    knobs.append([(f'{FLAG}StepSettings.remat_chunks=True',)])
  if worst['rows'] > 1:
    half = worst['rows'] // 2
    knobs.append([(f'{FLAG}batch_size={half}',)])
  if layouts is None:
    files = sorted((paths.GIN / 'partition').glob('*.gin'))
    layouts = [f'gin/partition/{file.name}' for file in files if file.stem != 'single']
  for layout in layouts:
    knobs.append([(f'{_FILE}{layout}',)])
  return knobs
