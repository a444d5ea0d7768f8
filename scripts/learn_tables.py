"""The tables of scripts/learn, from the results of its trials."""

from collections.abc import Mapping, Sequence
import math
import statistics
from typing import Any

import learn_validation

Result = Mapping[str, Any]
TITLES = {'seconds': 'The same seconds of training', 'tokens': 'The same tokens'}


def best_rate(results: Sequence[Result], seed: int) -> float:
  """The learning rate with the fewest bits per byte with this seed; a NaN is the worst."""
  of_seed = [result for result in results if result['seed'] == seed]
  return min(of_seed, key=_bits)['rate']


def tables(
  results: Sequence[Result], budgets: Sequence[str], rates: Sequence[float], seeds: Sequence[int]
) -> str:
  """All tables in Markdown, of the models with all their trials.

  Args:
    results: of the trials.
    budgets: the keys of TITLES that get a table; the rates were tried with the first.
    rates: the learning rates that were tried with the first seed.
    seeds: the seeds that were tried at the best rate.
  """
  parts = []
  for budget in budgets:
    finals = finished(results, (budgets[0], budget), rates, seeds)
    if finals:
      parts += [f'## {TITLES[budget]}', '', *_ranking(finals, rates), '']
      if budget == budgets[0]:
        parts += ['## Bits per byte by position', '', *_by_position(finals), '']
  return '\n'.join(parts)


def finished(
  results: Sequence[Result],
  budgets: tuple[str, str],
  rates: Sequence[float],
  seeds: Sequence[int],
) -> dict[str, list[Result]]:
  """The trials at each model's best rate, one for each seed, of models with all their trials.

  budgets: that with which the rates were tried, and that of the trials.
  """
  search, budget = budgets
  finals = {}
  for model in dict.fromkeys(result['model'] for result in results):
    own = {(r['budget'], r['rate'], r['seed']): r for r in results if r['model'] == model}
    tried = [own.get((search, rate, seeds[0])) for rate in rates]
    if None not in tried:
      best = best_rate(tried, seeds[0])
      if all((budget, best, seed) in own for seed in seeds):
        finals[model] = [own[budget, best, seed] for seed in seeds]
  return finals


def _ranking(finals: Mapping[str, Sequence[Result]], rates: Sequence[float]) -> list[str]:
  rows, at_edge = [], False
  for model, trials in sorted(finals.items(), key=lambda item: _mean(map(_bits, item[1]))):
    bits = [_bits(trial) for trial in trials]
    rate, tokens = trials[0]['rate'], trials[0]['steps'] * trials[0]['batch']
    seconds = _mean(trial['seconds'] for trial in trials)
    edge = len(rates) > 1 and rate in (min(rates), max(rates))
    at_edge |= edge
    rows.append(
      [
        model,
        f'{trials[0]["parameters"] / 1e6:.2f} M',
        f'{rate:g}{" *" if edge else ""}',
        f'{tokens / 1e6:.2f} M',
        f'{tokens / seconds:,.0f}',
        f'{seconds:.0f}',
        f'{_mean(bits):.3f}',
        f'{min(bits):.3f} to {max(bits):.3f}',
      ]
    )
  head = 'model, parameters, learning rate, tokens read, tokens/s, seconds, bits per byte, range'
  lines = _markdown(head.split(', '), rows)
  trials = next(iter(finals.values()))
  lines += [
    '',
    f'{trials[0]["scored"]:,} bytes of {len(trials[0]["documents"])} validation documents, each '
    f'with {learn_validation.CONTEXT} or more bytes before it. Each model: the best of '
    f'{len(rates)} learning rates, then mean and range of {len(trials)} seeds.',
  ]
  if at_edge:
    lines += ['', '\\* The lowest or the highest rate that was tried.']
  return lines


def _by_position(finals: Mapping[str, Sequence[Result]]) -> list[str]:
  """Bits per byte at each power of two in the documents of full length."""
  longest = learn_validation.LONGEST
  first = learn_validation.CONTEXT.bit_length() - 1
  bins = range(first, longest.bit_length() - 1)
  rows, count = [], 0
  for model, trials in finals.items():
    for reading, of_reading in _readings(trials):
      per_seed = []
      for result in of_reading:
        full = [d['by_position'] for d in result['documents'] if d['bytes'] == longest]
        count = len(full)
        per_seed.append([_mean(d[k] for d in full) / (2**k * math.log(2)) for k in bins if full])
      means = [f'{_mean(values):.3f}' for values in zip(*per_seed, strict=True)]
      rows.append([model, reading, *means])
  if not count:
    return [f'No document of the sample has {longest:,} bytes: raise --scored.']
  left_out = [m for m, trials in finals.items() if any(t.get('whole', 0) is None for t in trials)]
  return [
    *_markdown(['model', 'reads', *(f'{2**k:,} to {2 ** (k + 1) - 1:,}' for k in bins)], rows),
    '',
    f'The first {longest:,} bytes of {count} documents, mean of the seeds of the first table. The '
    'columns are different texts: compare the rows of a column.',
    *(f'{model} did not read whole documents: only its windows are shown.' for model in left_out),
  ]


def _readings(trials: Sequence[Result]) -> list[tuple[str, list[Result]]]:
  readings = [(trials[0]['reading'], list(trials))]
  whole = [trial['whole'] for trial in trials if trial.get('whole')]
  return [*readings, ('whole documents', whole)] if whole else readings


def _bits(result: Result) -> float:
  bits = result['bits_per_byte']
  return math.inf if math.isnan(bits) else bits


def _mean(values) -> float:
  return statistics.fmean(values)


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
  rule = ['---'] * len(head)
  return [f'| {" | ".join(cells)} |' for cells in (head, rule, *rows)]
