"""The mutants of scripts/mutants fit the code: a text to replace, and a test that exists."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture
def mutants(monkeypatch):
  monkeypatch.syspath_prepend(ROOT / 'scripts')
  import mutants  # noqa: PLC0415

  return mutants.load()


def test_every_mutant_changes_one_place_of_its_file(mutants):
  assert len(mutants) > 200
  for mutant in mutants:
    text = (ROOT / mutant.file).read_text()
    assert text.count(mutant.old) == 1, mutant
    assert mutant.new != mutant.old, mutant
    if mutant.file.endswith('.py'):
      ast.parse(text.replace(mutant.old, mutant.new))


def test_no_mutant_is_listed_twice(mutants):
  assert len(set(mutants)) == len(mutants)


def test_every_mutant_selects_a_test(mutants):
  """The first term of each alternative is in the name of a test, the others may be parameters."""
  for mutant in mutants:
    names = re.findall(r'^def (test_\w+)', (ROOT / 'tests' / f'{mutant.test}.py').read_text(), re.M)
    for alternative in mutant.select.split(' or '):
      term = alternative.split(' and ')[0]
      assert any(term in name for name in names), mutant
