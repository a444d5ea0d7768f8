"""Compares what models learn: ours, and Llama and Mamba-2 of Hugging Face's transformers.

All train on the bytes of Python's standard library, on the same cores, with the same tokens per
step, and validate on the same bytes. There are two tables: after the same seconds of training
(startup, compilation and validation not counted), and after the same tokens; and a third, of the
loss by position in the document. Each model trains for the seconds with every learning rate of
--rates and the first of --seeds, then with the other seeds at the rate that validates best, and
last for the tokens with all seeds at that rate.

For a budget in seconds the schedule must know its end, so the steps of each model are timed first,
and give the number of steps of all its trials; the table has the seconds that they really took.

With --budgets=tokens there is only the second table, each model at its best rate by tokens. Speed
has no part in it, so several commands may share the machine, each with its own models in --only and
its own --results. With --screen the models are variants of the shipped one (learn_variants.py).

The defaults are 64 trials of 8 models. On two cores 40 of them train for 90 s (60 minutes), the
others for 20 to 100 s (0.25 million tokens, 20 minutes), and each needs about 40 s for startup,
compilation and validation (45 minutes). The result of each trial is a file below --results, with
its settings, and the same command continues after any interruption. tables.md there has the tables
of the models done so far.
"""

import argparse
from collections.abc import Callable, Sequence
import importlib.util
import json
import os
import pathlib
import statistics
import sys
import time
from typing import Any, NamedTuple

import learn_tables
from learn_trial import ROOT, SPEED, Processes, Trial, Variant, write
from learn_validation import WINDOW
from learn_variants import RUN, VARIANTS

PEERS = ('llama-torch', 'mamba2-torch')
OVERHEAD = 50.0  # expected seconds of a trial besides training, before the first
_SPEED_STEPS = 1000  # over which the phases of a model are averaged
SETTINGS = (
  'screen',
  'budgets',
  'seconds',
  'tokens',
  'batch',
  'scored',
  'threads',
)  # one results directory has one each

Start = Callable[[Trial, pathlib.Path], None]


def ours() -> dict[str, Variant]:
  """Our models, by name; one for each file of mixers/."""
  mixers = sorted((ROOT / 'gin/models/mixers').glob('*.gin'))
  return {
    'hybrid': Variant((RUN,)),
    'attention': VARIANTS['attention alone'],
    's5': VARIANTS['S5 alone'],
    **{file.stem: Variant((RUN, f'--gin_file={file.relative_to(ROOT)}')) for file in mixers},
  }


class Slot(NamedTuple):
  """A trial to come: without a rate it takes the model's best one."""

  model: str
  budget: str
  rate: float | None
  seed: int


class Comparison:
  """The trials of a comparison, in order, and the results that there are.

  Attributes:
    results: of the trials, SPEED included.
    failed: models with a trial that failed; their further trials are left out.
  """

  def __init__(self, flags: argparse.Namespace, models: dict[str, Variant], start: Start):
    """Takes the settings, the models (an empty variant for a peer), and `start`.

    start: runs a trial, and writes its result to the file; RuntimeError if it fails.
    """
    self._flags, self._models, self._start = flags, models, start
    self.results: list[dict[str, Any]] = []
    self.failed: list[str] = []
    self._overheads: list[float] = []
    first, *others = flags.seeds
    search, *also = flags.budgets
    timed = models if 'seconds' in flags.budgets else ()
    self._slots = [Slot(model, SPEED, flags.rates[0], first) for model in timed]
    # All models take turns, so that slow hours of the machine affect all.
    self._slots += [Slot(m, search, rate, first) for rate in flags.rates for m in models]
    self._slots += [Slot(m, search, None, seed) for seed in others for m in models]
    self._slots += [Slot(m, b, None, seed) for b in also for seed in flags.seeds for m in models]

  def run(self) -> None:
    """Runs the trials without a result."""
    for number, slot in enumerate(self._slots):
      if slot.model in self.failed:
        continue
      trial = self._trial(slot)
      file = trial.file(self._flags.results)
      if not file.exists():
        self._announce(number, trial)
        began = time.perf_counter()
        try:
          self._start(trial, file)
        except RuntimeError as error:
          _say(f'{trial.model} failed and is left out: {error}')
          self.failed.append(trial.model)
          continue
        seconds = json.loads(file.read_text()).get('seconds', 0.0)
        self._overheads.append(time.perf_counter() - began - seconds)
      self.results.append(json.loads(file.read_text()))
      write(self._flags.results / 'tables.md', self.tables())

  def tables(self) -> str:
    """The tables of the models with all their trials."""
    flags = self._flags
    return learn_tables.tables(self.results, flags.budgets, flags.rates, flags.seeds)

  def _of(self, slot: Slot, budget: str) -> list[dict[str, Any]]:
    return [r for r in self.results if (r['model'], r['budget']) == (slot.model, budget)]

  def _trial(self, slot: Slot) -> Trial:
    flags, rate = self._flags, slot.rate
    steps = _SPEED_STEPS
    if slot.budget == 'tokens':
      steps = max(1, flags.tokens // flags.batch)
    elif slot.budget == 'seconds':
      steps = max(1, round(flags.seconds / self._of(slot, SPEED)[0]['step_seconds']))
    if rate is None:
      rate = learn_tables.best_rate(self._of(slot, flags.budgets[0]), flags.seeds[0])
    model = self._models[slot.model]
    return Trial(slot.model, slot.budget, rate, slot.seed, steps, flags.batch, flags.scored, *model)

  def _seconds(self, slot: Slot) -> float:
    """The expected seconds of training."""
    if slot.budget == 'seconds':
      return self._flags.seconds
    if timed := self._of(slot, SPEED):
      return self._flags.tokens / self._flags.batch * timed[0]['step_seconds']
    done = self._of(slot, slot.budget) or [r for r in self.results if r['budget'] == slot.budget]
    return statistics.fmean(r['seconds'] for r in done) if done else self._flags.seconds

  def _announce(self, number: int, trial: Trial) -> None:
    """Says which trial starts, and how long the rest takes once speeds are known."""
    what = 'seconds of a step'
    if trial.budget != SPEED:
      overhead = statistics.fmean(self._overheads) if self._overheads else OVERHEAD
      slots = [slot for slot in self._slots[number:] if slot.model not in self.failed]
      left = sum(overhead + self._seconds(slot) for slot in slots)
      what = (
        f'equal {trial.budget}, rate {trial.rate:g}, seed {trial.seed}, {trial.steps} steps; '
        f'{left / 60:.0f} minutes left'
      )
    now = time.strftime('%H:%M')
    _say(f'{now} {number + 1} of {len(self._slots)}: {trial.model}, {what}')


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the comparison, and prints the tables -> the exit code."""
  flags = _flags(arguments)
  models = VARIANTS if flags.screen else {**ours(), **dict.fromkeys(PEERS, Variant())}
  for name in flags.only or ():
    if name not in models:
      _say(f'--only={name} is unknown. Use names of {", ".join(models)}, separated by commas.')
      return 2
  chosen = {name: of for name, of in models.items() if not flags.only or name in flags.only}
  missing = [name for name in ('torch', 'transformers') if not importlib.util.find_spec(name)]
  if missing and not chosen.keys().isdisjoint(PEERS):
    _say(
      f'{" and ".join(missing)} not found, but {" and ".join(PEERS)} need torch and transformers: '
      "they are left out. To compare with them, run: pip install -e '.[learn]'"
    )
    chosen = {name: of for name, of in chosen.items() if name not in PEERS}
  if not chosen:
    return 2
  if problem := _other_settings(flags):
    _say(problem)
    return 2
  comparison = Comparison(flags, chosen, Processes(flags.threads, PEERS))
  try:
    comparison.run()
  except KeyboardInterrupt:
    _say('interrupted. The same command continues; the trial under way starts again.')
    return 130
  print(comparison.tables())
  return 1 if comparison.failed else 0


def _other_settings(flags: argparse.Namespace) -> str | None:
  """A message if --results has trials of other settings."""
  file = flags.results / 'settings.json'
  expected = {name: getattr(flags, name) for name in SETTINGS} | {'budgets': list(flags.budgets)}
  if not file.exists():
    write(file, json.dumps(expected, indent=1))
  found = json.loads(file.read_text())
  if found == expected:
    return None
  shown = {**found, 'budgets': ','.join(found['budgets'])}
  others = ' '.join(f'--{name}={shown[name]}' for name in SETTINGS if found[name] != expected[name])
  return f'{flags.results} has trials with {others}. Use the same settings, or another --results.'


def _flags(arguments: Sequence[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    prog='scripts/learn',
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )

  def add(name, kind, default, text):
    shown = ','.join(map(str, default)) if isinstance(default, tuple) else default
    text = f'{text} (default: {"all" if default is None else shown})'
    parser.add_argument(f'--{name}', type=kind, default=default, metavar=name[0].upper(), help=text)

  add('results', pathlib.Path, pathlib.Path('runs/learn'), 'directory of the results')
  parser.add_argument('--screen', action='store_true', help='compare variants of the shipped model')
  add('only', _list(str), None, 'models, separated by commas')
  add('budgets', _list(str), ('seconds', 'tokens'), 'the tables; the first one tries the rates')
  add('seconds', _positive(float), 90.0, 'seconds of training for the first table')
  add('tokens', _positive(int), 250_000, 'tokens of training for the second table')
  add('rates', _list(_positive(float)), (7.5e-4, 1.5e-3, 3e-3), 'learning rates to try')
  add('seeds', _list(int), (0, 1, 2), 'seeds; the first one tries the rates')
  add('batch', _positive(int), 1024, 'tokens of a step, of every model')
  add('scored', _positive(int), 100_000, 'bytes of the validation sample')
  add('threads', _positive(int), _cores(), 'threads of a trial')
  flags = parser.parse_args(arguments)
  if unknown := set(flags.budgets) - learn_tables.TITLES.keys():
    parser.error(f'--budgets has {", ".join(unknown)}. Use {", ".join(learn_tables.TITLES)}.')
  if flags.batch % WINDOW:
    parser.error(f'--batch={flags.batch} is not a multiple of {WINDOW}, the row of the peers.')
  return flags


def _positive(kind: type) -> Callable[[str], Any]:
  def parse(text: str) -> Any:
    value = kind(text)
    if not value > 0:
      raise argparse.ArgumentTypeError(f'{text} is not positive')
    return value

  return parse


def _list(kind: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
  def parse(text: str) -> tuple[Any, ...]:
    return tuple(kind(part) for part in text.split(','))

  return parse


def _cores() -> int:
  if hasattr(os, 'sched_getaffinity'):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def _say(text: str) -> None:
  print(text, file=sys.stderr, flush=True)


if __name__ == '__main__':
  sys.exit(main())
