"""Trains candidates for the same seconds, tokens or FLOPs, and compares what they have learned.

  scripts/compare --gin_file=gin/tiny_cpu.gin --candidate=hybrid \\
      --candidate='s5: local/Block.mixers = (@GatedRecurrence,)' \\
      --over=learning_rate=1.5e-3,3e-3 --seconds=90 --results=runs/s5

A candidate is "NAME: STATEMENTS", gin statements between semicolons that follow the --gin_file; or
NAME.gin, a gin file; or NAME, the --gin_file as it is. --gin.NAME=VALUE is for all candidates.
@FILE reads further arguments, one in each line.

Each trial is an ordinary run in a folder of --results, with its own `seed` and `train_steps`.
Macros that count steps, such as `warmup_steps`, and `eval_every` keep their shares of the steps. A
candidate is trained with every value of --over and the first seed, and with the other seeds at the
values that validate best. Its newest run says how many steps the next one can make; a run of
{steps} steps comes before the first. A trial that took another amount than planned, by more than a
tenth, is trained once more with other steps.

The same command continues after any interruption. compare.md and compare.html in --results have the
findings so far. A candidate whose trial fails is left out, and the exit code is 1 at the end.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
import itertools
import pathlib
import re
import signal
import sys
from typing import Any

from valkyrie.config import parse
from valkyrie.data.own_text import own_text
from valkyrie.distributed import console
from valkyrie.errors import Preempted, ValkyrieError, message_of, with_home
from valkyrie.lab.comparison import trials
from valkyrie.lab.comparison.findings import (
  TITLES,
  Outcome,
  best,
  bits,
  check_place,
  is_near,
  spent,
  write,
)
from valkyrie.lab.comparison.trials import Candidate, Failed, say, trial_of
from valkyrie.monitoring.recorded_run import Run

REHEARSED = 40  # steps


class Comparison:
  """The trials of a comparison, in turns, so that slow hours of the machine affect all candidates.

  Attributes:
    outcomes: of the trials that are done, by budget.
    failed: the names of candidates with a trial that failed.
  """

  def __init__(self, flags: argparse.Namespace):
    """Checks every configuration, before anything is trained, by a ConfigurationError."""
    check_place(flags.results)
    self._flags = flags
    self._left: list[Candidate] = [*flags.candidates]
    self.outcomes: dict[str, list[Outcome]] = {n: [] for n in TITLES if getattr(flags, n)}
    self.failed: list[str] = []
    # What a step of a candidate costs, as its newest run has shown: by name and timed values.
    self._paces: dict[tuple[str, str], dict[str, float | None]] = {}
    over = dict(flags.over)
    self._choices = [
      dict(zip(over, each, strict=True)) for each in itertools.product(*over.values())
    ]
    for choice, candidate in itertools.product(self._choices, self._left):
      trial_of(flags, candidate, 'checked', REHEARSED, choice)

  def run(self) -> None:
    """Trains what is not done, and writes the findings after each turn."""
    flags = self._flags
    search = next(iter(self.outcomes))
    first, *further = flags.seeds
    self._say_what_comes(search)
    for choice in self._choices:
      self._take_turns(search, lambda _, choice=choice: choice, first)
    tried = [*self.outcomes[search]]

    def chosen(name: str) -> dict[str, str]:
      return best(name, tried, flags.context)

    for budget in self.outcomes:
      for seed in further if budget == search else flags.seeds:
        self._take_turns(budget, chosen, seed)

  def _say_what_comes(self, search: str) -> None:
    """Says how many trials there are, and for how long they train."""
    for budget in self.outcomes:
      tried = len(self._choices) - 1 if budget == search else 0
      count = len(self._left) * (len(self._flags.seeds) + tried)
      amount = getattr(self._flags, budget)
      text = f'{count} trials, each for {TITLES[budget].format(amount)}'
      if budget == 'seconds':
        text += f': {count * amount / 60:,.1f} minutes, and the start and validation of each'
      say(text)

  def _take_turns(self, budget: str, chosen: Callable[[str], dict[str, str]], seed: int) -> None:
    """One trial of each candidate that is left, with the values that are chosen for its name."""
    for candidate in [*self._left]:
      try:
        choice = chosen(candidate.name)
        run = self._tried(candidate, budget, choice, seed)
        self.outcomes[budget].append(Outcome(candidate.name, choice, seed, run))
      except Failed as error:
        self._leave_out(candidate, error)
    write(self._flags.results, vars(self._flags), self.outcomes, self._flags.context)

  def _tried(
    self, candidate: Candidate, budget: str, choice: Mapping[str, str], seed: int
  ) -> Run | None:
    """A trial for the budget; a second one if the first one took another amount than planned."""
    amount = getattr(self._flags, budget)
    macros = {**choice, 'seed': seed}
    title = _title(f'{budget}={amount:.12g}', macros)
    timed = _timed(choice)
    place = candidate.name, _title('rehearsal', timed)
    if place not in self._paces:
      self._rehearse(candidate, timed)
    run = None
    for each in (title, f'{title},repeated'):
      steps = self._steps(place, budget)
      run = self._trained(candidate, each, steps, macros)
      if run is None:
        return None
      self._paces[place] = trials.costs(run)
      took = spent(run, budget)
      if is_near(took, amount) or self._steps(place, budget) == steps:
        return run
      if each == title:
        say(f'  It took {took:.3g} of {amount:.3g} {budget}, so it is repeated with other steps.')
    return run

  def _rehearse(self, candidate: Candidate, timed: Mapping[str, str]) -> None:
    """Measures a step: directly before the first trial, so that both have the same machine."""
    title = _title('rehearsal', timed)
    macros = {**timed, 'log_every': 4, 'eval_every': REHEARSED}
    run = self._trained(candidate, title, REHEARSED, macros)
    if run is None:
      raise Failed('its rehearsal diverged')
    bits(run, self._flags.context)  # raises a DataError if it scores nothing
    self._paces[candidate.name, title] = trials.costs(run)

  def _steps(self, place: tuple[str, str], budget: str) -> int:
    """The steps for which the budget lasts, by the newest run of a candidate's timed values."""
    pace = self._paces[place][budget]
    if not pace:
      raise Failed(f'the {budget} of a step are unknown')
    return max(1, round(getattr(self._flags, budget) / pace))

  def _trained(
    self, candidate: Candidate, title: str, steps: int, macros: Mapping[str, Any]
  ) -> Run | None:
    """What a trial has recorded; it is trained unless it is done. None if it diverged."""
    trial = trial_of(self._flags, candidate, title, steps, macros)
    run = trials.recorded(trial)
    if run is None:
      say(f'{trial.folder}: {trial.steps:,} steps')
      run = trials.train(trial)
    return run

  def _leave_out(self, candidate: Candidate, error: Failed) -> None:
    say(f'{candidate.name} is left out: {error}')
    self._left.remove(candidate)
    self.failed.append(candidate.name)
    for outcomes in self.outcomes.values():
      outcomes[:] = [outcome for outcome in outcomes if outcome.candidate != candidate.name]


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
  add('candidate', 'see above; repeatable', trials.candidate, dest='candidates', **many)
  add('peer', '"NAME: COMMAND", another program with the flags and the files of a run',
      trials.peer, dest='candidates', action='append')  # fmt: skip
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


def add_text(flags: argparse.Namespace) -> None:
  """Adds the text of --text for all candidates, and says how it is read; raises as `own_text`."""
  found = own_text(flags.text, flags.gin_file, flags.gin)
  for sentence in found.sentences:
    say(sentence)
  file, *gin_flags = found.flags
  flags.gin_file = [*flags.gin_file, file.removeprefix('--gin_file=')]
  flags.gin = [*flags.gin, *gin_flags]


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


@console.lasting_streams()
def main(arguments: Sequence[str] | None = None) -> int:
  """Runs a comparison, and prints the findings; returns the exit code."""
  flags = parse_flags(arguments)
  if arguments is None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
  try:
    flags.results = pathlib.Path(with_home(str(flags.results)))
    if flags.text:
      add_text(flags)
    comparison = Comparison(flags)
    comparison.run()
  except ValkyrieError as error:
    print(f'valkyrie: {message_of(error)}', file=sys.stderr, flush=True)
    return error.exit_code
  except KeyboardInterrupt:
    stopped = 'valkyrie: stopped, and saved. The same command continues.'
    print(stopped, file=sys.stderr, flush=True)
    return Preempted.exit_code
  if any(comparison.outcomes.values()):
    print((flags.results / 'compare.md').read_text(), flags.results / 'compare.html', sep='\n')
  return 1 if comparison.failed else 0


if __name__ == '__main__':
  sys.exit(main())
