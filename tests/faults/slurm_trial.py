"""Runs jobs of scripts/launch_slurm on a SLURM cluster of only this machine, and disturbs them.

The table has the promises that were kept. The cluster needs the programs of Debian's packages
slurm-wlm and munge; its files and its ports are its own, and it ends with this command.
"""

import argparse
from collections.abc import Sequence
import os
import pathlib
import signal
import sys
import tempfile

from faults.__main__ import conclusion
from faults.cluster import Cluster
from faults.harness import CORES, keep_to
from faults.jobs import Jobs
from faults.rows import measure
import faults.slurm  # noqa: F401, registers the rows
from faults.table import FAULTS, Unavailable


def main(arguments: Sequence[str] | None = None) -> int:
  """Prints the table; returns 1 if a promise was not kept, and 2 without SLURM."""
  flags = _flags(arguments)
  signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # after the daemons
  os.environ['JAX_PLATFORMS'] = 'cpu'
  keep_to(CORES[0])
  rows = []
  with tempfile.TemporaryDirectory(prefix='slurm-') as folder:
    place = pathlib.Path(folder, 'cluster')
    place.mkdir()
    try:
      with Cluster(place) as cluster:
        harness = Jobs(pathlib.Path(folder, 'runs'), 0, cluster)
        for row in FAULTS:
          if any(word in row.name for word in flags.only or ['']):
            rows.append(measure(row, harness, row.full))
            kept = rows[-1]['kept'] == rows[-1]['injected']
            print(f'{"ok" if kept else "broken"}: {row.name}', file=sys.stderr, flush=True)
    except Unavailable as reason:
      print(f'error: {reason}', file=sys.stderr)
      return 2
  text, code = conclusion(rows)
  print(text)
  return code


def _flags(arguments: Sequence[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    prog='scripts/faults slurm',
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument(
    '--only', action='append', metavar='TEXT', help='only rows whose name contains TEXT; repeatable'
  )
  return parser.parse_args(arguments)


if __name__ == '__main__':
  sys.exit(main())
