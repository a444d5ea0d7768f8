"""Injects faults into real runs, and prints a table of the promises that were kept.

The runs train a tiny model by the command line, without TensorFlow, on one core, and share its
compiled programs. `--short` injects one fault for each kind of promise, as the test suite does.

With `--json=FILE` the same command goes on after a stop, and at its end the results of a commit are
written into results.md. With `--workers=2` rows that need one core run in pairs.
"""

import argparse
from collections.abc import Sequence
import os
import pathlib
import sys
import tempfile

from faults.harness import CORES
from faults.results import PAGE, Results, clean_commit, rows_of
from faults.rows import Row, prepare, register, results, say
from faults.table import Fault, markdown


def main(arguments: Sequence[str] | None = None) -> int:
  """Prints the table, and returns 1 if a promise was not kept."""
  flags = _flags(arguments)
  os.environ['JAX_PLATFORMS'] = 'cpu'
  prepare(CORES[0])
  table = register()
  found = Results(flags.json, clean_commit(), flags.short, flags.seed)
  chosen = [Row(row, _times(row, flags)) for row in table if _is_chosen(row, flags)]
  if not chosen:
    say(f'no row has a name with {" or ".join(map(repr, flags.only))}')
    return 2
  if flags.missing:
    known = {(row['fault'], row['promise']) for row in rows_of(PAGE.read_text())}
    chosen = [row for row in chosen if (row.fault.name, row.fault.promise) not in known]
  left = [row for row in chosen if row.fault.name not in found.rows]
  say(f'{len(left)} of {len(chosen)} rows are left')
  with tempfile.TemporaryDirectory(prefix='faults-') as folder:
    for result in results(left, pathlib.Path(folder), flags.seed, flags.workers):
      found.add(result)
      kept = f'kept {result["kept"]} of {result["injected"]}'
      say(f'{result["fault"]}: {kept}, {result["seconds"]} s')
  if page := found.documented(table, PAGE.read_text()):
    PAGE.write_text(page)
    say(f'the table is in {PAGE}')
  text, code = conclusion(found.of([row.fault for row in chosen]))
  print(text)
  return code


def _times(row: Fault, flags: argparse.Namespace) -> int:
  return row.short if flags.short else row.full


def _is_chosen(row: Fault, flags: argparse.Namespace) -> bool:
  return _times(row, flags) > 0 and any(word in row.name for word in flags.only or [''])


def conclusion(rows: Sequence[dict]) -> tuple[str, int]:
  """(the table and the broken promises, the exit code)."""
  seconds = sum(row['seconds'] for row in rows)
  injected, kept = (sum(row[name] for row in rows) for name in ('injected', 'kept'))
  lines = [markdown(rows), f'\n{kept} of {injected} kept, in {seconds / 60:.1f} minutes.']
  lines += [f'\nBROKEN, {row["fault"]}: {line}' for row in rows for line in row['broken']]
  return '\n'.join(lines), int(kept < injected)


def _flags(arguments: Sequence[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    prog='scripts/faults',
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument(
    '--short', action='store_true', help='one fault for each kind of promise, a few times'
  )
  parser.add_argument(
    '--only', action='append', metavar='TEXT', help='only rows whose name contains TEXT; repeatable'
  )
  parser.add_argument(
    '--missing', action='store_true', help='only rows of which results.md has no result'
  )
  parser.add_argument(
    '--workers',
    type=int,
    default=1,
    metavar='N',
    help='rows at a time, each on a core (default: 1)',
  )
  parser.add_argument(
    '--seed',
    type=int,
    default=0,
    metavar='N',
    help='seed of the random moments (default: 0)',
  )
  parser.add_argument(
    '--json',
    type=pathlib.Path,
    metavar='FILE',
    help='append a JSON object for each row to FILE, and leave out rows that it has of this commit',
  )
  return parser.parse_args(arguments)


if __name__ == '__main__':
  sys.exit(main())
