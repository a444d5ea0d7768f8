"""Injects every fault that a run shall survive, for real, and prints one table of what was kept.

A tiny model is trained from the command line, without TensorFlow, on one core; all runs share its
compiled programs. `--short` injects each fault a few times, and is part of the test suite.
"""

import argparse
from collections.abc import Sequence
import importlib
import json
import os
import pathlib
import sys
import tempfile
import time
import traceback

from injections.laboratory import CORES, Laboratory, keep_to
from injections.table import FAULTS, Fault, Trial, Unavailable, markdown, summary

# Each adds its rows to the table.
MODULES = (
  'kills', 'signals', 'supervision', 'damage', 'disks', 'numbers', 'data', 'world', 'mistakes',
  'pairs',
)  # fmt: skip


def measure(row: Fault, lab: Laboratory, times: int) -> dict:
  """Injects one row; what goes wrong in the injection itself counts as a promise not kept."""
  began, trials = time.monotonic(), []
  try:
    for trial in row.inject(lab, times):
      trials.append(trial)
      if trial.found is not None:
        _say(f'  BROKEN, {trial.what}: {trial.found}')
  except Unavailable as reason:
    return {**summary(row, [], 0.0), 'unavailable': str(reason)}
  except Exception as error:
    words = ''.join(traceback.format_exception(error))
    trials.append(Trial('the injection', words[-2000:]))
    _say(f'  BROKEN, the injection: {words}')
  return summary(row, trials, time.monotonic() - began)


def main(arguments: Sequence[str] | None = None) -> int:
  """Prints the table; 1 where a promise was not kept."""
  for module in MODULES:
    importlib.import_module(f'injections.{module}')
  flags = _flags(arguments)
  os.environ['JAX_PLATFORMS'] = 'cpu'
  keep_to(CORES[0])
  rows = []
  with tempfile.TemporaryDirectory(prefix='faults-') as folder:
    began = time.monotonic()
    lab = Laboratory(pathlib.Path(folder), flags.seed)
    _say(f'an undisturbed run takes {lab.run_seconds:.1f} s')
    for row in FAULTS:
      times = row.short if flags.short else row.full
      if not times or not any(word in row.name for word in flags.only or ['']):
        continue
      rows.append(measure(row, lab, times))
      found = rows[-1]
      _say(f'{row.name}: kept {found["kept"]} of {found["injected"]}, {found["seconds"]} s')
      if flags.json:
        with flags.json.open('a') as file:
          file.write(json.dumps(found) + '\n')
  text, code = conclusion(rows, time.monotonic() - began)
  print(text)
  return code


def conclusion(rows: Sequence[dict], seconds: float) -> tuple[str, int]:
  """The table, what was broken, and the exit code."""
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
  parser.add_argument('--short', action='store_true', help='each fault a few times')
  parser.add_argument(
    '--only', action='append', metavar='TEXT', help='rows whose name holds it; repeatable'
  )
  parser.add_argument(
    '--seed', type=int, default=0, metavar='N', help='of moments and places (default: 0)'
  )
  parser.add_argument(
    '--json', type=pathlib.Path, metavar='FILE', help='also append one JSON object a row there'
  )
  return parser.parse_args(arguments)


def _say(text: str) -> None:
  print(text, file=sys.stderr, flush=True)


if __name__ == '__main__':
  sys.exit(main())
