"""The trials of a comparison: ordinary runs in folders of its results, and what they cost."""

import argparse
from collections.abc import Iterable, Mapping
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
  """A trial failed; the message says why and what to do."""


def candidate(text: str) -> Candidate:
  """Reads --candidate."""
  name, _, statements = map(str.strip, text.partition(':'))
  if name.endswith('.gin'):
    statements = f'include {name!r}'
    name = pathlib.PurePath(name).stem
  lines = []
  for statement in statements.split(';'):
    lines.append(f'{statement.strip()}\n')
  return Candidate(name, ''.join(lines))


def peer(text: str) -> Candidate:
  """Reads --peer."""
  name, _, command = map(str.strip, text.partition(':'))
  program = shlex.split(command)
  return Candidate(name, program=tuple(program))


def make_trial(
  flags: argparse.Namespace,
  candidate: Candidate,
  title: str,
  steps: int,
  macros: Mapping[str, Any],
) -> Trial:
  """The trial in RESULTS/CANDIDATE/TITLE; raises a ConfigurationError as `load_gin` does.

  macros: values of macros and bindings, by name, which override all others.
  """
  imports = flags.gin_allow_import
  files = [*flags.gin_file]
  candidate_folder = flags.results / candidate.name
  candidate_file = candidate_folder / 'candidate.gin'
  if candidate.statements.strip():
    files.append(str(candidate_file))
    whole_file.write_version(candidate_file, candidate.statements.encode())
  settings = flags.gin + _gin_flags(macros)
  statements = parse.read_statements(files, settings, (), imports)
  _check_only_one_sets(flags, candidate, candidate_file, statements)
  scaled = _scale_steps(parse.macros_of(statements), steps)
  others = {name: value for name, value in scaled.items() if name not in macros}
  settings += _gin_flags(others)
  configuration = Configuration(
    lambda: load_gin(files, settings, allowed_imports=imports, modules=CONFIGURABLE_MODULES)
  )
  with configuration.installed():
    bindings = record.bindings()
  folder = candidate_folder / title
  file_flags = [f'--gin_file={file}' for file in files]
  import_flags = [f'--gin_allow_import={package}' for package in imports]
  run_flags = [
    *file_flags,
    *settings,
    *import_flags,
    f'--model_dir={folder}',
  ]
  return Trial(folder, candidate.program, run_flags, steps, bindings)


def _gin_flags(values: Mapping[str, Any]) -> list[str]:
  return [f'{parse.FLAG}{name}={value}' for name, value in values.items()]


def _check_only_one_sets(
  flags: argparse.Namespace,
  candidate: Candidate,
  candidate_file: pathlib.Path,
  statements: Iterable[parse.Statement],
) -> None:
  """Raises a ConfigurationError if a candidate binds what the flags bind for all candidates."""
  set_for_all = {'seed', *dict(flags.over)}
  statements_of_flags = parse.read_statements((), flags.gin)
  set_for_all |= {statement.name for statement in statements_of_flags}
  for statement in statements:
    is_of_candidate = statement.where.startswith(f'{candidate_file}:')
    if not (statement.is_binding and is_of_candidate):
      continue
    if statement.name in set_for_all:
      raise ConfigurationError(
        f'The candidate {candidate.name} sets {statement.name}, but --gin.{statement.name}, --over '
        'or --seeds sets it for all candidates. Remove it from the candidate or from the flags.'
      )


def _scale_steps(macros: Mapping[str, parse.Statement], steps: int) -> dict[str, int]:
  """The macros that count steps, in proportion for a run of so many steps."""
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
  scaled = {}
  for name, value in counts.items():
    least = min(value, 1)
    scaled[name] = max(least, round(value * share))
  return scaled


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
    value_before = before.get(name)
    value_after = after.get(name)
    if value_before != value_after:
      raise ConfigurationError(
        f'{trial.folder} has a run with {name} = {value_before!r}, which is '
        f'{value_after!r} in this comparison. Name other --results, or delete that folder.'
      )
  if run.evaluations and run.evaluations[-1]['step'] == trial.steps:
    return run
  return None


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
  program = trial.program
  if trial.program == VALKYRIE:
    program = packages.start(*VALKYRIE)
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
      lines = log.read_text(errors='replace').splitlines()
      end = '\n  '.join(lines[-5:])
      raise Failed(
        f'exit code {code}. The end of {log}:\n  {end}\n'
        'If these lines advise a flag, add it to the command of the trial, and run the comparison '
        f'again when the trial is done:\n  {shlex.join(command)}'
      )
    run = recorded(trial)
    if run:
      return run
  raise Failed(f'{trial.folder} has no evaluation of step {trial.steps}. Its output is in {log}.')


def _watched(process: subprocess.Popen[bytes], trial: Trial) -> int:
  """The exit code of a process, for which it waits and says every 15 seconds how far it is."""
  while True:
    try:
      return process.wait(_SECONDS_BETWEEN_LINES)
    except subprocess.TimeoutExpired:
      steps = json_lines.by_step(trial.folder / 'metrics.jsonl')
      done = max(steps, default=0)
      say(f'  {done:,} of {trial.steps:,} steps')


def say(text: str) -> None:
  """Prints a line about the progress of the comparison, with the time of day."""
  print(time.strftime('%H:%M:%S'), text, file=sys.stderr, flush=True)


def costs(run: Run) -> dict[str, float | None]:
  """{budget: its amount in a step}, without compilation; None if it is unknown."""
  seconds_by_phase: dict[int, list[float]] = {}
  for line in run.lines:
    of_phase = seconds_by_phase.setdefault(line.get('phase', 0), [])
    of_phase.append(line['step_seconds'])
  # Slow moments of the machine leave a median as it is; each phase has its share of the lines.
  typical_seconds = []
  for seconds in seconds_by_phase.values():
    typical = statistics.median(seconds)
    typical_seconds += [typical] * len(seconds)
  seconds_of_step = statistics.fmean(typical_seconds)
  step_costs: dict[str, float | None] = {'seconds': seconds_of_step}
  last = run.lines[-1]
  for budget in ('tokens', 'flops'):
    amount = last[budget]
    step_costs[budget] = None
    if amount:
      step_costs[budget] = amount / last['step']
  return step_costs
