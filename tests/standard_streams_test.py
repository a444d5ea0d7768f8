"""Standard streams that are full, closed or without readers."""

import subprocess
import sys

import pytest

SCRIPT = """
import os, pathlib, subprocess, sys, time
from valkyrie.distributed.console import lasting_streams
with lasting_streams():
  with open('/FOLDER/file', 'w') as file:
    for _ in range(3):
      time.sleep(0.1)
      print('a line', file=sys.stderr, flush=True)
      print('a line', flush=True)
      subprocess.run(['sh', '-c', 'echo of another program; echo; echo >&2'])
  assert not os.path.getsize('/FOLDER/file')
  pathlib.Path('/FOLDER/done').touch()
"""
STREAMS = ['2> /dev/full', '2>&-', '2>&1 | true', '> /dev/full', '| true', '<&- >&- 2>&-']


@pytest.mark.parametrize('streams', STREAMS)
def test_a_reader_that_went_away_ends_nothing(tmp_path, streams):
  (tmp_path / 'script.py').write_text(SCRIPT.replace('/FOLDER', str(tmp_path)))
  command = f'{sys.executable} {tmp_path}/script.py {streams}; exit ${{PIPESTATUS[0]}}'
  done = subprocess.run(['bash', '-c', command], check=False, stderr=subprocess.PIPE, text=True)
  assert done.returncode == 0 and (tmp_path / 'done').exists(), done.stderr
  lost = 'A part of standard output was lost ('
  assert (lost in done.stderr) != ('2>' in streams) and 'Traceback' not in done.stderr
