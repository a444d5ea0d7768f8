"""The current folder may be a stranger's: only packages that a command names come from it."""

import os
import pathlib
import subprocess
import sys

import pytest

from valkyrie import packages
from valkyrie.config import current_folder
from valkyrie.errors import ConfigurationError

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Of the packages that we need, and of the standard library, here and in the processes that build.
TRAPS = ('numpy', 'gin', 'jax', 'tqdm', 'typing', 'argparse', 'multiprocessing', 'pickle', 'socket')
PACKAGE = """
import gin

@gin.configurable
def doubled(x):
  return 2 * x
"""


@pytest.fixture
def stranger(tmp_path):
  """A folder whose modules leave a file beside them when they are imported."""
  for name in TRAPS:
    trap = f'open({str(tmp_path / "executed")!r}, "a").write({name!r})\nraise SystemExit(99)\n'
    (tmp_path / f'{name}.py').write_text(trap)
  return tmp_path


def start(folder, *arguments):
  done = subprocess.run(
    [sys.executable, *arguments],
    cwd=folder,
    env={**os.environ, 'PYTHONPATH': str(ROOT)},
    capture_output=True,
    text=True,
    check=False,
  )
  assert not (folder / 'executed').exists(), done.stderr
  return done


@pytest.mark.parametrize('flags', [['-m', 'valkyrie.main'], ['-Bmvalkyrie.main']])
def test_no_module_of_a_run_is_imported_when_it_is_opened_in_its_folder(stranger, flags):
  done = start(stranger, *flags, '--model_dir=.')
  assert done.returncode == 78 and 'is not the directory of a run' in done.stderr


def test_the_processes_that_build_a_store_import_none_either(stranger):
  (stranger / 'text').mkdir()
  for name in 'ab':
    (stranger / 'text' / f'{name}.txt').write_text(name * 100)
  flags = ['--task=text', '--source=text', '--output=store', '--shards=2', '--processes=2']
  done = start(stranger, '-m', 'valkyrie.data.build_store', *flags, '--option=held_out=0.5')
  assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
  'form', [['-m', 'valkyrie.main'], ['-P', '-c', 'from valkyrie.main import main; main()']]
)
def test_a_package_that_is_allowed_is_found_by_module_and_by_console_script(stranger, form):
  """A console script is started without the current folder, as by -P."""
  package = stranger / 'my_package'
  package.mkdir()
  (package / 'parts.py').write_text(PACKAGE)
  (stranger / 'mine.gin').write_text(
    "import my_package.parts\ninclude 'gin/tiny_cpu.gin'\ndoubled.y = 1\n"
  )
  done = start(stranger, *form, '--gin_file=mine.gin', '--gin_allow_import=my_package')
  assert done.returncode == 78 and 'mine.gin:3: doubled has no parameter' in done.stderr


@pytest.fixture
def here(tmp_path, monkeypatch):
  folder = tmp_path / 'here'
  folder.mkdir()
  monkeypatch.chdir(folder)
  monkeypatch.setattr(sys, 'path', [*sys.path])
  return folder


def test_a_package_in_the_current_folder_comes_after_all_others(here):
  current_folder.search('nowhere.at.all')
  assert str(here) not in sys.path
  (here / 'only_here.py').touch()
  current_folder.search('only_here.part')
  assert sys.path[-1] == str(here)
  current_folder.search('only_here')
  assert sys.path.count(str(here)) == 1


def test_two_packages_of_one_name_are_refused(here, tmp_path, monkeypatch):
  (tmp_path / 'twice.py').touch()
  (here / 'twice').mkdir()
  monkeypatch.syspath_prepend(tmp_path)
  current_folder.search('twice')  # the folder that a clone of it has around it
  (here / 'twice' / '__init__.py').touch()
  with pytest.raises(ConfigurationError, match=r'two packages twice: .*here/twice/__init'):
    current_folder.search('twice')
  assert str(here) not in sys.path
  monkeypatch.setattr(sys, 'path', [str(here), *sys.path])  # the advice
  current_folder.search('twice')


def test_a_process_of_ours_searches_the_current_folder_only_in_a_clone(here, monkeypatch):
  assert packages.start('valkyrie.main') == [sys.executable, '-P', '-m', 'valkyrie.main']
  monkeypatch.chdir(ROOT)
  assert packages.start('valkyrie.main') == [sys.executable, '-m', 'valkyrie.main']
