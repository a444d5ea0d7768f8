"""Standard error without the information of native libraries, and with everything else."""

import os
import subprocess
import sys

SCRIPT = """
import os, sys, time
from valkyrie.monitoring.native_messages import without_noise
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
from valkyrie.monitoring.native_messages import without_noise
with without_noise():
  print('the reason', file=sys.stderr, flush=True)
  os._exit(75)
"""
  command = [sys.executable, '-c', script]
  done = subprocess.run(command, check=False, capture_output=True, text=True)
  assert (done.returncode, done.stderr) == (75, 'the reason\n')
