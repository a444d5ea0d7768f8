"""Standard error without readers, and without the information of native libraries."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os, sys, time
from valkyrie.distributed.standard_streams import without_noise
print('before', file=sys.stderr, flush=True)
with without_noise():
  os.write(2, b'WARNING: All log messages before absl::InitializeLog() is called ...\\n')
  os.write(2, b'I0000 00:00:1795404782.042839    3764 cudart_stub.cc:31] Could not find\\n')
  os.write(2, b'E0000 00:00:1795404782.042839    3764 cuda_dnn.cc:31] Unable to register\\n')
  os.write(2, b'E0000 00:00:1795404782.042839    3764 service.cc:31] out of memory\\n')
  os.write(2, b'first half')
  time.sleep(0.5)
  os.write(2, b', second half\\rbar 50%')
time.sleep(0.3)
os.write(2, b'I0000 00:00:1795404782.042839    3764 later.cc:31] after\\n')
"""


def test_only_noise_is_dropped():
  command = [sys.executable, '-c', SCRIPT]
  done = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ})
  assert done.stderr.splitlines() == [
    'before',
    'E0000 00:00:1795404782.042839    3764 service.cc:31] out of memory',
    'first half, second half',
    'bar 50%I0000 00:00:1795404782.042839    3764 later.cc:31] after',
  ]


def test_a_message_of_python_is_not_lost_when_the_process_ends_at_once():
  script = """
import os, sys
from valkyrie.distributed.standard_streams import without_noise
with without_noise():
  print('the reason', file=sys.stderr, flush=True)
  os._exit(75)
"""
  command = [sys.executable, '-c', script]
  done = subprocess.run(command, check=False, capture_output=True, text=True)
  assert (done.returncode, done.stderr) == (75, 'the reason\n')


@pytest.mark.parametrize('streams', ['2> /dev/full', '2>&-', '2>&1 | true'])
def test_a_reader_that_went_away_ends_nothing(tmp_path, streams):
  script = f"""
import pathlib, sys, time
from valkyrie.distributed.standard_streams import lasting
with lasting():
  for _ in range(3):
    time.sleep(0.2)
    print('a line', file=sys.stderr, flush=True)
  pathlib.Path('{tmp_path}/done').touch()
"""
  (tmp_path / 'script.py').write_text(script)
  command = f'{sys.executable} {tmp_path}/script.py {streams}; exit ${{PIPESTATUS[0]}}'
  done = subprocess.run(['bash', '-c', command], check=False)
  assert done.returncode == 0 and (tmp_path / 'done').exists()
