"""One page about one or more runs, in a file of its own: curves, losses by position, differences.

    scripts/report runs/tiny runs/other --output=report.html
    scripts/report runs/* --folder=reports

The second command writes a page about each run, one about all, and an index with their results. The
pages need no network and no script, and follow the light or dark setting of the reader.
"""

import argparse
from collections.abc import Sequence
import html
import json
import pathlib
import statistics
import sys
from typing import Any

from valkyrie.distributed import console
from valkyrie.errors import StorageError, is_there, usable_path, write_errors
from valkyrie.monitoring.html_page import Link, document, table
from valkyrie.monitoring.pictures import Curve, by_position, can_be_drawn, figure
from valkyrie.monitoring.recorded_run import COSTS, Line, Run, read_run
from valkyrie.storage import owned, whole_file
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
# (title, metric) of the results in the last line of training, and in the last evaluation.
_OF_TRAINING = (('step', 'step'), ('tokens', 'tokens'), ('training loss', 'loss'))
_OF_VALIDATION = (
  ('validation loss', 'loss'),
  ('validation bits per byte', 'bits_per_byte'),
  ('validation accuracy', 'accuracy'),
)
_SPEEDS = (('median tokens/s', 'tokens_per_second'), ('median share of the peak', 'mfu'))
_OTHER_TOKENS = """<p>The runs have different tokenizers or validation data. Compare their bits
per byte, if these are of the same text, and not their losses, which are per token.</p>"""
_PAGE_OF_ALL = 'all.html'
_SAMPLES = 3  # steps whose samples are shown
_REFUSED = 50  # steps of a run that are shown


def page(runs: Sequence[Run]) -> str:
  """The text of the page."""
  title = ', '.join(run.name for run in runs)
  heading = f'<h1>{html.escape(title)}</h1>'
  return document(title, [heading, *sections(runs)])


def sections(runs: Sequence[Run]) -> list[str]:
  """The parts of a page about runs: results, curves and configurations."""
  note = ''
  validation = _VALIDATION
  if _have_other_tokens(runs):
    note = _OTHER_TOKENS
    validation = _BITS
  return [
    note,
    _results(runs),
    '<h2>Validation</h2>',
    *(_curves(runs, 'evaluations', *validation, axis) for axis in COSTS),
    _by_position(runs),
    '<h2>Training</h2>',
    *(_curves(runs, 'lines', *metric, COSTS[0]) for metric in _TRAINING),
    _refused(runs),
    _samples(runs),
    '<h2>Configuration</h2>',
    _differences(runs),
  ]


def index(runs: Sequence[Run], pages: Sequence[str], page_of_all: str) -> str:
  """The text of a page with a row for each run, which leads to its page."""
  results = _result_rows(runs)
  titles = []
  columns = []
  for title, *values in results:
    titles.append(title)
    columns.append(values)
  values_of_runs = zip(*columns, strict=True)
  rows = []
  for run, address, values in zip(runs, pages, values_of_runs, strict=True):
    link = Link(run.name, address)
    rows.append((link, *values))
  note = _OTHER_TOKENS if _have_other_tokens(runs) else ''
  heading = '<h1>Runs</h1>'
  results_table = table(('run', *titles), rows)
  together = f'<p><a href="{page_of_all}">All runs on one page</a></p>'
  return document('Runs', [heading, note, results_table, together])


def _have_other_tokens(runs: Sequence[Run]) -> bool:
  tokens = {run.tokens for run in runs}
  return len(tokens) > 1


def _results(runs: Sequence[Run]) -> str:
  """A table of the last results of each run, and its speed."""
  names = [run.name for run in runs]
  return table(('', *names), _result_rows(runs))


def _result_rows(runs: Sequence[Run]) -> list[Sequence[Any]]:
  """The last results that any run has, and the speeds: (title, a value of each run)."""
  rows: list[Sequence[Any]] = [
    ('model', *(run.about for run in runs)),
    ('version', *(run.version for run in runs)),
  ]
  for title, metric in _OF_TRAINING:
    values = [_last(run.lines).get(metric) for run in runs]
    rows.append((title, *values))
  for title, metric in _OF_VALIDATION:
    values = [_last(run.evaluations).get(metric) for run in runs]
    rows.append((title, *values))
  for title, metric in _SPEEDS:
    values = [_median(run.lines, metric) for run in runs]
    rows.append((title, *values))
  known = []
  for row in rows:
    _, *values = row
    if any(value is not None for value in values):
      known.append(row)
  return known


def _median(lines: Sequence[Line], metric: str) -> float | None:
  """The median of a metric: a single line depends on the moment."""
  values = []
  for line in lines:
    if can_be_drawn(line.get(metric)):
      values.append(line[metric])
  if not values:
    return None
  return statistics.median(values)


def _refused(runs: Sequence[Run]) -> str:
  rows = []
  for run in runs:
    for line in run.refused[:_REFUSED]:
      row = (run.name, line['step'], line.get('why'), line.get('read'))
      rows.append(row)
  if not rows:
    return ''
  head = ('run', 'step', 'reason', 'documents')
  return '<h3>Refused steps</h3>\n' + table(head, rows)


def _samples(runs: Sequence[Run]) -> str:
  """The last texts that hooks logged."""
  parts = []
  for run in runs:
    samples = []
    for line in run.lines:
      texts = []
      for name, value in line.items():
        is_of_hook = name.startswith('hooks/')
        if is_of_hook and isinstance(value, str):
          texts.append(value)
      if texts:
        samples.append((line['step'], texts))
    for step, texts in samples[-_SAMPLES:]:
      name = html.escape(run.name)
      parts.append(f'<h4>{name}, step {step}</h4>')
      for text in texts:
        parts.append(f'<pre>{html.escape(text)}</pre>')
  if not parts:
    return ''
  return '\n'.join(['<h3>Samples</h3>', *parts])


def _curves(
  runs: Sequence[Run],
  stream: str,
  metric: str,
  title: str,
  unit: str,
  axis: tuple[str, str],
) -> str:
  """A figure of a metric of all runs that have it; of validation, its quick part."""
  name, words = axis
  curves = []
  for run in runs:
    points = []
    for line in getattr(run, stream):
      are_known = can_be_drawn(line.get(metric)) and can_be_drawn(line.get(name))
      if are_known:
        score = line.get(f'quick_{metric}', line[metric])
        points.append((line[name], score))
    curves.append(Curve(run.name, points))
  return figure(f'{title} over {words}', words, unit, curves)


def _by_position(runs: Sequence[Run]) -> str:
  curves = []
  for run in runs:
    points = by_position(_last(run.evaluations))
    curves.append(Curve(run.name, points))
  title = 'Loss by position in the document, from P to 2 P - 1'
  return figure(title, 'position', 'nats per token', curves, logarithmic='x')


def _differences(runs: Sequence[Run]) -> str:
  """A table of all bindings; those that differ come first and are marked."""
  names = sorted({name for run in runs for name in run.bindings})
  same = []
  differ = []
  for name in names:
    values = [json.dumps(run.bindings.get(name)) for run in runs]
    row = (name, *values)
    if len(set(values)) == 1:
      same.append(row)
    else:
      differ.append(row)
  header = ('binding', *(run.name for run in runs))
  if len(runs) == 1:
    return table(header, same)
  return (
    f'<p>{len(differ)} bindings differ, {len(same)} are the same.</p>\n'
    + table(header, differ, marked=True)
    + f'<details><summary>The same in all runs</summary>\n{table(header, same)}</details>'
  )


def _last(lines: Sequence[Line]) -> Line:
  if not lines:
    return {}
  return lines[-1]


def write_folder(folder: pathlib.Path, runs: Sequence[Run]) -> None:
  """Writes index.html, a page about each run and one about all; StorageError if that fails."""
  if is_there(folder):
    raise StorageError(f'{folder} is there already. Name another --folder.')
  texts = {}
  for number, run in enumerate(runs, 1):
    texts[f'run-{number}.html'] = page([run])
  pages = [*texts]
  texts[_PAGE_OF_ALL] = page(runs)
  texts['index.html'] = index(runs, pages, _PAGE_OF_ALL)
  message = f'{folder} cannot be written'
  with write_errors(message, 'name another --folder'), owned.new_folder(folder) as place:
    for name, text in texts.items():
      file = place / name
      file.write_bytes(text.encode(errors='replace'))


@console.lasting_streams()
@console.program
def main(arguments: Sequence[str] | None = None) -> None:
  """Writes the page."""
  about = 'Writes a page about one or more runs, or a folder of pages with an index.'
  parser = argparse.ArgumentParser('valkyrie-report', description=about, allow_abbrev=False)
  parser.add_argument('runs', nargs='+', metavar='RUN', help='its directory or address')
  where = parser.add_mutually_exclusive_group()
  where.add_argument('--output', default='report.html', help='default: %(default)s')
  where.add_argument('--folder', help='for index.html, a page about each run, and one about all')
  flags = parser.parse_args(arguments)
  recorded_runs = [read_run(opened(run)) for run in flags.runs]
  if flags.folder is not None:
    folder = pathlib.Path(usable_path('--folder', flags.folder))
    write_folder(folder, recorded_runs)
    print(folder / 'index.html')
    return
  text = page(recorded_runs)
  output = pathlib.Path(usable_path('--output', flags.output))
  if is_there(output):
    raise StorageError(f'{output} is there already. Name another --output.')
  whole_file.write(output, text.encode(errors='replace'), 'name another --output')
  print(output)


if __name__ == '__main__':
  sys.exit(main())
