"""Injects faults into real runs, and prints a table of the promises that were kept.

The runs train a tiny model by the command line, without TensorFlow, on one core, and share its
compiled programs. `--short` injects each fault a few times, and is part of the test suite.

With `--json=FILE` the same command goes on after a stop. When FILE has all rows of a commit, the
table is written into docs/reliability.md.
"""

import argparse
from collections.abc import Sequence
import importlib
import os
import pathlib
import signal
import sys
import tempfile
import time
import traceback

from injections.harness import CORES, Harness, keep_to
from injections.results import PAGE, Results, clean_commit
from injections.table import FAULTS, Fault, Trial, Unavailable, markdown, summary

# Each module registers its rows of the table.
MODULES = (
  'kills', 'signals', 'starts', 'supervision', 'supervisors', 'damage', 'hostile', 'disks',
  'file_systems', 'numbers', 'lengths', 'data', 'world', 'mistakes', 'trust', 'pairs', 'buckets',
)  # fmt: skip


def measure(row: Fault, harness: Harness, times: int) -> dict:
  """Injects the faults of a row; an error of the injection counts as a promise not kept."""
  began, trials = time.monotonic(), []
  try:
    for trial in row.inject(harness, times):
      trials.append(trial)
      if trial.failure is not None:
        _say(f'  BROKEN, {trial.what}: {trial.failure}')
  except Unavailable as reason:
    return {**summary(row, [], 0.0), 'unavailable': str(reason)}
  except Exception as error:
    text = ''.join(traceback.format_exception(error))
    trials.append(Trial('the injection', text[-2000:]))
    _say(f'  BROKEN, the injection: {text}')
  return summary(row, trials, time.monotonic() - began)


def main(arguments: Sequence[str] | None = None) -> int:
  """Prints the table, and returns 1 if a promise was not kept."""
  for module in MODULES:
    importlib.import_module(f'injections.{module}')
  flags = _flags(arguments)
  os.environ['JAX_PLATFORMS'] = 'cpu'
  signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets its `&` jobs ignore it
  keep_to(CORES[0])
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))  # removes what rows have mounted
  results = Results(flags.json, clean_commit(), flags.short, flags.seed)
  chosen = [row for row in FAULTS if _times(row, flags) and _is_chosen(row, flags)]
  if not chosen:
    _say(f'no row has a name with {" or ".join(map(repr, flags.only))}')
    return 2
  with tempfile.TemporaryDirectory(prefix='faults-') as folder:
    harness = None
    for row in chosen:
      if row.name in results.rows:
        _say(f'{row.name}: in {flags.json}')
        continue
      if harness is None:
        harness = Harness(pathlib.Path(folder), flags.seed)
        _say(f'an undisturbed run takes {harness.run_seconds:.1f} s')
      harness.random.seed(f'{flags.seed} {row.name}')  # the same after a stop
      results.add(result := measure(row, harness, _times(row, flags)))
      _say(f'{row.name}: kept {result["kept"]} of {result["injected"]}, {result["seconds"]} s')
  if page := results.documented(FAULTS, PAGE.read_text()):
    PAGE.write_text(page)
    _say(f'the table is in {PAGE}')
  text, code = conclusion(results.of(chosen))
  print(text)
  return code


def _times(row: Fault, flags: argparse.Namespace) -> int:
  return row.short if flags.short else row.full


def _is_chosen(row: Fault, flags: argparse.Namespace) -> bool:
  return any(word in row.name for word in flags.only or [''])


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
  parser.add_argument('--short', action='store_true', help='inject each fault a few times')
  parser.add_argument(
    '--only', action='append', metavar='TEXT', help='only rows whose name contains TEXT; repeatable'
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


def _say(text: str) -> None:
  print(text, file=sys.stderr, flush=True)


if __name__ == '__main__':
  sys.exit(main())
