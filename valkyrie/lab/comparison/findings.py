"""The findings of a comparison: a verdict, tables, and a page with the curves of the runs."""

from collections.abc import Mapping, Sequence
import html
import math
import os
import pathlib
import statistics
from typing import NamedTuple

from valkyrie.errors import DataError, StorageError
from valkyrie.lab.comparison.verdicts import AMOUNTS, is_near, verdict
from valkyrie.monitoring import html_page, html_report
from valkyrie.monitoring.metrics import TARGETS_BY_POSITION
from valkyrie.monitoring.pictures import by_position
from valkyrie.monitoring.recorded_run import Run
from valkyrie.storage import whole_file

TITLES = {'seconds': '{:g} seconds of training', 'tokens': '{:,} tokens', 'flops': '{:.3g} FLOPs'}
_FILES = ('compare.md', 'compare.html')
_FEWEST_TARGETS = 256  # of a position that is shown: the mean of fewer is mostly chance


class Outcome(NamedTuple):
  """What a trial has recorded.

  values: the values that --over gave it, by name.
  run: None if it diverged.
  """

  candidate: str
  values: dict[str, str]
  seed: int
  run: Run | None


class Table(NamedTuple):
  """Rows of texts below a head."""

  head: Sequence[str]
  rows: Sequence[Sequence[str]]


# A paragraph, or a heading after '## '; a table; runs whose curves are drawn.
Block = str | Table | list[Run]


def bits(run: Run | None, context: int) -> float:
  """Bits per byte of the targets at positions from `context` on; infinite if the run diverged.

  They are bits per token if the bytes of the text are unknown. Raises a DataError without a target.
  """
  if run is None:
    return math.inf
  last = run.evaluations[-1]
  if not isinstance(last.get('loss'), int | float):  # a NaN is recorded as a text
    return math.inf
  total = 0
  targets = 0
  for position, score in bits_by_position(run):
    if position >= context:
      count = last[f'{TARGETS_BY_POSITION}{position}']
      total += score * count
      targets += count
  if not targets:
    raise DataError(
      f'{run.name}: no target of the validation split has {context} tokens before it. Lower '
      '--context, or validate on longer documents.'
    )
  return total / targets


def bits_by_position(run: Run) -> list[tuple[int, float]]:
  """(P, bits per byte, or per token) of the targets at the positions P to 2 P - 1."""
  last = run.evaluations[-1]
  ratio = 1.0
  if _knows_bytes(run) and last['bits_per_token']:
    ratio = last['bits_per_byte'] / last['bits_per_token']
  scores = []
  for position, nats in by_position(last):
    bits_per_token = nats / math.log(2)
    score = bits_per_token * ratio
    scores.append((position, score))
  return scores


def _knows_bytes(run: Run) -> bool:
  last = run.evaluations[-1]
  return isinstance(last.get('bits_per_byte'), int | float)


def best(name: str, outcomes: Sequence[Outcome], context: int) -> dict[str, str]:
  """The values with which a candidate validates best."""
  of_candidate = [outcome for outcome in outcomes if outcome.candidate == name]
  lowest = min(of_candidate, key=lambda outcome: bits(outcome.run, context))
  return lowest.values


def spent(run: Run, budget: str) -> float | None:
  """The seconds, tokens or FLOPs for which a run has trained; None if they are unknown."""
  return run.lines[-1][budget]


def check_place(folder: pathlib.Path) -> None:
  """Raises a StorageError if `write` would replace a file that no comparison has made."""
  files = [folder / name for name in _FILES]
  existing = [file for file in files if os.path.lexists(file)]
  has_trials = any(folder.glob('*/*.log'))
  if existing and not has_trials:
    raise StorageError(
      f'{existing[0]} exists, but {folder} has no trial of a comparison. Nothing was written. Name '
      'other --results, or move that file away.'
    )


def write(
  folder: pathlib.Path,
  amounts: Mapping[str, float],
  outcomes: Mapping[str, Sequence[Outcome]],
  context: int,
) -> None:
  """Writes compare.md and compare.html; the amounts and the outcomes are by budget."""
  tried = next(iter(outcomes.values()))
  blocks = list[Block]()
  for budget, of_budget in outcomes.items():
    if of_budget:
      blocks += findings(budget, amounts[budget], of_budget, tried, context)
  texts = (markdown(blocks), page(blocks))
  for name, text in zip(_FILES, texts, strict=True):
    whole_file.write(folder / name, text)


def findings(
  budget: str,
  amount: float,
  outcomes: Sequence[Outcome],
  tried: Sequence[Outcome],
  context: int,
) -> list[Block]:
  """The findings of a budget.

  Args:
    budget: 'seconds', 'tokens' or 'flops'.
    amount: the amount of it that was asked for.
    outcomes: its trials; each candidate counts at its best values.
    tried: the trials of the budget with which the values were tried, with the first seed.
    context: the first position that is scored.
  """
  chosen = _at_best_values(outcomes, tried, context)
  scores = {}
  means = {}
  for name, candidate_outcomes in chosen.items():
    scores[name] = [bits(outcome.run, context) for outcome in candidate_outcomes]
    means[name] = statistics.fmean(scores[name])
  names = sorted(means, key=lambda name: means[name])
  runs = {}
  amounts = {}
  drawn = []
  for name in names:
    seeds = [outcome.run for outcome in chosen[name] if outcome.run]
    if seeds:
      runs[name] = seeds
      amounts[name] = _mean_spent(seeds, budget)
      first_seed = seeds[0]
      drawn.append(first_seed._replace(name=name))
  unit = 'bits per token'
  if all(map(_knows_bytes, drawn)):
    unit = 'bits per byte'

  title = TITLES[budget].format(amount)
  blocks: list[Block] = [f'## The same {title}']
  sorted_scores = {name: scores[name] for name in names}
  blocks += verdict(sorted_scores, unit, budget, amounts)
  blocks += _missed(budget, amount, amounts)
  results = _results(names, chosen, scores, runs, unit)
  blocks.append(results)
  best_outcomes = chosen[names[0]]
  blocks.append(_note(best_outcomes, unit, context))
  texts_read = {run.tokens for run in drawn}
  if len(texts_read) > 1:
    blocks.append('The tokenizers or the validation data differ: only equal texts are comparable.')
  if outcomes is tried:
    blocks += _by_values(names, tried, context)
  blocks += _by_position(runs, context)
  blocks.append(drawn)
  return blocks


def _note(outcomes: Sequence[Outcome], unit: str, context: int) -> str:
  """The seeds of these outcomes, and which targets are scored."""
  seeds = [str(outcome.seed) for outcome in outcomes]
  numbers = ', '.join(seeds)
  note = f'Seeds {numbers}; {unit} of the targets of the whole validation split'
  if context > 1:
    note += f' with {context} or more tokens before them'
  return f'{note}.'


def _at_best_values(
  outcomes: Sequence[Outcome],
  tried: Sequence[Outcome],
  context: int,
) -> dict[str, list[Outcome]]:
  """The outcomes of each candidate with its best values: one for each seed."""
  chosen: dict[str, list[Outcome]] = {}
  for outcome in outcomes:
    best_values = best(outcome.candidate, tried, context)
    if outcome.values == best_values:
      of_candidate = chosen.setdefault(outcome.candidate, [])
      of_candidate.append(outcome)
  return chosen


def _results(
  names: Sequence[str],
  chosen: Mapping[str, Sequence[Outcome]],
  scores: Mapping[str, Sequence[float]],
  runs: Mapping[str, Sequence[Run]],
  unit: str,
) -> Table:
  """A row for each candidate: its values, its costs and its scores."""
  first = chosen[names[0]][0]
  costs = ['parameters', 'tokens', 'tokens/s', 'seconds', 'TFLOP']
  head = ['candidate', *first.values, *costs, unit, 'range']
  rows = []
  for name in names:
    outcome = chosen[name][0]
    values = outcome.values.values()
    mean = statistics.fmean(scores[name])
    mean_text = f'{mean:.3f}'
    if math.isinf(mean):
      mean_text = 'diverged'
    low = min(scores[name])
    high = max(scores[name])
    range_text = f'{low:.3f} to {high:.3f}'
    cells_of_costs = _costs(runs.get(name))
    rows.append([name, *values, *cells_of_costs, mean_text, range_text])
  return Table(head, rows)


def _by_values(names: Sequence[str], tried: Sequence[Outcome], context: int) -> list[Block]:
  """The table of the first seed's scores by the values that were tried; none if it was one."""
  first, *_ = tried
  columns: dict[tuple[str, ...], dict[str, str]] = {}  # the scores by values and candidate
  for outcome in tried:
    values = tuple(outcome.values.values())
    column = columns.setdefault(values, {})
    score = bits(outcome.run, context)
    column.setdefault(outcome.candidate, f'{score:.3f}')
  if len(columns) < 2:
    return []
  titles = [', '.join(values) for values in columns]
  head = ['candidate', *titles]
  rows = []
  for name in names:
    scores = [column[name] for column in columns.values()]
    rows.append([name, *scores])
  over = ', '.join(first.values)
  title = f'By {over}, with the seed {first.seed}:'
  return [title, Table(head, rows)]


def _costs(runs: Sequence[Run] | None) -> list[str]:
  """Parameters, tokens, tokens/s, seconds and TFLOP, means over the seeds; '' if unknown."""
  if not runs:
    return [''] * 5
  last_lines = [run.lines[-1] for run in runs]
  tokens = statistics.fmean(line['tokens'] for line in last_lines)
  seconds = statistics.fmean(line['seconds'] for line in last_lines)
  speed = tokens / seconds
  flops = last_lines[0]['flops']
  teraflops = ''
  if flops is not None:
    teraflops = f'{flops / 1e12:,.3g}'
  parameters, _, _ = runs[0].about.partition(' parameters')
  return [
    parameters,
    f'{tokens:,.0f}',
    f'{speed:,.0f}',
    f'{seconds:.1f}',
    teraflops,
  ]


def _mean_spent(runs: Sequence[Run], budget: str) -> float | None:
  """The mean amount of training over the seeds; None if one is unknown."""
  amounts = []
  for run in runs:
    amount = spent(run, budget)
    if amount is None:
      return None
    amounts.append(amount)
  return statistics.fmean(amounts)


def _missed(budget: str, amount: float, amounts: Mapping[str, float | None]) -> list[str]:
  """A sentence about the candidates that did not train for the amount that was asked for."""
  form = AMOUNTS[budget]
  missed = []
  for name, used in amounts.items():
    if used is not None and not is_near(used, amount):
      missed.append(f'{name} for {form.format(used)}')
  if not missed:
    return []
  listed = ', '.join(missed)
  return [f'Not all trained for {form.format(amount)}: {listed}.']


def _by_position(runs: Mapping[str, Sequence[Run]], context: int) -> list[Block]:
  """The table of the means over the seeds, without positions that few targets have."""
  shown = set()
  rare = set()
  for seeds in runs.values():
    last = seeds[0].evaluations[-1]  # the same validation split for each seed
    for position, _ in bits_by_position(seeds[0]):
      if position >= context:
        targets = last[f'{TARGETS_BY_POSITION}{position}']
        if targets >= _FEWEST_TARGETS:
          shown.add(position)
        else:
          rare.add(position)
  columns = sorted(shown)
  left_out = sorted(rare - shown)
  blocks: list[Block] = []
  if columns:
    rows = []
    for name, seeds in runs.items():
      means = _means(seeds, columns)
      rows.append([name, *means])
    head = ['candidate', *map(_positions, columns)]
    blocks += ['By position in the document:', Table(head, rows)]
  if left_out:
    positions = ', '.join(map(_positions, left_out))
    blocks.append(f'Positions with fewer than {_FEWEST_TARGETS} targets are left out: {positions}.')
  return blocks


def _means(runs: Sequence[Run], positions: Sequence[int]) -> list[str]:
  """The mean score at each position over the runs; '' where no run has such a position."""
  scores = [dict(bits_by_position(run)) for run in runs]
  cells = []
  for position in positions:  # candidates with other tokens may have other positions
    values = [score[position] for score in scores if position in score]
    cell = ''
    if values:
      cell = f'{statistics.fmean(values):.3f}'
    cells.append(cell)
  return cells


def _positions(first: int) -> str:
  """The positions of a bin."""
  if first == 1:
    return '1'
  last = 2 * first - 1
  return f'{first:,} to {last:,}'


def markdown(blocks: Sequence[Block]) -> str:
  """The text of the findings."""
  parts = []
  for block in blocks:
    if isinstance(block, Table):
      rule = ['---'] * len(block.head)
      lines = []
      for row in (block.head, rule, *block.rows):
        cells = ' | '.join(row)
        lines.append(f'| {cells} |')
      parts.append('\n'.join(lines))
    elif isinstance(block, str):
      parts.append(block)
  return '\n\n'.join(parts) + '\n'


def page(blocks: Sequence[Block]) -> str:
  """The page of the findings, with the curves of each candidate's first run."""
  parts = ['<h1>Comparison</h1>']
  for block in blocks:
    if isinstance(block, Table):
      parts.append(html_page.table(*block))
    elif isinstance(block, str):
      tag = 'p'
      if block.startswith('## '):
        tag = 'h2'
      text = html.escape(block.removeprefix('## '))
      parts.append(f'<{tag}>{text}</{tag}>')
    elif block:
      parts += html_report.sections(block)
  return html_page.document('Comparison', parts)
