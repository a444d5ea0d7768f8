"""Trains candidates for the same seconds, tokens or FLOPs, and compares what they have learned.

  scripts/compare --gin_file=gin/tiny_cpu.gin --candidate=hybrid \\
      --candidate='s5: local/Block.mixers = (@GatedRecurrence,)' \\
      --over=learning_rate=1.5e-3,3e-3 --seconds=90 --results=runs/s5

A candidate is "NAME: STATEMENTS", gin statements, separated by semicolons, that are applied after
the --gin_file; or NAME.gin, a gin file; or NAME, the --gin_file as it is. --gin.NAME=VALUE is for
all candidates. @FILE reads further arguments, one in each line.

Each trial is an ordinary run in a folder of --results, with its own `seed` and `train_steps`.
Macros that count steps, such as `warmup_steps`, and `eval_every` keep their shares of the steps. A
candidate is trained with every value of --over and the first seed, and with the other seeds at the
values that validate best. The speed of its newest run decides how many steps the next trial has; a
rehearsal of {steps} steps precedes the first trial. A trial whose amount differs from the planned
one by more than a tenth is trained once more, with other steps.

The same command continues after any interruption. compare.md and compare.html in --results have the
findings so far. A candidate whose trial fails is left out, and the exit code is 1 at the end.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
import itertools
import math
import pathlib
import re
import signal
import sys
from typing import Any

from valkyrie.config import parse
from valkyrie.data.own_text import own_text
from valkyrie.distributed import console
from valkyrie.errors import Preempted, usable_path
from valkyrie.lab.comparison import trials
from valkyrie.lab.comparison.findings import (
  TITLES,
  Outcome,
  best,
  bits,
  check_place,
  spent,
  write,
)
from valkyrie.lab.comparison.trials import Candidate, Failed, make_trial, say
from valkyrie.lab.comparison.verdicts import is_near
from valkyrie.monitoring.recorded_run import Run

REHEARSED = 40  # steps


class Comparison:
  """The trials of a comparison, in turns, so that slow hours of the machine affect all candidates.

  Attributes:
    outcomes: the outcomes of the trials that are done, by budget.
    failed: the names of candidates with a trial that failed.
  """

  def __init__(self, flags: argparse.Namespace):
    """Checks every configuration before anything is trained; raises a ConfigurationError."""
    check_place(flags.results)
    self._flags = flags
    self._left: list[Candidate] = list(flags.candidates)
    self._budgets: dict[str, float] = {}
    self.outcomes: dict[str, list[Outcome]] = {}
    for name in TITLES:
      amount = getattr(flags, name)
      if amount:
        self._budgets[name] = amount
        self.outcomes[name] = []
    self.failed: list[str] = []
    # What a step of a candidate costs, as its newest run has shown: by name and timed values.
    self._paces: dict[tuple[str, str], dict[str, float | None]] = {}
    self._choices = _combinations(dict(flags.over))
    for choice in self._choices:
      for candidate in self._left:
        make_trial(flags, candidate, 'checked', REHEARSED, choice)

  def run(self) -> None:
    """Trains what is not done, and writes the findings after each turn."""
    flags = self._flags
    search = next(iter(self._budgets))
    first, *further = flags.seeds
    self._announce(search)
    for choice in self._choices:
      self._take_turns(search, lambda _, choice=choice: choice, first)
    tried = [*self.outcomes[search]]

    def best_choice(name: str) -> dict[str, str]:
      return best(name, tried, flags.context)

    for budget in self._budgets:
      seeds = flags.seeds
      if budget == search:
        seeds = further
      for seed in seeds:
        self._take_turns(budget, best_choice, seed)

  def _announce(self, search: str) -> None:
    """Says how many trials there are, and for how long they train."""
    for budget, amount in self._budgets.items():
      trials_each = len(self._flags.seeds)
      if budget == search:
        trials_each += len(self._choices) - 1
      count = len(self._left) * trials_each
      title = TITLES[budget].format(amount)
      text = f'{count} trials, each for {title}'
      if budget == 'seconds':
        minutes = count * amount / 60
        text += f': {minutes:,.1f} minutes, and the start and validation of each'
      say(text)

  def _take_turns(self, budget: str, choose: Callable[[str], dict[str, str]], seed: int) -> None:
    """Runs one trial of each candidate that is left, with the values chosen for its name."""
    for candidate in [*self._left]:
      try:
        choice = choose(candidate.name)
        run = self._try(candidate, budget, choice, seed)
        outcome = Outcome(candidate.name, choice, seed, run)
        self.outcomes[budget].append(outcome)
      except Failed as error:
        self._leave_out(candidate, error)
    write(self._flags.results, self._budgets, self.outcomes, self._flags.context)

  def _try(
    self,
    candidate: Candidate,
    budget: str,
    choice: Mapping[str, str],
    seed: int,
  ) -> Run | None:
    """Runs a trial for the budget, and a second one if it took another amount than planned."""
    amount = self._budgets[budget]
    macros = {**choice, 'seed': seed}
    title = _folder_name(f'{budget}={amount:.12g}', macros)
    timed = _timed(choice)
    pace = candidate.name, _folder_name('rehearsal', timed)
    if pace not in self._paces:
      self._rehearse(candidate, timed)

    steps = self._steps(pace, budget)
    run = self._trained(candidate, title, steps, macros)
    if run is None:
      return None
    self._paces[pace] = trials.costs(run)
    used = spent(run, budget)
    steps_again = self._steps(pace, budget)
    if is_near(used, amount) or steps_again == steps:
      return run
    say(f'  It took {used:.3g} of {amount:.3g} {budget}, so it is repeated with other steps.')
    run = self._trained(candidate, f'{title},repeated', steps_again, macros)
    if run is not None:
      self._paces[pace] = trials.costs(run)
    return run

  def _rehearse(self, candidate: Candidate, timed: Mapping[str, str]) -> None:
    """Measures a step: directly before the first trial, so that both have the same machine."""
    title = _folder_name('rehearsal', timed)
    macros = {**timed, 'log_every': 4, 'eval_every': REHEARSED}
    run = self._trained(candidate, title, REHEARSED, macros)
    if run is None:
      raise Failed(
        f'its rehearsal of {REHEARSED} steps diverged. Lower the learning rate in its statements '
        'or in the --gin_file.'
      )
    bits(run, self._flags.context)  # raises a DataError if it scores nothing
    self._paces[candidate.name, title] = trials.costs(run)

  def _steps(self, pace: tuple[str, str], budget: str) -> int:
    """The steps for which the budget lasts, by the newest run of a candidate's timed values."""
    cost = self._paces[pace][budget]
    if not cost:
      raise Failed(f'the {budget} of a step are unknown. Compare by --tokens or --seconds.')
    steps = self._budgets[budget] / cost
    return max(1, round(steps))

  def _trained(
    self,
    candidate: Candidate,
    title: str,
    steps: int,
    macros: Mapping[str, Any],
  ) -> Run | None:
    """What a trial has recorded; it is trained unless it is done. None if it diverged."""
    trial = make_trial(self._flags, candidate, title, steps, macros)
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
      others = [outcome for outcome in outcomes if outcome.candidate != candidate.name]
      outcomes[:] = others


def _combinations(over: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
  """Every choice of one value for each name."""
  products = itertools.product(*over.values())
  combinations = []
  for values in products:
    combination = dict(zip(over, values, strict=True))
    combinations.append(combination)
  return combinations


def _timed(choice: Mapping[str, str]) -> dict[str, str]:
  """The values that may change the time of a step."""
  return {name: value for name, value in choice.items() if name != 'learning_rate'}


def _folder_name(first: str, values: Mapping[str, Any]) -> str:
  """'tokens=640,seed=0', with '_' for characters that are unusual in names of folders."""
  parts = [first]
  for name, value in values.items():
    parts.append(f'{name}={value}')
  title = ','.join(parts)
  unusual = r'[^\w.=,+-]'
  return re.sub(unusual, '_', title)


def parse_flags(arguments: Sequence[str] | None) -> argparse.Namespace:
  """The flags, with `candidates` and the --gin.NAME=VALUE `gin`; exits with 2 if one is wrong.

  Raises a ConfigurationError if the folder of the results cannot be one.
  """
  parser = _parser()
  flags, others = parser.parse_known_args(arguments)
  flags.gin = [flag for flag in others if flag.startswith(parse.FLAG)]
  unknown = [flag for flag in others if flag not in flags.gin]
  if unknown:
    parser.error(f'{unknown[0]}: unknown flag. --help lists all flags.')
  _check_amounts(parser, flags)
  is_power_of_2 = flags.context > 0 and flags.context.bit_count() == 1
  if not is_power_of_2:
    parser.error(f'--context={flags.context}: expected a power of 2, such as 512')
  are_numbers = re.fullmatch(r'\d+(,\d+)*', flags.seeds) is not None
  if not are_numbers:
    parser.error(f'--seeds={flags.seeds}: expected numbers separated by commas, such as 0,1,2')
  seeds = [int(seed) for seed in flags.seeds.split(',')]
  flags.seeds = list(dict.fromkeys(seeds))
  if not flags.candidates and flags.gin_file:
    first, *_ = flags.gin_file
    name = pathlib.PurePath(first).stem
    flags.candidates = [Candidate(name)]
  _check_candidates(parser, flags)
  flags.results = pathlib.Path(usable_path('--results', flags.results))
  return flags


def _check_amounts(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> None:
  """Exits with 2 unless an amount is given, and each is a number above 0."""
  amounts = [getattr(flags, name) for name in TITLES]
  given = [amount for amount in amounts if amount is not None]
  are_positive = all(0 < amount < math.inf for amount in given)
  if not given or not are_positive:
    parser.error('pass --seconds=S, --tokens=T or --flops=F, more than 0')


def _check_candidates(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> None:
  """Keeps the candidates of --only; exits with 2 if a name is unknown, invalid or given twice."""
  names = [candidate.name for candidate in flags.candidates]
  if not names:
    parser.error('pass --gin_file=FILE, such as gin/tiny_cpu.gin, and a --candidate for each run')
  only = names
  if flags.only:
    only = flags.only.split(',')
  unknown = [name for name in only if name not in names]
  if unknown:
    parser.error(f'--only={unknown[0]}: the candidates are {", ".join(names)}')
  for name in names:
    is_name = re.fullmatch(r'\w[\w .+()=-]*', name) is not None
    if not is_name:
      parser.error(
        f'candidate {name!r}: expected a name that begins with a letter or digit, and has only '
        'letters, digits, spaces and . + ( ) = - _'
      )
    if names.count(name) > 1:
      parser.error(f'candidate {name!r} is given twice. Give each candidate a name of its own.')
  flags.candidates = [candidate for candidate in flags.candidates if candidate.name in only]


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    'valkyrie-compare',
    usage='%(prog)s --gin_file=FILE --candidate=CANDIDATE {--seconds=S | --tokens=T} [...]',
    description=(__doc__ or '').format(steps=REHEARSED),
    formatter_class=argparse.RawDescriptionHelpFormatter,
    fromfile_prefix_chars='@',
    allow_abbrev=False,
  )
  parser.convert_arg_line_to_args = _arguments_of_line
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
  add('over', 'NAME=VALUE,VALUE of a macro or a binding; repeatable', _parse_over, **many)
  add('seconds', 'of training, without startup, compilation and validation', float)
  add('tokens', 'of training', int)
  add('flops', 'of training, forward and backward', float)
  add('seeds', 'separated by commas (default: 0,1,2)', default='0,1,2')
  add('context', 'score targets with so many tokens before them: a power of 2', int, default=1)
  add('results', 'default: %(default)s', default='runs/compare')
  return parser


def _arguments_of_line(arg_line: str) -> list[str]:
  """The argument in a line of an @FILE; other lines are comments."""
  if arg_line.startswith(('--', '@')):
    return [arg_line]
  return []


def add_text(flags: argparse.Namespace) -> None:
  """Adds the text of --text for all candidates, and says how it is read; raises as `own_text`."""
  text = own_text(flags.text, flags.gin_file, flags.gin)
  for sentence in text.sentences:
    say(sentence)
  file, *gin_flags = text.flags
  flags.gin_file = [*flags.gin_file, file.removeprefix('--gin_file=')]
  flags.gin = [*flags.gin, *gin_flags]


def _parse_over(text: str) -> tuple[str, list[str]]:
  """Reads --over: (name, its values as gin writes them)."""
  name, _, list_of_values = text.partition('=')
  try:
    (statement,) = parse.parse(f'values = [{list_of_values}]')
    values = [repr(value) for value in statement.value]
  except (SyntaxError, ValueError):
    values = []
  if not (name and values):
    raise argparse.ArgumentTypeError(
      f'{text}: expected NAME=VALUE,VALUE as in gin, such as learning_rate=1e-3,3e-3'
    )
  return name, list(dict.fromkeys(values))


@console.lasting_streams()
@console.program
def main(arguments: Sequence[str] | None = None) -> int:
  """Runs a comparison, and prints the findings; returns the exit code."""
  if arguments is None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
  try:
    flags = parse_flags(arguments)
    if flags.text:
      add_text(flags)
    comparison = Comparison(flags)
    comparison.run()
  except KeyboardInterrupt:
    raise Preempted('stopped, and saved. The same command continues.') from None
  if any(comparison.outcomes.values()):
    text_file = flags.results / 'compare.md'
    page_file = flags.results / 'compare.html'
    print(text_file.read_text())
    print(page_file)
  return 1 if comparison.failed else 0


if __name__ == '__main__':
  sys.exit(main())
