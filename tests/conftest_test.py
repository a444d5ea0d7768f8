"""Which tests `scripts/test --fast` leaves out."""

import subprocess
import sys

import pytest


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
