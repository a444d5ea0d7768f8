"""Stores that a pipeline of Apache Beam builds. Needs Beam, whose pins exclude some of ours:

bash -c 'source scripts/setup_environment; setup_environment beam'
.venv-beam/bin/python -m pip install pytest
.venv-beam/bin/python -m pytest tests/data/beam_store_test.py
"""

import os
import pathlib
import subprocess
import sys

import pytest

from valkyrie.data import build_store

ROOT = pathlib.Path(__file__).resolve().parents[2]
REASON = 'needs Apache Beam, which an environment of its own has: see tests/data/beam_store_test.py'
# DirectRunner would first download another runner, Prism, where it can. This one is its fallback.
BEAM = ['--beam', '--runner=FnApiRunner', '--direct_num_workers=2']
BEAM += ['--direct_running_mode=multi_processing']
NOTED = """
import os
import pathlib

from valkyrie.data import document_source
from valkyrie.tasks import text


class Noted(text.TextSource):
  def documents(self, split, shard, shards):
    pathlib.Path({folder!r}, f'{{os.getpid()}}').touch()
    return super().documents(split, shard, shards)


document_source.register('noted', Noted())
"""


@pytest.fixture
def noted(tmp_path):
  """A folder of text, and a task that notes the processes that read it."""
  pytest.importorskip('apache_beam', reason=REASON)
  for folder in ('text', 'processes'):
    (tmp_path / folder).mkdir()
  for number in range(40):
    (tmp_path / 'text' / f'{number}.txt').write_text(f'Text {number % 30} ' * (1 + number % 7))
  (tmp_path / 'noted_tasks.py').write_text(NOTED.format(folder=str(tmp_path / 'processes')))
  return tmp_path


def build(folder, output, *options):
  command = [sys.executable, '-m', 'valkyrie.data.build_store', '--task=noted_tasks:noted']
  command += [f'--source={folder / "text"}', f'--output={folder / output}', '--shards=5']
  return subprocess.run(
    [*command, '--unique', *options],
    env=os.environ | {'PYTHONPATH': f'{ROOT}{os.pathsep}{folder}'},
    check=False,
    capture_output=True,
    text=True,
  )


def files(folder):
  found = (file for file in folder.rglob('*') if file.is_file())
  return {str(file.relative_to(folder)): file.read_bytes() for file in found}


def test_two_workers_build_the_same_bytes(noted):
  alone = build(noted, 'alone')
  (process,) = (noted / 'processes').iterdir()
  process.unlink()
  together = build(noted, 'together', *BEAM)
  assert alone.returncode == together.returncode == 0, together.stderr
  assert len([*(noted / 'processes').iterdir()]) == 2
  assert files(noted / 'alone') == files(noted / 'together')
  assert len(files(noted / 'alone')) == 5 * 5 + 2
  assert alone.stdout.splitlines()[1:] == together.stdout.splitlines()[1:]


def test_an_error_of_a_worker_is_the_last_line(noted):
  (noted / 'text' / '7.txt').write_bytes(b'caf\xe9')
  failed = build(noted, 'failed', *BEAM)
  assert failed.returncode == 65
  *_, last = failed.stderr.splitlines()
  assert f'{noted}/text/7.txt is not UTF-8: byte 3 is 0xe9' in last


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    (['--processes=2', *BEAM], 'got --shard=None and --processes=2. Remove both'),
    ([*BEAM, '--unique'], 'Found --unique after --beam'),
    (BEAM, 'setup_environment beam'),
  ],
)
def test_mistakes_are_refused(options, message, tmp_path, monkeypatch, capsys):
  monkeypatch.setitem(sys.modules, 'apache_beam', None)
  command = ['build_store', '--task=text', f'--output={tmp_path}', '--shards=5']
  monkeypatch.setattr(sys, 'argv', [*command, *options])
  assert build_store.main() == 78
  assert message in capsys.readouterr().err


def test_an_unknown_runner_is_refused(noted):
  failed = build(noted, 'failed', '--beam', '--runner=NoSuchRunner')
  assert failed.returncode == 78
  assert 'Unexpected pipeline runner: NoSuchRunner' in failed.stderr.splitlines()[-1]
