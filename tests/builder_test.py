"""data/store_location: one process builds the stores of a run, and ends with it."""

import os

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
    return lambda: imported.read_text().split()

  return write


def has_ended(number):
  try:
    os.kill(int(number), 0)
  except ProcessLookupError:
    return True
  return False


def test_one_process_answers_all_orders_and_ends_with_them(package, capfd):
  imported = package('print("a package that prints")')
  with store_location.builder, store_location.builder:
    for _ in range(2):
      with pytest.raises(ConfigurationError, match=r'There is no module of_users\.no_module'):
        store_location.builder.order(UNKNOWN, 'Building a store')
    (number,) = imported()
    assert not has_ended(number)
  assert has_ended(number)
  assert 'a package that prints' in capfd.readouterr().err


def test_an_order_alone_has_a_process_alone(package):
  imported = package()
  for _ in range(2):
    with pytest.raises(ConfigurationError, match='There is no module'):
      store_location.builder.order(UNKNOWN, 'Building a store')
  assert len(set(imported())) == 2 and all(map(has_ended, imported()))


def test_a_process_that_ends_is_reported_and_another_one_started(package):
  imported = package('os._exit(9)')
  again = r'python -m valkyrie.data.build_store --task=of_users.no_module:name --output=nowhere$'
  with store_location.builder:
    for _ in range(2):
      with pytest.raises(DataError, match=rf'A build ended with exit code 9; (.*\n)+  {again}'):
        store_location.builder.order(UNKNOWN, 'A build')
  assert len(set(imported())) == 2
