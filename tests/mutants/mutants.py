"""Breaks the code on purpose, one line at a time, and checks that the tests detect it.

Each mutant of tests/mutants/ replaces a text of one file, in a copy of the clone; the tests that it
names must then fail. Before that, the same tests must pass in the unchanged copy. A mutant whose
text or test is gone is stale: it is reported, and not run. The exit code is 1 if a mutant is not
caught, and 3 if all are caught but the stale ones.
"""

import argparse
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import tomllib
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
_worker = threading.local()  # .folder: the copy of the clone of this thread


class Mutant(NamedTuple):
  """One deliberate error.

  section: the stem of the file of tests/mutants/ that lists it.
  file: the path of the file to change, from the clone.
  old, new: a text that occurs once in the file, and its replacement.
  test, select: TEST.py in a folder of tests/, and the -k expression of the tests that must fail.
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


def place(mutant: Mutant) -> pathlib.Path | str:
  """The path of the file to change, from the clone, or the reason why the mutant is stale.

  A text that has left its file is searched for in the other files of the same top folder.
  """
  file = pathlib.Path(mutant.file)
  counts = {file: _count(file, mutant.old)}
  if not counts[file]:
    others = (ROOT / file.parts[0]).rglob(f'*{file.suffix}')
    counts = {other: _count(other, mutant.old) for other in (o.relative_to(ROOT) for o in others)}
  if (found := sum(counts.values())) != 1:
    return f'its text is found {found} times'
  test = test_file(mutant.test)
  names = re.findall(r'^def (test_\w+)', test.read_text(), re.M) if test else []
  for alternative in mutant.select.split(' or '):
    if not any(alternative.split(' and ')[0] in name for name in names):
      return f'{mutant.test} has no test {alternative!r}'
  return max(counts, key=counts.__getitem__)


def test_file(name: str) -> pathlib.Path | None:
  """The file of this name, whichever folder of tests/ has it."""
  return next((ROOT / 'tests').rglob(f'{name}.py'), None)


def _count(file: pathlib.Path, text: str) -> int:
  return (ROOT / file).read_text().count(text) if (ROOT / file).exists() else 0


def outcome(mutant: Mutant, path: pathlib.Path) -> str:
  """'caught', or the reason why the mutant is not caught; `path` is the file to change."""
  file = _worker.folder / path
  original = file.read_text()
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
  file = test_file(test)
  assert file is not None, test
  arguments += [str(file.relative_to(ROOT)), '-k', select]
  command = [sys.executable, '-m', 'pytest', *arguments]
  programs = ROOT / '.pytest_cache' / 'compiled'  # of tests that a mutant does not change
  environment = {
    **os.environ,
    'PYTHONPATH': str(_worker.folder),
    'JAX_COMPILATION_CACHE_DIR': str(programs),
  }
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


def run(mutants: dict[Mutant, pathlib.Path], workers: int) -> dict[Mutant, str]:
  """Prints and returns the outcome of each mutant."""
  tests = sorted({m.test for m in mutants})
  selections = [' or '.join({f'({m.select})': 0 for m in mutants if m.test == t}) for t in tests]
  outcomes = {}
  with (
    tempfile.TemporaryDirectory(prefix='mutants-') as folder,
    ThreadPoolExecutor(workers, initializer=_copy_clone, initargs=(folder,)) as pool,
  ):
    unchanged = zip(tests, pool.map(run_tests, tests, selections), strict=True)
    if failing := [f'  {test}: {summary}\n' for test, (code, summary) in unchanged if code]:
      sys.exit('Repair these tests, which fail without a mutant:\n' + ''.join(failing))
    found = pool.map(outcome, mutants, mutants.values())
    for mutant, outcomes[mutant] in zip(mutants, found, strict=True):
      print(f'{outcomes[mutant]}: {mutant}', flush=True)
  return outcomes


def main(arguments: Sequence[str] | None = None) -> int:
  """Prints the outcome of each mutant, then the counts of each section; returns the exit code."""
  parser = argparse.ArgumentParser(prog='scripts/mutants', description=__doc__)
  parser.add_argument('--only', default='', metavar='TEXT', help='TEXT in file, old or test')
  parser.add_argument('--workers', type=int, default=2, metavar='N', help='mutants at once')
  parser.add_argument('--count', action='store_true', help='run nothing; count all and the stale')
  flags = parser.parse_args(arguments)
  mutants = [m for m in load() if any(flags.only in text for text in (m.file, m.old, m.test))]
  places = {mutant: place(mutant) for mutant in mutants}
  stale = {mutant: reason for mutant, reason in places.items() if isinstance(reason, str)}
  for mutant, reason in stale.items():
    print(f'STALE, {reason}: {mutant}')
  current = {mutant: path for mutant, path in places.items() if isinstance(path, pathlib.Path)}
  outcomes = {} if flags.count else run(current, flags.workers)
  caught = [mutant for mutant, found in outcomes.items() if found == 'caught']
  parts = [('mutants', mutants), *([] if flags.count else [('caught', caught)]), ('stale', stale)]
  for section in [*dict.fromkeys(mutant.section for mutant in mutants), 'all']:
    numbers = [
      f'{sum(section in (mutant.section, "all") for mutant in part)} {name}' for name, part in parts
    ]
    print(f'{section}: {", ".join(numbers)}')
  return 1 if len(caught) < len(outcomes) else 3 if stale else 0


if __name__ == '__main__':
  sys.exit(main())
