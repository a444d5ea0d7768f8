"""Which tests `scripts/test --fast` leaves out, and what the suite says at its start."""

import platform
import subprocess
import sys

from conftest import NAMED_AT_THE_START, pytest_report_header
import jax
import pytest


def test_the_suite_names_its_python_and_versions():
  python, _, versions = pytest_report_header().partition(': ')
  assert python == f'Python {platform.python_version()} ({sys.executable})'
  assert f'jax {jax.__version__}, ' in versions
  assert versions.count(', ') == len(NAMED_AT_THE_START) - 1


def start():
  return subprocess.run([sys.executable, '-c', ''], check=True)


@pytest.fixture
def starting():
  return [start]


def marks(request):
  return {mark.name for mark in request.node.iter_markers()} - {'parametrize'}


def test_a_test_whose_fixture_can_start_a_process_is_marked(request, starting):
  assert marks(request) == {'process'}


@pytest.mark.parametrize('first', [0, 1])
@pytest.mark.parametrize('second', [0, 1])
def test_a_test_is_marked_after_its_first_case(request, first, second):
  assert marks(request) == ({'further_case'} if first or second else set())
