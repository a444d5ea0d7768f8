"""The small files of a run in a bucket: read, added to and replaced through a local copy."""

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import threading

from faults.fake_faults import on
import pytest

from valkyrie.distributed import supervisor
from valkyrie.errors import ConfigurationError, StorageError
from valkyrie.monitoring import html_report
from valkyrie.monitoring.json_lines import JsonLines
from valkyrie.storage.bucket import Bucket, Changed
from valkyrie.storage.run_directory import opened, uploaded

CHANGES = on('POST|PUT|DELETE')


@pytest.fixture
def address(gcs, request):
  return f'gs://bucket/{re.sub("[^a-z0-9]+", "-", request.node.name)}/run'


def test_files_are_replaced_and_added_to(address):
  Bucket(address).write('eval/metrics.jsonl', b'{"step": 1}\n')
  Bucket(address).write('config.gin', b'a = 1')
  run = opened(address)
  assert str(run) == address
  folder = pathlib.Path(run)
  assert (folder / 'config.gin').read_bytes() == b'a = 1'
  with uploaded(run):
    (folder / 'config.gin').write_text('a = 2')
    (folder / 'train').mkdir()
    (folder / 'train' / 'events.out.tfevents.1').write_bytes(b'event')
    lines = JsonLines(folder / 'eval' / 'metrics.jsonl')
    lines.write({'step': 2})
    lines.close()
    # Another process adds to the same file.
    Bucket(address).append('eval/metrics.jsonl', b'{"step": 9}\n')
  found = Bucket(address)
  assert found.read('config.gin')[0] == b'a = 2'
  assert found.read('train/events.out.tfevents.1')[0] == b'event'
  assert (
    found.read('eval/metrics.jsonl')[0].split() == b'{"step": 1} {"step": 9} {"step": 2}'.split()
  )
  run = opened(address)
  again = pathlib.Path(run)
  assert len((again / 'eval' / 'metrics.jsonl').read_text().splitlines()) == 3
  assert not (again / 'train').exists(), 'event files of other processes are not read'


def test_a_machine_without_a_temporary_folder(address, tmp_path, monkeypatch):
  monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path / 'missing'))
  with pytest.raises(StorageError, match=r'has no place: .*set TMPDIR to a folder'):
    opened(address)


@pytest.mark.parametrize('deleted', [False, True])
def test_a_file_that_was_rewritten_is_replaced(address, deleted):
  Bucket(address).write('metrics.jsonl', b'{"step": 1}\n{"st')
  run = opened(address)
  with uploaded(run):
    if deleted:
      Bucket(address).delete(Bucket(address).objects('metrics.jsonl'))
    JsonLines(pathlib.Path(run, 'metrics.jsonl')).close()  # removes the torn line
  assert Bucket(address).read('metrics.jsonl')[0] == b'{"step": 1}\n'


@pytest.mark.parametrize('fault', ['lose', 'tear'])
def test_two_writers_lose_and_repeat_no_line(address, gcs, fault):
  def write(writer):
    for number in range(5):
      Bucket(address).append('lines', f'{writer}-{number}\n'.encode())

  trouble = getattr(gcs, fault)(CHANGES, times=None, probability=0.1)
  threads = [threading.Thread(target=write, args=(writer,)) for writer in 'ab']
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  trouble.end()
  lines = Bucket(address).read('lines')[0].decode().split()
  assert sorted(lines) == [f'{writer}-{number}' for writer in 'ab' for number in range(5)]
  assert list(Bucket(address).objects()) == ['lines'], 'no parts are left'


def test_a_write_replaces_only_the_expected_generation(address, gcs):
  bucket = Bucket(address)
  first = bucket.write('name', b'1', replaces=0)
  with pytest.raises(Changed):
    bucket.write('name', b'2', replaces=0)
  second = bucket.write('name', b'2', replaces=first)
  gcs.lose(CHANGES, times=1)
  third = bucket.write('name', b'3', replaces=second)
  assert bucket.read('name') == (b'3', third)


def test_lines_that_cannot_be_uploaded_are_reported(address, gcs):
  run = opened(address)
  with (
    pytest.raises(StorageError, match=r'last metrics and logs of gs://.* are lost'),
    uploaded(run),
  ):
    pathlib.Path(run, 'log.txt').write_text('a line')
    trouble = gcs.fail(403, CHANGES)
  with pytest.raises(ValueError, match='the cause') as failed, uploaded(run):
    raise ValueError('the cause')
  trouble.end()
  assert 'The last metrics and logs' in failed.value.__notes__[0]


def test_a_supervisor_reports_into_the_bucket(address):
  report = "import json, os; os.write(int(os.environ['VALKYRIE_HEARTBEAT'].split(':')[0]), "
  code = f"{report}json.dumps({{'model_dir': {address!r}}}).encode() + b'\\n'); raise SystemExit(3)"
  assert supervisor.main(['--', sys.executable, '-c', code]) == 3
  (line,) = Bucket(address).read('supervise.jsonl')[0].splitlines()
  assert json.loads(line)['code'] == 3


def test_a_report_reads_a_bucket(address, tmp_path):
  Bucket(address).write('metrics.jsonl', b'{"step": 1, "loss": 2.5, "tokens": 10}\n')
  page = tmp_path / 'report.html'
  assert html_report.main([address, f'--output={page}']) == 0
  assert '2.5' in page.read_text()


def test_missing_packages_are_named(address):
  code = f"""
import sys
sys.modules['gcsfs'] = None
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == 'gcsfs' else find(name, *rest)
from valkyrie.main import main
sys.exit(main(['--model_dir={address}', '--run_mode=eval']))
"""
  done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=False)
  assert done.returncode == ConfigurationError.exit_code
  assert f'{sys.executable} -m pip install gcsfs' in done.stderr


def test_no_run_is_said(address):
  command = [sys.executable, '-m', 'valkyrie.main', f'--model_dir={address}', '--run_mode=eval']
  done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
  assert done.returncode == ConfigurationError.exit_code
  assert f'{address} is not the directory of a run' in done.stderr
