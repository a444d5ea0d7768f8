"""Trains candidates for the same seconds, tokens or FLOPs, and compares what they have learned.

  scripts/compare --gin_file=gin/tiny_cpu.gin --candidate=hybrid \\
      --candidate='s5: local/Block.mixers = (@GatedRecurrence,)' \\
      --over=learning_rate=1.5e-3,3e-3 --seconds=90 --results=runs/s5

A candidate is "NAME: STATEMENTS", gin statements between semicolons that follow the --gin_file; or
NAME.gin, a gin file; or NAME, the --gin_file as it is. --gin.NAME=VALUE is for all candidates.
@FILE reads further arguments, one in each line.

Each trial is an ordinary run in a folder of --results, with its own `seed` and `train_steps`.
Macros that count steps, such as `warmup_steps`, and `eval_every` keep their shares of the steps. A
run of {steps} steps of each candidate comes first and measures a step. Then each candidate is
trained with every value of --over and the first seed, and with the other seeds at the values that
validate best.

The same command continues after any interruption. compare.md and compare.html in --results have the
findings so far. A candidate whose trial fails is left out, and the exit code is 1 at the end.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
import functools
import itertools
import pathlib
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from typing import Any, NamedTuple

from valkyrie.comparison.findings import TITLES, Outcome, best, bits, write
from valkyrie.config import parse, record
from valkyrie.config.load import Configuration, load_gin
from valkyrie.config.modules import CONFIGURABLE_MODULES
from valkyrie.distributed import console
from valkyrie.errors import ConfigurationError, Diverged, Preempted, ValkyrieError, message_of
from valkyrie.monitoring.html_report import Run, read_run
from valkyrie.storage import whole_file

REHEARSED = 40  # steps
VALKYRIE = ('valkyrie.main',)  # a module of this Python


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
    name, statements = pathlib.PurePath(name).stem, f'include {name!r}'
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
  files, imports = [*flags.gin_file], flags.gin_allow_import
  if candidate.statements.strip():
    files.append(str(flags.results / candidate.name / 'candidate.gin'))
    whole_file.write(pathlib.Path(files[-1]), candidate.statements)
  given = [*flags.gin, *(f'{parse.FLAG}{name}={value}' for name, value in macros.items())]
  statements = parse.read(files, given, (), imports)
  of_all = {'seed', *dict(flags.over), *(each.name for each in parse.read((), flags.gin))}
  for bound in (each for each in statements if each.is_binding and each.name in of_all):
    if bound.where.startswith(f'{flags.results / candidate.name}/candidate.gin:'):
      raise ConfigurationError(
        f'The candidate {candidate.name} sets {bound.name}, but --gin.{bound.name}, --over or '
        '--seeds sets it for all candidates. Leave one of them out.'
      )
  own = _stretched(parse.macros_of(statements), steps)
  given += [f'{parse.FLAG}{name}={value}' for name, value in own.items() if name not in macros]
  modules = CONFIGURABLE_MODULES
  configuration = Configuration(
    lambda: load_gin(files, given, allowed_imports=imports, modules=modules)
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
  counts = {
    name: value
    for name in macros
    if (name.endswith('_steps') or name == 'eval_every')
    and isinstance(value := parse.resolve(parse.Macro(name), macros)[0], int)
  }
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
  run, kept = read_run(trial.folder), _program_file(trial)
  before, after = (run.bindings, trial.bindings) if run.bindings else ({}, {})
  if kept.exists():
    before = {**before, 'program': kept.read_text()}
    after = {**after, 'program': shlex.join(trial.program)}
  for name in sorted({*before, *after}):
    then, now = before.get(name), after.get(name)
    if then != now:
      raise ConfigurationError(
        f'{trial.folder} has a run with {name} = {then!r}, which is {now!r} in this comparison. '
        'Name other --results, or delete that folder.'
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
  python = [sys.executable, '-m'] if trial.program == VALKYRIE else []
  command = [*python, *trial.program, *trial.flags]
  # A run that was stopped during its last evaluation has no step left, only this evaluation.
  for mode in ([], ['--run_mode=eval']):
    with log.open('a') as output:
      process = subprocess.Popen(command + mode, stdout=output, stderr=output)
      try:
        code = process.wait()
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


def costs(run: Run) -> dict[str, float | None]:
  """{budget: its amount in a step}, without compilation; None if it is unknown."""
  phases: dict[int, list[float]] = {}
  for line in run.lines:
    phases.setdefault(line.get('phase', 0), []).append(line['step_seconds'])
  # Slow moments of the machine leave a median as it is; each phase has its share of the lines.
  seconds = [statistics.median(of_phase) for of_phase in phases.values() for _ in of_phase]
  last = run.lines[-1]
  others = {name: last[name] and last[name] / last['step'] for name in ('tokens', 'flops')}
  return {'seconds': statistics.fmean(seconds), **others}


class Comparison:
  """The trials of a comparison, in turns, so that slow hours of the machine affect all candidates.

  Attributes:
    outcomes: of the trials that are done, by budget.
    failed: the names of candidates with a trial that failed.
  """

  def __init__(self, flags: argparse.Namespace):
    """Checks every configuration, before anything is trained, by a ConfigurationError."""
    self._flags, self._left = flags, [*flags.candidates]
    self.outcomes: dict[str, list[Outcome]] = {n: [] for n in TITLES if getattr(flags, n)}
    self.failed: list[str] = []
    over = dict(flags.over)
    self._choices = [
      dict(zip(over, each, strict=True)) for each in itertools.product(*over.values())
    ]
    for choice, candidate in itertools.product(self._choices, self._left):
      trial_of(flags, candidate, 'checked', REHEARSED, choice)
    self._paces: dict[tuple[str, str], dict[str, float | None]] = {}  # by name and title

  def run(self) -> None:
    """Trains what is not done, and writes the findings after each turn."""
    flags, search = self._flags, next(iter(self.outcomes))
    first, *further = flags.seeds
    for values in map(_timed, self._choices):
      title, macros = _title('rehearsal', values), {'log_every': 4, 'eval_every': REHEARSED}
      rehearsal = functools.partial(
        trial_of, flags, title=title, steps=REHEARSED, macros={**values, **macros}
      )
      for name, run in self._turn(rehearsal):
        self._paces[name, title] = costs(run) if run else {}
        bits(run, flags.context)  # raises a DataError if it scores nothing
    for choice in self._choices:
      self._train(search, lambda _, choice=choice: choice, first)
    tried = [*self.outcomes[search]]

    def chosen(name: str) -> dict[str, str]:
      return best(name, tried, flags.context)

    for budget in self.outcomes:
      for seed in further if budget == search else flags.seeds:
        self._train(budget, chosen, seed)

  def _train(self, budget: str, chosen: Callable[[str], dict[str, str]], seed: int) -> None:
    """One trial of each candidate, with the values that are chosen for its name."""
    amount = getattr(self._flags, budget)

    def trial(candidate: Candidate) -> Trial:
      name, choice = candidate.name, chosen(candidate.name)
      if not (pace := self._paces[name, _title('rehearsal', _timed(choice))].get(budget)):
        raise Failed(f'the {budget} of a step are unknown, or its rehearsal diverged')
      steps, macros = max(1, round(amount / pace)), {**choice, 'seed': seed}
      title = _title(f'{budget}={amount:.12g}', macros)
      return trial_of(self._flags, candidate, title, steps, macros)

    for name, run in self._turn(trial):
      self.outcomes[budget].append(Outcome(name, chosen(name), seed, run))
    write(self._flags.results, vars(self._flags), self.outcomes, self._flags.context)

  def _turn(self, trial_of: Callable[[Candidate], Trial]) -> list[tuple[str, Run | None]]:
    """Trains a trial of each candidate that is left -> their names and what was recorded."""
    done = []
    for candidate in [*self._left]:
      try:
        trial = trial_of(candidate)
        if not (run := recorded(trial)):
          _say(f'{time.strftime("%H:%M")} {trial.folder}: {trial.steps} steps')
          run = train(trial)
        done.append((candidate.name, run))
      except Failed as error:
        _say(f'{candidate.name} is left out: {error}')
        self._left.remove(candidate)
        self.failed.append(candidate.name)
        for outcomes in self.outcomes.values():
          outcomes[:] = [o for o in outcomes if o.candidate != candidate.name]
    return done


def _timed(choice: Mapping[str, str]) -> dict[str, str]:
  """The values that may change the time of a step."""
  return {name: value for name, value in choice.items() if name != 'learning_rate'}


def _title(first: str, values: Mapping[str, Any]) -> str:
  """The name of a folder."""
  parts = [first, *(f'{name}={value}' for name, value in values.items())]
  return re.sub(r'[^\w.=,+-]', '_', ','.join(parts))


def parse_flags(arguments: Sequence[str] | None) -> argparse.Namespace:
  """The flags, with `candidates` and the --gin.NAME=VALUE `gin`; ends with 2 if one is wrong."""
  parser = argparse.ArgumentParser(
    'valkyrie-compare',
    usage='%(prog)s --gin_file=FILE --candidate=CANDIDATE {--seconds=S | --tokens=T} [...]',
    description=(__doc__ or '').format(steps=REHEARSED),
    formatter_class=argparse.RawDescriptionHelpFormatter,
    fromfile_prefix_chars='@',
    allow_abbrev=False,
  )
  parser.convert_arg_line_to_args = lambda arg_line: [arg_line] * bool(re.match('--|@', arg_line))
  many: dict[str, Any] = {'action': 'append', 'default': []}

  def add(name: str, text: str, kind: Callable[[str], Any] = str, **options: Any) -> None:
    parser.add_argument(f'--{name}', help=text, type=kind, **options)

  add('gin_file', 'a gin file of all candidates; repeatable', **many)
  add('gin_allow_import', 'a package that gin files may import; repeatable', **many)
  add('text', 'a text of your own: a file, a folder or a pattern, see docs/data.md')
  add('candidate', 'see above; repeatable', candidate, dest='candidates', **many)
  add('peer', '"NAME: COMMAND", another program with the flags and the files of a run', peer,
      dest='candidates', action='append')  # fmt: skip
  add('only', 'names of candidates, separated by commas (default: all)')
  add('over', 'NAME=VALUE,VALUE of a macro or a binding; repeatable', _values, **many)
  add('seconds', 'of training, without startup, compilation and validation', float)
  add('tokens', 'of training', int)
  add('flops', 'of training, forward and backward', float)
  add('seeds', 'separated by commas (default: 0,1,2)', default='0,1,2')
  add('context', 'score targets with so many tokens before them: a power of 2', int, default=1)
  add('results', 'default: %(default)s', pathlib.Path, default=pathlib.Path('runs/compare'))
  flags, others = parser.parse_known_args(arguments)
  flags.gin = [flag for flag in others if flag.startswith(parse.FLAG)]
  if unknown := [flag for flag in others if flag not in flags.gin]:
    parser.error(f'{unknown[0]}: unknown flag')
  numbers = [getattr(flags, name) for name in TITLES if getattr(flags, name) is not None]
  if not numbers or not all(0 < number < float('inf') for number in numbers):
    parser.error('pass --seconds=S, --tokens=T or --flops=F, more than 0')
  if flags.context < 1 or flags.context & (flags.context - 1):
    parser.error(f'--context={flags.context}: expected a power of 2, such as 512')
  if not re.fullmatch(r'\d+(,\d+)*', flags.seeds):
    parser.error(f'--seeds={flags.seeds}: expected numbers separated by commas')
  flags.seeds = list(dict.fromkeys(map(int, flags.seeds.split(','))))
  if flags.text:
    flags.gin_file = [*flags.gin_file, 'gin/data/text.gin']
    text = {'text': repr(flags.text), 'held_out': 0.1, 'text_cut': 2048}
    flags.gin[:0] = [f'{parse.FLAG}{name}={value}' for name, value in text.items()]
  if not flags.candidates and flags.gin_file:
    flags.candidates = [Candidate(pathlib.PurePath(flags.gin_file[0]).stem)]
  names = [candidate.name for candidate in flags.candidates]
  only = flags.only.split(',') if flags.only else names
  if unknown := {*only} - {*names}:
    parser.error(f'--only={unknown.pop()}: the candidates are {", ".join(names)}')
  for name in names:
    if not re.fullmatch(r'\w[\w .+()=-]*', name) or names.count(name) > 1:
      parser.error(f'candidate {name!r}: expected a name of its own, of letters and digits')
  flags.candidates = [candidate for candidate in flags.candidates if candidate.name in only]
  return flags


def _values(text: str) -> tuple[str, list[str]]:
  """Reads --over."""
  name, _, values = text.partition('=')
  try:
    found = [value for item in parse.parse(f'values = [{values}]') for value in item.value]
  except SyntaxError:
    found = []
  if not (name and found):
    raise argparse.ArgumentTypeError(f'{text}: expected NAME=VALUE,VALUE as in gin')
  return name, list(dict.fromkeys(map(repr, found)))


def _say(text: str) -> None:
  print(text, file=sys.stderr, flush=True)


@console.lasting_streams()
def main(arguments: Sequence[str] | None = None) -> int:
  """Runs a comparison, and prints the findings; returns the exit code."""
  flags = parse_flags(arguments)
  if arguments is None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
  try:
    comparison = Comparison(flags)
    comparison.run()
  except ValkyrieError as error:
    _say(f'valkyrie: {message_of(error)}')
    return error.exit_code
  except KeyboardInterrupt:
    _say('valkyrie: stopped, and saved. The same command continues.')
    return Preempted.exit_code
  if any(comparison.outcomes.values()):
    print((flags.results / 'compare.md').read_text(), flags.results / 'compare.html', sep='\n')
  return 1 if comparison.failed else 0


if __name__ == '__main__':
  sys.exit(main())
