"""The trials of a comparison: ordinary runs in folders of its results, and what they cost."""

import argparse
from collections.abc import Mapping
import pathlib
import shlex
import statistics
import subprocess
import sys
import time
from typing import Any, NamedTuple

from valkyrie import packages
from valkyrie.config import parse, record
from valkyrie.config.load import Configuration, load_gin
from valkyrie.config.modules import CONFIGURABLE_MODULES
from valkyrie.errors import ConfigurationError, Diverged, Preempted
from valkyrie.monitoring import json_lines
from valkyrie.monitoring.recorded_run import Run, read_run
from valkyrie.storage import whole_file

VALKYRIE = ('valkyrie.main',)  # a module of this Python
_SECONDS_BETWEEN_LINES = 15.0


class Candidate(NamedTuple):
  """A name, gin statements, and the program that trains it, with the flags of `valkyrie.main`."""

  name: str
  statements: str = ''
  program: tuple[str, ...] = VALKYRIE


class Trial(NamedTuple):
  """A run to train: its folder, its program and flags, its last step, and all its bindings."""

  folder: pathlib.Path
  program: tuple[str, ...]
  flags: list[str]
  steps: int
  bindings: dict[str, Any]


class Failed(Exception):
  """A trial did not end well."""


def candidate(text: str) -> Candidate:
  """Reads --candidate."""
  name, _, statements = map(str.strip, text.partition(':'))
  if name.endswith('.gin'):
    statements = f'include {name!r}'
    name = pathlib.PurePath(name).stem
  return Candidate(name, ''.join(f'{line.strip()}\n' for line in statements.split(';')))


def peer(text: str) -> Candidate:
  """Reads --peer."""
  name, _, command = map(str.strip, text.partition(':'))
  return Candidate(name, program=tuple(shlex.split(command)))


def trial_of(
  flags: argparse.Namespace, candidate: Candidate, title: str, steps: int, macros: Mapping[str, Any]
) -> Trial:
  """The trial in RESULTS/CANDIDATE/TITLE; raises a ConfigurationError as `load_gin` does.

  macros: values of macros and bindings, by name, which override all others.
  """
  imports = flags.gin_allow_import
  files = [*flags.gin_file]
  if candidate.statements.strip():
    files.append(str(flags.results / candidate.name / 'candidate.gin'))
    whole_file.write_version(pathlib.Path(files[-1]), candidate.statements.encode())
  given = [*flags.gin, *(f'{parse.FLAG}{name}={value}' for name, value in macros.items())]
  statements = parse.read(files, given, (), imports)
  of_all = {'seed', *dict(flags.over), *(each.name for each in parse.read((), flags.gin))}
  for bound in (each for each in statements if each.is_binding and each.name in of_all):
    if bound.where.startswith(f'{flags.results / candidate.name}/candidate.gin:'):
      raise ConfigurationError(
        f'The candidate {candidate.name} sets {bound.name}, but --gin.{bound.name}, --over or '
        '--seeds sets it for all candidates. Leave one of them out.'
      )
  stretched = _stretched(parse.macros_of(statements), steps)
  given += [
    f'{parse.FLAG}{name}={value}' for name, value in stretched.items() if name not in macros
  ]
  configuration = Configuration(
    lambda: load_gin(files, given, allowed_imports=imports, modules=CONFIGURABLE_MODULES)
  )
  with configuration.installed():
    bindings = record.bindings()
  folder = flags.results / candidate.name / title
  passed = [f'--gin_file={file}' for file in files] + given
  passed += [f'--gin_allow_import={package}' for package in imports]
  passed.append(f'--model_dir={folder}')
  return Trial(folder, candidate.program, passed, steps, bindings)


def _stretched(macros: Mapping[str, parse.Statement], steps: int) -> dict[str, int]:
  """The macros that count steps, for a run of so many steps."""
  counts = {}
  for name in macros:
    if name.endswith('_steps') or name == 'eval_every':
      value, _ = parse.resolve(parse.Macro(name), macros)
      if isinstance(value, int):
        counts[name] = value
  if counts.get('train_steps', 0) < 1:
    raise ConfigurationError(
      'The gin files set no train_steps. Name the --gin_file of a whole run, such as '
      'gin/tiny_cpu.gin.'
    )
  share = steps / counts['train_steps']
  return {name: max(min(value, 1), round(value * share)) for name, value in counts.items()}


def recorded(trial: Trial) -> Run | None:
  """What a trial has recorded if it is done.

  Raises a ConfigurationError if another program recorded it, or if it had other bindings.
  """
  if not (trial.folder / 'metrics.jsonl').exists():
    return None
  run = read_run(trial.folder)
  before = {}
  after = {}
  if run.bindings:
    before = {**run.bindings}
    after = {**trial.bindings}
  kept = _program_file(trial)
  if kept.exists():
    before['program'] = kept.read_text()
    after['program'] = shlex.join(trial.program)
  for name in sorted({*before, *after}):
    if before.get(name) != after.get(name):
      raise ConfigurationError(
        f'{trial.folder} has a run with {name} = {before.get(name)!r}, which is '
        f'{after.get(name)!r} in this comparison. Name other --results, or delete that folder.'
      )
  return run if run.evaluations and run.evaluations[-1]['step'] == trial.steps else None


def _program_file(trial: Trial) -> pathlib.Path:
  """The file that keeps the program of a trial: a configuration does not name it."""
  return pathlib.Path(f'{trial.folder}.program')


def train(trial: Trial) -> Run | None:
  """Trains, or continues, a trial -> what it has recorded; None if it diverged.

  Raises Failed, and Preempted if the trial was asked to stop.
  """
  log = pathlib.Path(f'{trial.folder}.log')
  log.parent.mkdir(parents=True, exist_ok=True)
  whole_file.write(_program_file(trial), shlex.join(trial.program))
  program = packages.start(*VALKYRIE) if trial.program == VALKYRIE else trial.program
  command = [*program, *trial.flags]
  # A run that was stopped during its last evaluation has no step left, only this evaluation.
  for mode in ([], ['--run_mode=eval']):
    with log.open('a') as output:
      process = subprocess.Popen(command + mode, stdout=output, stderr=output)
      try:
        code = _watched(process, trial)
      finally:
        process.terminate()  # it saves; nothing happens if it has ended
        process.wait()
    if code == Diverged.exit_code:
      return None
    if code == Preempted.exit_code:
      raise Preempted(f'{trial.folder} was asked to stop, and saved. Run the same command again.')
    if code:
      end = '\n  '.join(log.read_text(errors='replace').splitlines()[-5:])
      raise Failed(f'exit code {code}. The end of {log}:\n  {end}')
    if run := recorded(trial):
      return run
  raise Failed(f'{trial.folder} has no evaluation of step {trial.steps}; {log} has its output')


def _watched(process: subprocess.Popen[bytes], trial: Trial) -> int:
  """Waits for the process of a trial, and says every 15 seconds how far it is."""
  while True:
    try:
      return process.wait(_SECONDS_BETWEEN_LINES)
    except subprocess.TimeoutExpired:
      steps = json_lines.by_step(trial.folder / 'metrics.jsonl')
      say(f'  {max(steps, default=0):,} of {trial.steps:,} steps')


def say(text: str) -> None:
  """Prints a line about the progress of the comparison, with the time of day."""
  print(time.strftime('%H:%M:%S'), text, file=sys.stderr, flush=True)


def costs(run: Run) -> dict[str, float | None]:
  """{budget: its amount in a step}, without compilation; None if it is unknown."""
  phases: dict[int, list[float]] = {}
  for line in run.lines:
    phases.setdefault(line.get('phase', 0), []).append(line['step_seconds'])
  # Slow moments of the machine leave a median as it is; each phase has its share of the lines.
  seconds = []
  for seconds_of_phase in phases.values():
    seconds += [statistics.median(seconds_of_phase)] * len(seconds_of_phase)
  last = run.lines[-1]
  others = {name: last[name] and last[name] / last['step'] for name in ('tokens', 'flops')}
  return {'seconds': statistics.fmean(seconds), **others}
