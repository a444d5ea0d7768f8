"""Standard error without readers."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize('streams', ['2> /dev/full', '2>&-', '2>&1 | true'])
def test_a_reader_that_went_away_ends_nothing(tmp_path, streams):
  script = f"""
import pathlib, sys, time
from valkyrie.distributed.console import lasting_stderr
with lasting_stderr():
  for _ in range(3):
    time.sleep(0.2)
    print('a line', file=sys.stderr, flush=True)
  pathlib.Path('{tmp_path}/done').touch()
"""
  (tmp_path / 'script.py').write_text(script)
  command = f'{sys.executable} {tmp_path}/script.py {streams}; exit ${{PIPESTATUS[0]}}'
  done = subprocess.run(['bash', '-c', command], check=False)
  assert done.returncode == 0 and (tmp_path / 'done').exists()
