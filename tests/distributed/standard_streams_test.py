"""Standard streams that are full, closed or without readers."""

import contextlib
import os
import pty
import re
import select
import socket
import subprocess
import sys
import time

import pytest

from valkyrie.distributed import console
from valkyrie.errors import DataError, StorageError

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


# Writes more than a pipe holds, by every way that a run or its hooks have.
UNREAD = """
import faulthandler, logging, os, pathlib, sys, warnings
from tqdm import tqdm
from valkyrie.distributed.console import lasting_streams
with lasting_streams():
  for number in range(2000):
    print(f'line {number} ' + 80 * 'e', file=sys.stderr)
    print(f'line {number} ' + 80 * 'o')
  warnings.warn(100_000 * 'w')
  logging.warning(100_000 * 'l')
  sys.stderr.buffer.write(100_000 * b'b')
  tqdm.write(100_000 * 't')
  for _ in tqdm(range(3), desc=70_000 * 'd', mininterval=0):
    pass
  if sys.argv[2] == 'also C':
    faulthandler.dump_traceback(file=2)
    os.write(2, 100_000 * b'c')
  pathlib.Path(sys.argv[1]).touch()
  sys.stdin.readline()
  print('at the end', file=sys.stderr)
"""


def run_unread(tmp_path, ends, also):
  """Runs the script, reads from its standard error when it is done, and returns what that was."""
  reader, writer = ends
  script, done = tmp_path / 'script.py', tmp_path / 'done'
  script.write_text(UNREAD)
  command = [sys.executable, str(script), str(done), also]
  process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=writer, stderr=writer)
  os.close(writer)
  while not done.exists():
    assert process.poll() is None
    time.sleep(0.01)
  pieces = []
  while select.select([reader], [], [], 0.5)[0]:  # so that there is room
    pieces.append(os.read(reader, 2**20))
  assert process.stdin is not None
  process.stdin.write(b'\n')
  process.stdin.close()
  with contextlib.suppress(OSError):  # as a terminal ends
    while piece := os.read(reader, 2**20):
      pieces.append(piece)
  os.close(reader)
  assert process.wait(60) == 0
  return b''.join(pieces).decode()


def socket_pair():
  return [end.detach() for end in socket.socketpair()]


@pytest.mark.parametrize(
  ('stream', 'also'), [(os.pipe, 'also C'), (pty.openpty, 'Python'), (socket_pair, 'Python')]
)
def test_a_stream_that_nobody_reads_holds_up_nothing(tmp_path, stream, also):
  said = run_unread(tmp_path, stream(), also)
  first, last = said.splitlines()[0], said.splitlines()[-2]
  assert first.startswith('line 0 e') and last == 'at the end', said[-300:]
  assert '(lines missing here, since nobody read them: ' in said
  assert 'A part of standard output was lost (nobody read it).' in said


def test_a_result_waits_for_its_reader_also_below_a_supervisor(tmp_path):
  script = tmp_path / 'script.py'
  script.write_text("""
import os, pathlib, sys
from valkyrie.distributed import console
with console.lasting_streams():
  print('begun', file=sys.stderr)
  with console.standard_output('') as file:
    for number in range(50_000):
      print(number, file=file)
""")
  supervise = [sys.executable, '-m', 'valkyrie.distributed.supervisor', '--']
  for prefix in ([], supervise):
    command = [*prefix, sys.executable, str(script)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stderr is not None
    process.stderr.readline()
    time.sleep(0.5)  # the pipe is full before anybody reads
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert output.decode().split() == [*map(str, range(50_000))]


PRINTED = """
import logging, sys
from valkyrie.distributed import console
with console.lasting_streams():
  print('\\x1b]0;title\\x07 of a name\\u202e')
  print('\\r 50%', end='', file=sys.stderr)
  logging.warning('\\x1b[31m of a log\\rvalkyrie: saved')
  with console.standard_output('') as file:
    file.write('\\x9b of a model\\n\\té\\n')
"""


def test_a_terminal_is_shown_what_it_would_obey(tmp_path):
  (tmp_path / 'script.py').write_text(PRINTED)
  ours, theirs = pty.openpty()
  command = [sys.executable, str(tmp_path / 'script.py')]
  subprocess.run(command, check=True, stdout=theirs, stderr=theirs, stdin=theirs)
  os.close(theirs)
  shown = os.read(ours, 10**5).decode().replace('\r\n', '\n')
  os.close(ours)
  assert r'\x1b]0;title\x07 of a name\u202e' in shown and r'\x9b of a model' in shown
  assert r'\x1b[31m of a log\rvalkyrie: saved' in shown
  assert '\r 50%' in shown and '\n\té\n' in shown.expandtabs(1).replace(' é', '\té')
  assert not re.search('[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202e]', shown)


def test_a_result_in_a_file_is_as_it_is(tmp_path):
  (tmp_path / 'script.py').write_text(PRINTED)
  with open(tmp_path / 'out', 'wb') as file:
    command = [sys.executable, str(tmp_path / 'script.py')]
    subprocess.run(command, check=True, stdout=file, stderr=subprocess.PIPE)
  assert '\x9b of a model\n\té\n' in (tmp_path / 'out').read_text()


@pytest.mark.parametrize(
  ('error', 'code', 'said'),
  [
    (StorageError('The disk is full.'), 74, 'valkyrie: The disk is full.\n'),
    (DataError('Found \x1b[2J.'), 65, 'valkyrie: Found \\x1b[2J.\n'),
    (KeyboardInterrupt(), 130, 'valkyrie: interrupted\n'),
    (None, 0, ''),
  ],
)
def test_a_program_explains_its_end(capsys, error, code, said):
  @console.program
  def main():
    if error:
      raise error

  assert main() == code
  assert capsys.readouterr().err == said


def test_a_program_shows_where_a_bug_is():
  @console.program
  def main():
    raise KeyError('a bug')

  with pytest.raises(KeyError):
    main()
