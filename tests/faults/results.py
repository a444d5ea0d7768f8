"""Results of rows in a file of JSON lines, and the table of the newest results in results.md."""

from collections.abc import Sequence
import dataclasses
import json
import pathlib
import platform
import subprocess
from typing import Any

import jax
import page_blocks

from faults.table import Fault, markdown
from valkyrie.monitoring.json_lines import JsonLines

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = ROOT / 'tests' / 'faults' / 'results.md'
BEGIN, END = '<!-- faults: scripts/faults -->', '<!-- end of faults -->'
COLUMNS = ('fault', 'injected', 'promise', 'kept', 'worst', 'commit')


def clean_commit() -> str | None:
  """The commit of the checkout; None if files were changed after it, or without git."""
  command = ['git', 'describe', '--always', '--dirty', '--abbrev=12', '--exclude=*']
  try:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
  except FileNotFoundError:
    return None
  found = done.stdout.strip()
  return found if found.isalnum() else None


@dataclasses.dataclass
class Results:
  """The results of one commit, form of the table and seed.

  A file keeps them row by row, so that a table that was stopped goes on where it was.

  Attributes:
    file: the file, which may have results of other commits, too; None keeps none.
    commit: None for files that no commit has, whose results are not found again.
    rows: {name: result}.
  """

  file: pathlib.Path | None
  commit: str | None
  short: bool
  seed: int
  rows: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    self._of = {'commit': self.commit, 'short': self.short, 'seed': self.seed}
    if self.file:
      # Removes the rest of a line, and finds a full disk now.
      JsonLines(self.file, patience=0.0).close()
      if self.commit:
        lines = map(json.loads, self.file.read_text().splitlines())
        found = (row for row in lines if {**row, **self._of} == row)
        self.rows |= {row['fault']: row for row in found}

  def add(self, row: dict[str, Any]) -> None:
    """Keeps the result of a row."""
    self.rows[row['fault']] = row
    if self.file and 'unavailable' not in row:
      lines = JsonLines(self.file)
      lines.write({**self._of, **row})
      lines.close()

  def of(self, faults: Sequence[Fault]) -> list[dict[str, Any]]:
    """The results of those rows that have one, in the order of the table."""
    return [self.rows[row.name] for row in faults if row.name in self.rows]

  def documented(self, faults: Sequence[Fault], page: str) -> str | None:
    """The page with these results in its table; None if they are not those of a clean commit.

    A row of the page stays as it is until it runs again, or its fault or promise is another one.
    """
    if self.short or not self.commit or not self.file:
      return None
    known = {(row['fault'], row['promise']): row for row in rows_of(page)}
    known |= {
      (row['fault'], row['promise']): {**row, 'commit': self.commit}
      for row in self.of(faults)
      if 'unavailable' not in row
    }
    rows = [
      known[fault.name, fault.promise] for fault in faults if (fault.name, fault.promise) in known
    ]
    injected = sum(int(row['injected']) for row in rows)
    versions = f'Python {platform.python_version()}, jax {jax.__version__}'
    about = (
      f'{len(rows)} of {len(faults)} rows, {injected:,} faults, each row at its commit (the newest '
      f'with {versions}):'
    )
    return page_blocks.with_block(page, BEGIN, END, f'{about}\n\n{markdown(rows, COLUMNS)}')


def rows_of(page: str) -> list[dict[str, str]]:
  """The rows of the table of a page."""
  table = page.partition(BEGIN)[2].partition(END)[0]
  lines = [line for line in table.splitlines() if line.startswith('| ')]
  cells = [[cell.strip() for cell in line.strip('|').split('|')] for line in lines[2:]]
  return [dict(zip(COLUMNS, values, strict=True)) for values in cells]
