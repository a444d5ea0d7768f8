"""Paths that a user names: below a home that may be unknown, and where nobody may look."""

import errno
import os
import pathlib
import pwd
import subprocess
import sys

import pytest

from valkyrie import main
from valkyrie.config import parse, paths
from valkyrie.data import build_store, store_location, vocabularies
from valkyrie.data.selection import Selection
from valkyrie.errors import (
  ConfigurationError,
  DataError,
  StorageError,
  converted,
  raise_outage,
  with_home,
)
from valkyrie.inference import export, infer
from valkyrie.lab.comparison import compare
from valkyrie.lab.decomposition import exchange
from valkyrie.monitoring import html_report, recorded_run
from valkyrie.weights import huggingface, source

ROOT = pathlib.Path(__file__).parents[2]
NOBODY = '~no_such_user/file'
TOO_LONG = pathlib.Path('x' * 300)  # refused by the system as a folder without rights is


@pytest.fixture
def homeless(monkeypatch):
  """A user without HOME and without an entry in the system's list, as in some containers."""

  def unknown(number):
    raise KeyError(number)

  monkeypatch.delenv('HOME', raising=False)
  for variable in ('VALKYRIE_CACHE', 'XDG_CACHE_HOME'):
    monkeypatch.delenv(variable, raising=False)
  monkeypatch.setattr(pwd, 'getpwuid', unknown)


def test_a_home_is_put_in_place_of_the_sign(monkeypatch):
  monkeypatch.setenv('HOME', '/home/me')
  assert with_home('~/a') == '/home/me/a' and with_home('~') == '/home/me'
  assert with_home('a~/b') == 'a~/b'
  assert with_home('~notes.txt') == '~notes.txt'  # a name in the current folder


def test_without_a_home_no_folder_named_by_the_sign_appears(homeless, monkeypatch):
  for path in ('~', '~/a', NOBODY):
    with pytest.raises(ConfigurationError, match='Set HOME, or write the path without ~'):
      with_home(path)
  with pytest.raises(ConfigurationError, match='VALKYRIE_CACHE=FOLDER sets the cache alone'):
    paths.cache()
  monkeypatch.setenv('VALKYRIE_CACHE', '/cache')
  assert paths.cache() == pathlib.Path('/cache')


@pytest.mark.parametrize(
  'use',
  [
    lambda: parse.read_statements([NOBODY]),
    lambda: parse.read_statements(['x.gin'], search_paths=[NOBODY]),
    lambda: vocabularies.load(f'{NOBODY}.model'),
    lambda: source.open_source(NOBODY),
    lambda: infer._writer(NOBODY).__enter__(),
  ],
)
def test_an_unknown_home_is_refused(use):
  with pytest.raises(ConfigurationError, match=r"in '~no_such_user/.*' is unknown"):
    use()


def test_the_program_that_prints_a_model_names_an_unknown_home(capsys):
  assert huggingface.main([NOBODY]) == 78
  assert "in '~no_such_user/file' is unknown" in capsys.readouterr().err


@pytest.mark.parametrize(
  'use',
  [
    lambda: main.run(['--gin_file=gin/tiny_cpu.gin', '--model_dir=', '--run_mode=explain']),
    lambda: parse.read_statements(['']),
    lambda: source.open_source(''),
    lambda: infer._writer('').__enter__(),
    lambda: export.export('run', '', opened=lambda: None, model=lambda: None),
    lambda: store_location.store_path(
      Selection('letters', 'train', vocabularies.ByteVocabulary()), ''
    ),
  ],
)
def test_an_empty_path_is_not_the_current_folder(use):
  with pytest.raises(ConfigurationError, match='A path is empty'):
    use()


def test_a_missing_folder_of_an_output_is_to_be_made(tmp_path):
  advice = 'No such file or directory .* Make the folder that is missing, or name another --output'
  with pytest.raises(StorageError, match=advice), infer._writer(str(tmp_path / 'no' / 'x.jsonl')):
    pass


@pytest.mark.parametrize('output', [NOBODY, 'gs://bucket/output'])
def test_commands_refuse_an_output_that_would_be_a_folder_of_this_name(
  tmp_path, monkeypatch, capsys, output
):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'metrics.jsonl').write_text('{"step": 1, "step_seconds": 1.0, "loss": 2.0}\n')
  assert build_store.main(['--task=text', f'--output={output}']) == 78
  assert html_report.main(['.', f'--output={output}']) == 78
  assert html_report.main(['.', f'--folder={output}']) == 78
  assert compare.main(['--gin_file=gin/words_cpu.gin', '--seconds=1', f'--results={output}']) == 78
  assert capsys.readouterr().err.count(output) == 4
  with pytest.raises(ConfigurationError, match=output):
    export.export('run', output, opened=lambda: None, model=lambda: None)
  with pytest.raises(ConfigurationError, match=output):
    infer._writer(output).__enter__()
  assert not [*tmp_path.glob('~*'), *tmp_path.glob('gs:*')]


@pytest.mark.parametrize(
  'use',
  [
    lambda: parse.read_statements([str(TOO_LONG)]),
    lambda: source.open_source(str(TOO_LONG)),
    lambda: huggingface.configuration(TOO_LONG),
    lambda: recorded_run.read_run(TOO_LONG),
    lambda: exchange.read_answers(TOO_LONG),
    lambda: store_location.open_store(
      Selection('letters', 'train', vocabularies.ByteVocabulary()), str(TOO_LONG)
    ),
  ],
)
def test_a_path_that_cannot_be_looked_up_is_no_missing_one(use):
  with pytest.raises(StorageError, match='cannot be looked up: File name too long'):
    use()


def test_a_folder_that_cannot_be_listed_is_not_without_weights(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  tmp_path.chmod(0o311)
  user = os.geteuid()
  if user == 0:  # whom no rights stop
    os.seteuid(65534)
  try:
    with pytest.raises(StorageError, match=r'^\. cannot be listed: Permission denied'):
      source.open_source('.')
  finally:
    os.seteuid(user)
    tmp_path.chmod(0o700)


def test_a_python_that_reads_names_as_ascii_is_named():
  code = (
    "import sys; from valkyrie.errors import usable_path; usable_path('--model_dir', sys.argv[1])"
  )
  locale = {'LC_ALL': 'C', 'PYTHONUTF8': '0', 'PYTHONCOERCECLOCALE': '0', 'PYTHONPATH': str(ROOT)}
  tried = {
    utf8: subprocess.run(
      [sys.executable, '-c', code, 'r\u00fcn'],
      env={**os.environ, **locale, 'PYTHONUTF8': utf8},
      capture_output=True,
      text=True,
      check=False,
    )
    for utf8 in ('0', '1')
  }
  assert 'reads names as ascii: set PYTHONUTF8=1' in tried['0'].stderr
  assert tried['1'].returncode == 0, tried['1'].stderr


def test_one_function_knows_the_home():
  users = [
    file.name
    for file in (ROOT / 'valkyrie').rglob('*.py')
    if any(name in file.read_text() for name in ('expanduser', 'Path.home'))
  ]
  assert users == ['errors.py']


@pytest.mark.parametrize(
  ('error', 'is_outage'),
  [
    (OSError(errno.EIO, 'Input/output error'), True),
    (OSError(errno.ESTALE, 'Stale file handle'), True),
    (OSError('When reading x: AWS Error NETWORK_CONNECTION during HeadObject operation'), True),
    (OSError('When reading x: AWS Error SLOW_DOWN during GetObject operation'), True),
    (TimeoutError('timed out'), True),
    (OSError('When reading x: AWS Error NO_SUCH_KEY during GetObject operation'), False),
    (OSError('Corrupt snappy compressed data.'), False),
    (OSError(errno.EACCES, 'Permission denied'), False),
    (ValueError('it is no JSON'), False),
  ],
)
def test_a_disk_that_fails_is_no_damage(error, is_outage):
  expected = StorageError if is_outage else DataError
  with pytest.raises(expected) as caught, converted((OSError, ValueError), DataError, 'x', 'Mend.'):
    raise error
  assert ('Check its disk or the network' in str(caught.value)) == is_outage
  if not is_outage:
    raise_outage('x', error)
