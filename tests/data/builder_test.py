"""data/store_location: a process of its own builds a store for a run, and ends with it."""

import os
import subprocess
import sys
import time

import pytest

from valkyrie.data import store_location
from valkyrie.errors import ConfigurationError, DataError

UNKNOWN = ['--task=of_users.no_module:name', '--output=nowhere']


@pytest.fixture
def package(tmp_path, monkeypatch):
  """Writes a package whose import appends the process to a file, and executes more code."""
  monkeypatch.syspath_prepend(tmp_path)
  (tmp_path / 'of_users').mkdir()

  def write(more=''):
    imported = tmp_path / 'imported'
    code = f'import os\nprint(os.getpid(), file=open({str(imported)!r}, "a"))\n{more}'
    (tmp_path / 'of_users' / '__init__.py').write_text(code)
    return lambda: imported.read_text().split() if imported.exists() else []

  return write


def has_ended(number):
  try:
    os.kill(int(number), 0)
  except ProcessLookupError:
    return True
  return False


def test_a_build_has_a_process_of_its_own(package, capfd):
  imported = package('print("a package that prints")')
  with pytest.raises(ConfigurationError, match=r'There is no module of_users\.no_module'):
    store_location.build(UNKNOWN, 'Building a store')
  (number,) = imported()
  assert has_ended(number)
  assert 'a package that prints' in capfd.readouterr().err


def test_a_process_that_ends_is_reported(package):
  package('os._exit(9)')
  again = r'python -m valkyrie.data.build_store --task=of_users.no_module:name --output=nowhere$'
  with pytest.raises(DataError, match=rf'A build ended with exit code 9; (.*\n)+  {again}'):
    store_location.build(UNKNOWN, 'A build')


def test_a_build_ends_with_its_run(package):
  imported = package('import time\ntime.sleep(600)')
  code = f'from valkyrie.data import store_location\nstore_location.build({UNKNOWN}, "A build")'
  env = os.environ | {'PYTHONPATH': os.pathsep.join(sys.path)}
  with subprocess.Popen([sys.executable, '-c', code], env=env, stderr=subprocess.PIPE) as run:
    while not imported():
      time.sleep(0.01)
    run.kill()
    assert run.stderr is not None
    run.stderr.read()  # to its end, when no process has it any more
