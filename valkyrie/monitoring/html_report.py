"""One page about one or more runs, in a file of its own: curves, losses by position, differences.

    scripts/report runs/tiny runs/other --output=report.html

The page needs no network and no script, and follows the light or dark setting of the reader.
"""

import argparse
from collections.abc import Callable, Sequence
import html
import json
import pathlib
import statistics
import sys
from typing import Any

from valkyrie.distributed import console
from valkyrie.errors import StorageError, ValkyrieError, with_home
from valkyrie.monitoring.html_page import Cell, document, table
from valkyrie.monitoring.pictures import Curve, by_position, can_be_drawn, figure
from valkyrie.monitoring.recorded_run import COSTS, Line, Run, read_run
from valkyrie.storage import whole_file
from valkyrie.storage.run_directory import opened

# (metric, title, unit) of the curves.
_VALIDATION = ('loss', 'Validation loss', 'nats per token')
_BITS = ('bits_per_byte', 'Validation loss', 'bits per byte')
_TRAINING = (
  ('loss', 'Training loss', 'nats per token'),
  ('objective', 'Training objective', ''),
  ('grad_norm', 'Gradient norm', ''),
  ('learning_rate', 'Learning rate', ''),
  ('tokens_per_second', 'Speed', 'tokens/s'),
  ('mfu', 'Share of the peak', ''),
  ('host_memory_peak', 'Memory of the process, its peak', 'bytes'),
  ('device_memory_peak', 'Memory of a device, its peak', 'bytes'),
)
_RESULTS = ('step', 'tokens', 'loss', 'bits_per_byte', 'accuracy', 'tokens_per_second', 'mfu')
# The results that are better when lower (-1) or higher (1).
_DIRECTION = {'loss': -1, 'bits_per_byte': -1, 'accuracy': 1, 'tokens_per_second': 1, 'mfu': 1}
_OF_VALIDATION = ('loss', 'bits_per_byte', 'accuracy')
_SPEEDS = ('tokens_per_second', 'mfu')
_OF_TOKENS = ('loss', 'accuracy', 'tokens_per_second')  # mean nothing beside other tokens
_SAMPLES = 3  # steps whose samples are shown


def page(runs: Sequence[Run]) -> str:
  """The text of the page."""
  title = ', '.join(run.name for run in runs)
  return document(title, [f'<h1>{html.escape(title)}</h1>', *sections(runs)])


def sections(runs: Sequence[Run]) -> list[str]:
  """The parts of a page about runs: results, curves and configurations."""
  groups = _groups(runs, lambda run, first: run.tokens == first.tokens)
  by_text = _groups(runs, Run.has_validation_text_of)
  return [
    _results(runs),
    '<h2>Validation</h2>',
    *(
      _curves(group, 'evaluations', *_BITS, axis)
      for axis in COSTS[1:]
      for group in by_text
      if len(groups) > 1
    ),
    *(_curves(group, 'evaluations', *_VALIDATION, axis) for group in groups for axis in COSTS),
    *map(_by_position, groups),
    '<h2>Training</h2>',
    *(_curves(group, 'lines', *metric, COSTS[0]) for metric in _TRAINING for group in groups),
    *(_curves(group, 'lines', *_TRAINING[0], axis) for axis in COSTS[1:] for group in groups),
    _phases(runs),
    _refused(runs),
    _samples(runs),
    '<h2>Configuration</h2>',
    _differences(runs),
  ]


def _groups(runs: Sequence[Run], belongs: Callable[[Run, Run], bool]) -> list[list[Run]]:
  """The runs once for each group of comparable runs.

  The runs of other groups are empty there, and keep their colors.
  """
  firsts: list[Run] = []
  numbers: list[int] = []  # the number of each run's group
  for run in runs:
    fitting = [number for number, first in enumerate(firsts) if belongs(run, first)]
    if not fitting:
      fitting = [len(firsts)]
      firsts.append(run)
    numbers.append(fitting[0])
  groups: list[list[Run]] = [[] for _ in firsts]
  for run, number_of_run in zip(runs, numbers, strict=True):
    empty = run._replace(lines=[], evaluations=[])
    for number, group in enumerate(groups):
      group.append(run if number == number_of_run else empty)
  return groups


def _results(runs: Sequence[Run]) -> str:
  """The last results, of validation where they exist, and how later runs differ from the first."""
  results = [_last_results(run) for run in runs]
  rows: list[Sequence[Any]] = [
    ('model', *(run.about for run in runs)),
    ('version', *(run.version for run in runs)),
  ]
  for name in _RESULTS:
    first, *others = [of_run.get(name) for of_run in results]
    if any(map(can_be_drawn, (first, *others))):
      compared = [
        _compared(name, value, first, _misfit(name, run, runs[0]))
        for value, run in zip(others, runs[1:], strict=True)
      ]
      title = f'median {name}' if name in _SPEEDS else name
      rows.append((title, first, *compared))
  return table(('', *(run.name for run in runs)), rows)


def _last_results(run: Run) -> Line:
  """The last results of a run: of validation where they exist, and the medians of speeds."""
  results = dict(_last(run.lines))
  validation = _last(run.evaluations)
  for name in _OF_VALIDATION:
    if name in validation:
      results[name] = validation[name]
  for name in _SPEEDS:  # the speed of a single line would depend on the moment
    speeds = [line[name] for line in run.lines if can_be_drawn(line.get(name))]
    results[name] = None
    if speeds:
      results[name] = statistics.median(speeds)
  return results


def _misfit(name: str, run: Run, first: Run) -> str:
  """Why a result of a run cannot be compared with the first run's; '' if it can."""
  if name in _OF_VALIDATION:
    validates = name in _last(run.evaluations)
    if validates != (name in _last(first.evaluations)):
      return 'of validation' if validates else 'of training'
    if validates and not run.has_validation_text_of(first):
      return 'other validation data'
    if not validates and run.texts('train') != first.texts('train'):
      return 'other training data'
  if name in _OF_TOKENS and run.tokenizer != first.tokenizer:
    return 'other tokens'
  return ''


def _compared(name: str, value: Any, first: Any, misfit: str) -> Any:
  """A result of a later run beside the first run's, or why it is not compared."""
  if not (can_be_drawn(value) and can_be_drawn(first) and name in _DIRECTION):
    return value
  if misfit:
    return Cell(f'{value:,.4g} ({misfit}, not compared)', 'number')
  change = value - first
  gain = _DIRECTION[name] * change
  if gain == 0:
    return Cell(f'{value:,.4g} ({change:+,.2g})', 'number')
  kind = 'better' if gain > 0 else 'worse'
  return Cell(f'{value:,.4g} ({change:+,.2g}, {kind})', f'number {kind}')


def _phases(runs: Sequence[Run]) -> str:
  """The steps of each phase of the runs that have several."""
  rows = []
  for run in runs:
    phases: dict[int, list[Line]] = {}
    for line in run.lines:
      if 'phase' in line:
        phases.setdefault(line['phase'], []).append(line)
    if len(phases) > 1:
      for phase, lines in phases.items():
        last = lines[-1]
        rows.append((run.name, phase, lines[0]['step'], last['step'], last['tokens']))
  header = ('run', 'phase', 'first line at step', 'last line at step', 'tokens until then')
  return _titled_table('Phases', header, rows)


def _refused(runs: Sequence[Run]) -> str:
  rows = [
    (run.name, line['step'], line.get('why'), line.get('read'))
    for run in runs
    for line in run.refused[:50]
  ]
  header = ('run', 'step', 'reason', 'documents')
  return _titled_table('Refused steps', header, rows)


def _titled_table(title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
  """The table below its title; '' without rows."""
  if not rows:
    return ''
  return f'<h3>{title}</h3>\n{table(header, rows)}'


def _samples(runs: Sequence[Run]) -> str:
  """The last texts that hooks logged."""
  parts = []
  for run in runs:
    texts_by_step: dict[int, list[str]] = {}
    for line in run.lines:
      texts = [v for name, v in line.items() if name.startswith('hooks/') and isinstance(v, str)]
      if texts:
        texts_by_step[line['step']] = texts
    for step in [*texts_by_step][-_SAMPLES:]:
      parts.append(f'<h4>{html.escape(run.name)}, step {step}</h4>')
      parts += [f'<pre>{html.escape(text)}</pre>' for text in texts_by_step[step]]
  if not parts:
    return ''
  return '\n'.join(['<h3>Samples</h3>', *parts])


def _curves(
  runs: Sequence[Run], stream: str, metric: str, title: str, unit: str, axis: tuple[str, str]
) -> str:
  """A figure of a metric of all runs that have it; for validation, of its quick part."""
  name, words = axis
  curves = []
  for run in runs:
    points = [
      (line[name], line.get(f'quick_{metric}', line[metric]))
      for line in getattr(run, stream)
      if can_be_drawn(line.get(metric)) and can_be_drawn(line.get(name))
    ]
    curves.append(Curve(run.name, points))
  return figure(f'{title} over {words}', words, unit, curves)


def _by_position(runs: Sequence[Run]) -> str:
  curves = [Curve(run.name, by_position(_last(run.evaluations))) for run in runs]
  title = 'Loss by position in the document, from P to 2 P - 1'
  return figure(title, 'position', 'nats per token', curves, logarithmic='x')


def _differences(runs: Sequence[Run]) -> str:
  """A table of all bindings; those that differ come first and are marked."""
  names = sorted({name for run in runs for name in run.bindings})
  differ = []
  same = []
  for name in names:
    values = [json.dumps(run.bindings.get(name)) for run in runs]
    rows = differ if len(set(values)) > 1 else same
    rows.append((name, *values))
  header = ('binding', *(run.name for run in runs))
  if len(runs) == 1:
    return table(header, same)
  return (
    f'<p>{len(differ)} bindings differ, {len(same)} are the same.</p>\n'
    + table(header, differ, marked=True)
    + f'<details><summary>The same in all runs</summary>\n{table(header, same)}</details>'
  )


def _last(lines: Sequence[Line]) -> Line:
  return lines[-1] if lines else {}


@console.lasting_streams()
def main(arguments: Sequence[str] | None = None) -> int:
  """Writes the page; returns the exit code."""
  about = 'Writes one page about one or more runs.'
  parser = argparse.ArgumentParser('valkyrie-report', description=about, allow_abbrev=False)
  parser.add_argument('runs', nargs='+', metavar='RUN', help='its directory or address')
  parser.add_argument('--output', default='report.html', help='default: %(default)s')
  flags = parser.parse_args(arguments)
  try:
    text = page([read_run(opened(run)) for run in flags.runs])
    output = pathlib.Path(with_home(flags.output))
    if output.exists():
      raise StorageError(f'{output} is there already. Name another --output.')
    whole_file.write(output, text.encode(errors='replace'), 'Name another --output.')
  except ValkyrieError as error:
    print(f'valkyrie: {error}', file=sys.stderr)
    return error.exit_code
  print(output)
  return 0


if __name__ == '__main__':
  sys.exit(main())
