"""The findings of a comparison: a verdict, tables, and a page with the curves of the runs."""

from collections.abc import Mapping, Sequence
import html
import math
import os
import pathlib
import statistics
from typing import NamedTuple

from valkyrie.errors import DataError, StorageError
from valkyrie.monitoring import html_page, html_report
from valkyrie.monitoring.metrics import TARGETS_BY_POSITION
from valkyrie.monitoring.pictures import by_position
from valkyrie.monitoring.recorded_run import Run
from valkyrie.storage import whole_file

TITLES = {'seconds': '{:g} seconds of training', 'tokens': '{:,} tokens', 'flops': '{:.3g} FLOPs'}
_AMOUNTS = {'seconds': '{:,.1f} seconds', 'tokens': '{:,.0f} tokens', 'flops': '{:.3g} FLOPs'}
_FILES = ('compare.md', 'compare.html')
_NEAR = 1.1  # the largest ratio of two amounts of training that count as equal
_FEWEST_TARGETS = 256  # of a position that is shown: the mean of fewer is mostly chance


class Outcome(NamedTuple):
  """What a trial has recorded; a `run` of None diverged. `values` are what --over gave, by name."""

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
  last = run.evaluations[-1] if run else {}
  if run is None or not isinstance(last.get('loss'), int | float):  # a NaN is a text there
    return math.inf
  of = [(x, last[f'{TARGETS_BY_POSITION}{p}']) for p, x in bits_by_position(run) if p >= context]
  if not of:
    raise DataError(
      f'{run.name}: no target of the validation split has {context} tokens before it. Lower '
      '--context, or validate on longer documents.'
    )
  return sum(loss * weight for loss, weight in of) / sum(weight for _, weight in of)


def bits_by_position(run: Run) -> list[tuple[int, float]]:
  """(P, bits per byte, or per token) of the targets at the positions P to 2 P - 1."""
  last = run.evaluations[-1]
  known = _knows_bytes(run) and last['bits_per_token']
  ratio = last['bits_per_byte'] / last['bits_per_token'] if known else 1.0
  return [(position, nats / math.log(2) * ratio) for position, nats in by_position(last)]


def _knows_bytes(run: Run) -> bool:
  return isinstance(run.evaluations[-1].get('bits_per_byte'), int | float)


def best(name: str, outcomes: Sequence[Outcome], context: int) -> dict[str, str]:
  """The values with which a candidate validates best."""
  own = [outcome for outcome in outcomes if outcome.candidate == name]
  return min(own, key=lambda outcome: bits(outcome.run, context)).values


def spent(run: Run, budget: str) -> float | None:
  """The seconds, tokens or FLOPs for which a run has trained; None if they are unknown."""
  return run.lines[-1][budget]


def is_near(one: float | None, other: float | None) -> bool:
  """Whether two amounts of training are equal within a tenth; unknown ones count as equal."""
  if not one or not other:
    return True
  return max(one, other) <= _NEAR * min(one, other)


def verdict(
  scores: Mapping[str, Sequence[float]],
  unit: str,
  budget: str = 'tokens',
  amounts: Mapping[str, float | None] | None = None,
) -> list[str]:
  """Compares the candidate with the lowest mean with each other one.

  One is better if the difference of the means is larger than the range of the seeds of either, and
  if it has not trained for more than the other one.

  Args:
    scores: the score of each seed by candidate, in the order of the means.
    unit: of a score.
    budget: 'seconds', 'tokens' or 'flops'.
    amounts: for how much each candidate has trained, the mean over its seeds; None if unknown.
  """
  first, *others = scores
  amounts = amounts or {}
  said = []
  for other in others:
    difference = statistics.fmean(scores[other]) - statistics.fmean(scores[first])
    ranges = [max(scores[name]) - min(scores[name]) for name in (first, other)]
    spread = max(ranges)
    used = amounts.get(first)
    used_by_other = amounts.get(other)
    if not math.isfinite(difference):
      said.append(f'{other} diverged.')
      continue
    unequal = ''
    if used and used_by_other and not is_near(used, used_by_other):
      form = _AMOUNTS[budget]
      unequal = f'{first} trained for {form.format(used)}, {other} for {form.format(used_by_other)}'
      if used > used_by_other:
        said.append(
          f'{first} and {other}: no verdict. {first} is ahead by {difference:.3f} {unit}, but '
          f'{unequal}. Compare the same --tokens, or give more --seconds on an idle machine.'
        )
        continue
    if len(scores[first]) == 1:
      said.append(
        f'{first} is ahead of {other} by {difference:.3f} {unit} with one seed. More --seeds show '
        'how far seeds differ.'
      )
    elif difference > spread:
      said.append(
        f'{first} is better than {other} by {difference:.3f} {unit}; the seeds of one candidate '
        f'differ by at most {spread:.3f}.'
      )
    else:
      said.append(
        f'{first} and {other}: no difference that the seeds do not explain. Their means differ by '
        f'{difference:.3f} {unit}, the seeds of one candidate by up to {spread:.3f}.'
      )
    if unequal:
      said[-1] += f' The amounts differ: {unequal}.'
  return said


def check_place(folder: pathlib.Path) -> None:
  """Raises a StorageError if `write` would replace a file that no comparison has made."""
  taken = [folder / name for name in _FILES if os.path.lexists(folder / name)]
  if taken and not any(folder.glob('*/*.log')):  # of a trial
    raise StorageError(
      f'{taken[0]} is there, but no trial of a comparison is. Nothing was written. Name other '
      '--results, or move that file away.'
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
  for budget, found in outcomes.items():
    if found:
      blocks += findings(budget, amounts[budget], found, tried, context)
  for name, text in zip(_FILES, (markdown(blocks), page(blocks)), strict=True):
    whole_file.write(folder / name, text)


def findings(
  budget: str, amount: float, outcomes: Sequence[Outcome], tried: Sequence[Outcome], context: int
) -> list[Block]:
  """The findings of a budget.

  Args:
    outcomes: of the budget; each candidate counts at its best values.
    tried: of the budget with which the values were tried, with the first seed.
    context: the first position that is scored.
  """
  chosen: dict[str, list[Outcome]] = {}
  for outcome in outcomes:
    if outcome.values == best(outcome.candidate, tried, context):
      chosen.setdefault(outcome.candidate, []).append(outcome)
  scores = {name: [bits(o.run, context) for o in of] for name, of in chosen.items()}
  names = sorted(chosen, key=lambda name: statistics.fmean(scores[name]))
  runs = {name: of for name in names if (of := [o.run for o in chosen[name] if o.run])}
  drawn = [of[0]._replace(name=name) for name, of in runs.items()]
  amounts = {name: _mean_spent(of, budget) for name, of in runs.items()}
  unit = 'bits per byte' if all(map(_knows_bytes, drawn)) else 'bits per token'
  over = list(tried[0].values)

  head = ['candidate', *over, 'parameters', 'tokens', 'tokens/s', 'seconds', 'TFLOP', unit, 'range']
  rows = []
  for name in names:
    mean = statistics.fmean(scores[name])
    low = min(scores[name])
    high = max(scores[name])
    results = 'diverged' if math.isinf(mean) else f'{mean:.3f}', f'{low:.3f} to {high:.3f}'
    rows.append([name, *chosen[name][0].values.values(), *_costs(runs.get(name)), *results])
  seeds = ', '.join(str(outcome.seed) for outcome in chosen[names[0]])
  scored = f' with {context} or more tokens before them' if context > 1 else ''
  blocks: list[Block] = [
    f'## The same {TITLES[budget].format(amount)}',
    *verdict({name: scores[name] for name in names}, unit, budget, amounts),
    *_missed(budget, amount, amounts),
    Table(head, rows),
    f'Seeds {seeds}; {unit} of the targets of the whole validation split{scored}.',
  ]
  if len({run.tokens for run in drawn}) > 1:
    blocks.append('The tokenizers or the validation data differ: only equal texts are comparable.')
  if outcomes is tried and len({(*o.values.values(),) for o in tried}) > 1:
    found = {(o.candidate, *o.values.values()): o.run for o in reversed(tried)}  # of the first seed
    values = list(dict.fromkeys((*o.values.values(),) for o in tried))
    rows = [[n, *(f'{bits(found[n, *of], context):.3f}' for of in values)] for n in names]
    head = ['candidate', *(f'{", ".join(of)}' for of in values)]
    blocks += [f'By {", ".join(over)}, with the seed {tried[0].seed}:', Table(head, rows)]
  return [*blocks, *_by_position(runs, context), drawn]


def _costs(runs: Sequence[Run] | None) -> list[str]:
  """Parameters, tokens, tokens/s, seconds and TFLOP, means over the seeds; '' if unknown."""
  if not runs:
    return [''] * 5
  last = [run.lines[-1] for run in runs]
  tokens, seconds = (
    statistics.fmean(line[name] for line in last) for name in ('tokens', 'seconds')
  )
  flops = '' if last[0]['flops'] is None else f'{last[0]["flops"] / 1e12:,.3g}'
  parameters = runs[0].about.partition(' parameters')[0]
  return [parameters, f'{tokens:,.0f}', f'{tokens / seconds:,.0f}', f'{seconds:.1f}', flops]


def _mean_spent(runs: Sequence[Run], budget: str) -> float | None:
  """The mean amount of training over the seeds; None if one is unknown."""
  amounts = [spent(run, budget) for run in runs]
  known = [amount for amount in amounts if amount is not None]
  return statistics.fmean(known) if len(known) == len(runs) else None


def _missed(budget: str, amount: float, amounts: Mapping[str, float | None]) -> list[str]:
  """A sentence about the candidates that did not train for the amount that was asked for."""
  form = _AMOUNTS[budget]
  missed = [
    f'{name} for {form.format(used)}'
    for name, used in amounts.items()
    if used is not None and not is_near(used, amount)
  ]
  if not missed:
    return []
  return [f'Not all trained for {form.format(amount)}: {", ".join(missed)}.']


def _by_position(runs: Mapping[str, Sequence[Run]], context: int) -> list[Block]:
  """The table of the means over the seeds, without positions that few targets have."""
  scores = {}
  shown = set()
  left_out = set()
  for name, seeds in runs.items():
    scores[name] = [dict(bits_by_position(run)) for run in seeds]
    counts = seeds[0].evaluations[-1]  # the same validation split for each seed
    for position in scores[name][0]:
      if position >= context:
        many = counts[f'{TARGETS_BY_POSITION}{position}'] >= _FEWEST_TARGETS
        (shown if many else left_out).add(position)
  bins = sorted(shown)
  rows = []
  for name, seeds in scores.items():
    cells = []
    for position in bins:  # candidates with other tokens may have other positions
      values = [seed[position] for seed in seeds if position in seed]
      cells.append(f'{statistics.fmean(values):.3f}' if values else '')
    rows.append([name, *cells])
  blocks: list[Block] = []
  if bins:
    blocks = ['By position in the document:', Table(['candidate', *map(_positions, bins)], rows)]
  if few := sorted(left_out - shown):
    blocks.append(
      f'Positions with fewer than {_FEWEST_TARGETS} targets are left out: '
      f'{", ".join(map(_positions, few))}.'
    )
  return blocks


def _positions(first: int) -> str:
  """The positions of a bin."""
  return f'{first:,} to {2 * first - 1:,}' if first > 1 else '1'


def markdown(blocks: Sequence[Block]) -> str:
  """The text of the findings."""
  parts = []
  for block in blocks:
    if isinstance(block, Table):
      lines = block.head, ['---'] * len(block.head), *block.rows
      parts.append('\n'.join(f'| {" | ".join(cells)} |' for cells in lines))
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
      kind = 'h2' if block.startswith('## ') else 'p'
      parts.append(f'<{kind}>{html.escape(block.removeprefix("## "))}</{kind}>')
    elif block:
      parts += html_report.sections(block)
  return html_page.document('Comparison', parts)
