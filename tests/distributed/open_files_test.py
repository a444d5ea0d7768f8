"""A process that may open too few files says so at its start."""

import subprocess
import sys

import pytest

CHECK = 'import resource; from valkyrie.distributed import open_files; open_files.check(); '
CHECK += 'print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])'


@pytest.mark.parametrize('limits', ['ulimit -S -n 32', 'ulimit -n 200'])
def test_a_low_limit_is_raised_as_far_as_it_may_be(limits):
  command = f'{limits}; exec {sys.executable} -c "{CHECK}"'
  done = subprocess.run(['bash', '-c', command], capture_output=True, text=True, check=True)
  assert int(done.stdout) >= 200


def test_a_limit_that_stays_too_low_ends_a_command_at_once():
  program = f'{sys.executable} -m valkyrie.main --gin_file=gin/tiny_cpu.gin'
  command = f'ulimit -n 32; exec {program}'
  done = subprocess.run(['bash', '-c', command], capture_output=True, text=True, check=False)
  assert done.returncode == 78, done.stderr
  assert 'This process may open 32 files, and a run needs 64.' in done.stderr
