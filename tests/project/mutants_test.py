"""scripts/mutants: which mutants of a tiny clone are caught, survive, moved or are stale."""

import pathlib
import shutil
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / 'tests' / 'mutants' / 'mutants.py'
FILES = {
  'package/signs.py': """
def double(x):
  return x + x


def sign(x):
  return 1 if x > 0 else -1
""",
  'package/moved.py': """
def half(x):
  return x / 2
""",
  'tests/conftest.py': """
import hypothesis

hypothesis.settings.register_profile('first_failure')
""",
  'tests/signs_test.py': """
import sys

sys.path.insert(0, '.')
from package import moved, signs


def test_double_and_half():
  assert moved.half(signs.double(3)) == 3


def test_sign():
  assert signs.sign(2) == 1
""",
}
MUTANTS = [  # (what becomes of it, file, old, new, select)
  ('caught', 'signs', 'x + x', 'x', 'double'),
  ('SURVIVED', 'signs', 'x > 0', 'x >= 0', 'sign'),
  ('caught', 'gone', 'x / 2', 'x', 'half or sign'),
  ('STALE, its text is found 0 times', 'signs', 'x * 2', 'x', 'double'),
  ('STALE, its text is found 2 times', 'signs', 'return', 'yield', 'double'),
  ("STALE, signs_test has no test 'triple'", 'signs', '-1', '1', 'triple'),
]


@pytest.fixture
def clone(tmp_path):
  """A clone of a package of three functions, two with tests."""
  for name, text in FILES.items():
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
  (tmp_path / 'tests' / 'mutants').mkdir()
  shutil.copy(SCRIPT, tmp_path / 'tests' / 'mutants')
  subprocess.run(['git', 'init', '--quiet'], cwd=tmp_path, check=True)
  return tmp_path


def run(clone, mutants, *flags):
  """Runs the script on these mutants -> (exit code, lines of its output)."""
  rows = [
    f"[[mutant]]\nfile = 'package/{file}.py'\nold = '{old}'\nnew = '{new}'\n"
    f"test = 'signs_test'\nselect = '{select}'\n"
    for _, file, old, new, select in mutants
  ]
  (clone / 'tests' / 'mutants' / 'tiny.toml').write_text('\n'.join(rows))
  command = [sys.executable, 'tests/mutants/mutants.py', *flags]
  done = subprocess.run(command, cwd=clone, capture_output=True, text=True, check=False)
  return done.returncode, done.stdout.splitlines()


def test_each_mutant_is_reported_and_the_exit_code_says_what_is_wrong(clone):
  code, lines = run(clone, MUTANTS)
  assert code == 1 and lines[-1] == 'all: 6 mutants, 2 caught, 3 stale'
  for expected, _, old, _, _ in MUTANTS:
    (line,) = [line for line in lines if f' {old!r} ->' in line]
    assert line.startswith(expected), line


def test_stale_mutants_are_counted_without_a_run(clone):
  code, lines = run(clone, MUTANTS, '--count')
  assert code == 3 and lines[-2:] == ['tiny: 6 mutants, 3 stale', 'all: 6 mutants, 3 stale']
  assert run(clone, MUTANTS[:3], '--count')[0] == 0
