"""Breaks the code on purpose, one line at a time, and checks that the tests detect it.

Each mutant of tests/mutants/ replaces a text of one file, in a copy of the clone; the tests that it
names must then fail. Before that, the same tests must pass in the unchanged copy.
"""

import argparse
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import threading
import tomllib
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
_worker = threading.local()  # .folder: the copy of the clone of this thread


class Mutant(NamedTuple):
  """One deliberate error.

  section: the stem of the file of tests/mutants/ that lists it.
  file: the path of the file to change, from the clone.
  old, new: a text that occurs once in the file, and its replacement.
  test, select: tests/TEST.py, and the -k expression of those of its tests that must fail.
  """

  section: str
  file: str
  old: str
  new: str
  test: str
  select: str

  def __str__(self) -> str:
    return f'{self.file}: {self.old!r} -> {self.new!r}; {self.test} -k {self.select!r}'


def load() -> list[Mutant]:
  """All mutants, by section."""
  return [
    Mutant(path.stem, **row)
    for path in sorted((ROOT / 'tests' / 'mutants').glob('*.toml'))
    for row in tomllib.loads(path.read_text())['mutant']
  ]


def outcome(mutant: Mutant) -> str:
  """'caught', or the reason why the mutant is not caught."""
  file = _worker.folder / mutant.file
  original = file.read_text()
  if original.count(mutant.old) != 1:
    return 'TEXT NOT FOUND ONCE'
  file.write_text(original.replace(mutant.old, mutant.new))
  try:
    code, summary = run_tests(mutant.test, mutant.select)
  finally:
    file.write_text(original)
  outcomes = {0: 'SURVIVED', 5: 'NO TEST SELECTED'}
  return 'caught' if code == 1 else f'{outcomes.get(code, f"ERROR {code}")} ({summary})'


def run_tests(test: str, select: str) -> tuple[int, str]:
  """Runs tests in the copy of this thread; returns pytest's exit code, and its last line."""
  arguments = ['-x', '-q', '-p', 'no:xdist', '--hypothesis-profile=first_failure']
  arguments += [f'tests/{test}.py', '-k', select]
  command = [sys.executable, '-m', 'pytest', *arguments]
  environment = {**os.environ, 'PYTHONPATH': str(_worker.folder)}
  done = subprocess.run(
    command, cwd=_worker.folder, env=environment, capture_output=True, text=True, check=False
  )
  return done.returncode, (done.stdout.splitlines() or [''])[-1]


def _copy_clone(place: str) -> None:
  """Copies all files that git does not ignore to a folder of this thread."""
  _worker.folder = pathlib.Path(tempfile.mkdtemp(dir=place))
  command = ['git', 'ls-files', '-z', '--cached', '--others', '--exclude-standard']
  listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
  for name in listed.split('\0'):
    if (ROOT / name).is_file():
      (_worker.folder / name).parent.mkdir(parents=True, exist_ok=True)
      shutil.copy2(ROOT / name, _worker.folder / name)


def main(arguments: Sequence[str] | None = None) -> int:
  """Prints the outcome of each mutant; returns 1 if one is not caught."""
  parser = argparse.ArgumentParser(prog='scripts/mutants', description=__doc__)
  parser.add_argument('--only', default='', metavar='TEXT', help='TEXT in file, old or test')
  parser.add_argument('--workers', type=int, default=2, metavar='N', help='mutants at once')
  flags = parser.parse_args(arguments)
  mutants = [m for m in load() if any(flags.only in text for text in (m.file, m.old, m.test))]
  tests = sorted({m.test for m in mutants})
  selections = [' or '.join({f'({m.select})': 0 for m in mutants if m.test == t}) for t in tests]
  with (
    tempfile.TemporaryDirectory(prefix='mutants-') as place,
    ThreadPoolExecutor(flags.workers, initializer=_copy_clone, initargs=(place,)) as pool,
  ):
    unchanged = zip(tests, pool.map(run_tests, tests, selections), strict=True)
    if failing := [f'  {test}: {summary}\n' for test, (code, summary) in unchanged if code]:
      parser.exit(1, 'Repair these tests, which fail without a mutant:\n' + ''.join(failing))
    caught = Counter()
    for mutant, found in zip(mutants, pool.map(outcome, mutants), strict=True):
      print(f'{found}: {mutant}', flush=True)
      caught[mutant.section] += found == 'caught'
  for section, number in Counter(m.section for m in mutants).items():
    print(f'{section}: {caught[section]} of {number} caught')
  print(f'{caught.total()} of {len(mutants)} caught')
  return int(caught.total() < len(mutants))


if __name__ == '__main__':
  sys.exit(main())
