"""The run mode `precompile`: the memory, communication and time of a run, only from the compiler.

    python -m valkyrie.main --gin_file=gin/v4_32.gin --run_mode=precompile --topology=v4:4x4x2

Nothing is allocated and no data is read: the train step of every phase is compiled from shapes. If
one needs more memory than a device has, changes that reduce it are compiled, too.
"""

from collections.abc import Callable, Mapping, Sequence
import json
import pathlib
from typing import Any

import gin
import jax

from valkyrie.config import paths
from valkyrie.config.computation import may_change_on_resume
from valkyrie.config.load import override_gin
from valkyrie.config.parse import FLAG
from valkyrie.config.record import bindings
from valkyrie.errors import ConfigurationError
from valkyrie.lab.certificates import certificate, topologies
from valkyrie.lab.certificates.certificate import gib
from valkyrie.monitoring import chips
from valkyrie.monitoring.waiting import doing
from valkyrie.sharding import ambient
from valkyrie.sharding.partitioner import Partitioner
from valkyrie.storage import whole_file
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
  hbm_bytes: int | None = None,
  dcn_bytes_per_second: float | None = None,
  layouts: Sequence[str] | None = None,
) -> None:
  """Compiles the train step of every phase; writes and prints a certificate of each.

  If a step needs more memory, a ConfigurationError recommends a change.

  Args:
    model_dir: the directory of precompile.json.
    topology: a TPU slice, such as 'v4:4x4x2', or several, such as '2xv4:4x4x2'; None means the
      devices of this machine.
    hbm_bytes: the memory of a device that a program may use; None takes what the chip or GPU has.
    dcn_bytes_per_second: what a chip sends over the network between slices; None takes the chip's.
    layouts: gin files of partitioners to try if a step needs more; None takes all of gin/partition.
  """
  devices = jax.devices() if topology is None else topologies.devices(topology)
  chip = chips.of_kind(devices[0].device_kind)
  offered = hbm_bytes or (chip and chip.hbm_bytes)
  if not offered and topology is None:  # a GPU names the size of its pool, a CPU nothing
    offered = (jax.local_devices()[0].memory_stats() or {}).get('bytes_limit')

  def certificates(only: int | None = None) -> list[Certificate]:
    """One for each phase, or for phase `only`; phases of one shape share a program."""
    setup = Setup(settings())
    phases = dict(enumerate(setup.curriculum.forms))
    chosen = phases if only is None else {only: phases[only]}
    programs = {phase.shape: phase for phase in chosen.values()}
    found = {}
    for shape, phase in programs.items():
      step = f'{phase.chunks} x {phase.chunk_size} tokens per row'
      with doing(f'compiling a step of {step}'):
        found[shape] = certificate.of_step(setup, phase, topology, offered, dcn_bytes_per_second)
    return [{'phase': number, **found[phase.shape]} for number, phase in chosen.items()]

  with ambient.within(devices=devices, kernels=range(2**31)):  # no chip is here to compare them
    all_found = certificates()
    path = pathlib.Path(model_dir) / 'precompile.json'
    text = json.dumps(all_found, indent=2) + '\n'
    whole_file.write_version(path, text.encode())
    for found in all_found:
      print(certificate.text(found), flush=True)
    if said := duration(settings().curriculum(), settings().optimizer().train_steps, all_found):
      print(said, flush=True)
    if over := [found for found in all_found if found['fits'] is False]:
      worst = max(over, key=lambda c: c['total_bytes'] or 0)
      raise ConfigurationError(
        advice(
          worst,
          layouts,
          ask=lambda: certificates(worst['phase'])[0],
          partitioner=lambda: settings().partitioner(),
        )
      )


def duration(curriculum: Curriculum, steps: int, found: Sequence[Certificate]) -> str | None:
  """How long a run of so many steps takes, if each form of a phase has an estimate."""
  kinds = ('estimated_instruction_seconds', 'estimated_cycles_seconds')
  if not all(kind in one for one in found for kind in kinds):
    return None
  counts = curriculum.counts(steps)
  sums = [sum(n * one[kind] for n, one in zip(counts, found, strict=True)) for kind in kinds]
  hours = ' to '.join(f'{seconds / 3600:,.1f}' for seconds in sorted(sums))
  return (
    f'{steps:,} steps take {hours} hours by these estimates, without evaluations, saves and the '
    'wait for data'
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
  needs = gib(worst['total_bytes']) if worst['total_bytes'] else 'more memory'
  lines = [
    f'Phase {worst["phase"]} needs {needs} per device. '
    + (f'A device has {gib(worst["hbm_bytes"])}. ' if worst['hbm_bytes'] else '')
    + 'These changes were compiled:'
  ]
  tried = []
  before = _run(partitioner())
  for knob in _knobs(worst, layouts):
    for change in knob:
      files = [flag.removeprefix(_FILE) for flag in change if flag.startswith(_FILE)]
      try:
        with override_gin(files, [flag for flag in change if flag.startswith(FLAG)]):
          if _run(partitioner()) == before:
            continue  # the same layout
          found = ask()
      except ConfigurationError as error:
        refused = str(error).partition('\n')[0]
        found = {'fits': False, 'total_bytes': None, 'not_possible': refused}
      lines.append(f'  {" ".join(change)}: {_outcome(found)}')
      print(lines[-1].strip(), flush=True)
      tried.append((change, found))
      if found['fits']:
        break
  return '\n'.join([*lines, best(tried, worst)])


def best(tried: Sequence[tuple[Change, Certificate]], before: Certificate) -> str:
  """The fastest change that fits, or else the one with the smallest memory."""
  fitting = [
    (_speed(found)[0], -found['total_bytes'], ' '.join(change))
    for change, found in tried
    if found['fits']
  ]
  if fitting:
    return f'Recommended: add {max(fitting)[-1]}'
  less = [
    (found['total_bytes'], ' '.join(change))
    for change, found in tried
    if found['total_bytes'] and found['total_bytes'] < (before['total_bytes'] or float('inf'))
  ]
  if less:
    size, change = min(less)
    return f'No single change is enough. Recommended: add {change}, which reduces it to {gib(size)}'
  return 'No change reduces it. Use a smaller model or more chips.'


def _run(layout: Partitioner) -> tuple[Any, ...]:
  """The current bindings with the resolved layout, which several bindings can give."""
  others = {
    name: found for name, found in bindings().items() if not name.startswith('Partitioner.')
  }
  return others, layout.computation


def _outcome(found: Certificate) -> str:
  if 'not_possible' in found:
    return f'not possible: {found["not_possible"]}'
  size = gib(found['total_bytes']) if found['total_bytes'] else 'more than a device has'
  fast, slow = _speed(found)
  by_estimate = f', estimated {slow:,.0f} to {fast:,.0f} tokens/s per chip' if fast else ''
  return f'{size}, {"fits" if found["fits"] else "does not fit"}{by_estimate}'


def _speed(found: Certificate) -> Sequence[float]:
  return found.get('estimated_tokens_per_second_per_chip', (0.0, 0.0))


def _knobs(worst: Certificate, layouts: Sequence[str] | None) -> list[list[Change]]:
  """The changes of each knob, in ascending order of their effect."""
  shorter = []
  for parts in (2, 4, 8, 16):  # into which a chunk is divided
    longer = (f'{FLAG}{name}={parts * worst[name]}' for name in ('chunks', 'backprop_chunks'))
    if worst['chunk_size'] % parts == 0:
      shorter.append((f'{FLAG}chunk_size={worst["chunk_size"] // parts}', *longer))
  knobs = [shorter, [(f"{FLAG}LanguageModel.remat_policy='nothing'",)]]
  if bindings().get('StepSettings.remat_chunks') is False:
    knobs.append([(f'{FLAG}StepSettings.remat_chunks=True',)])
  if worst['rows'] > 1:
    knobs.append([(f'{FLAG}batch_size={worst["rows"] // 2}',)])
  if layouts is None:
    known = sorted(path.stem for path in (paths.GIN / 'partition').glob('*.gin'))
    layouts = [f'gin/partition/{name}.gin' for name in known if name != 'single']
  return knobs + [[(f'{_FILE}{layout}',)] for layout in layouts]
