"""scripts/Dockerfile, without a container engine: its files are enough, and its command starts."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
TEXT = (ROOT / 'scripts' / 'Dockerfile').read_text()
# [instruction, its arguments] of each step; a backslash continues a line.
STEPS = [
  line.split(maxsplit=1)
  for line in TEXT.replace('\\\n', ' ').splitlines()
  if line and not line.startswith('#')
]


def arguments(instruction):
  return [rest for name, rest in STEPS if name == instruction]


@pytest.fixture(scope='module')
def image(tmp_path_factory):
  """A folder with the files that the COPY steps put into the image."""
  folder = tmp_path_factory.mktemp('image')
  for step in arguments('COPY'):
    _, *sources, target = step.split()
    for source in map(ROOT.joinpath, sources):
      if source.is_dir():
        shutil.copytree(source, folder / target, ignore=shutil.ignore_patterns('__pycache__'))
      else:
        shutil.copy(source, folder / target)
  return folder


def run(image, command):
  path = f'{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ["PATH"]}'
  return subprocess.run(
    command,
    cwd=image,
    env={**os.environ, 'PATH': path, 'PYTHONPATH': str(image)},
    capture_output=True,
    text=True,
    check=False,
  )


def test_the_copied_files_are_all_that_the_set_up_reads(image):
  done = run(image, ['python', 'setup.py', '--quiet', 'build'])
  assert done.returncode == 0, done.stderr
  assert (image / 'build' / 'lib' / 'valkyrie' / 'gin' / 'tiny_cpu.gin').is_file()
  (step,) = (rest for rest in arguments('RUN') if 'setup_environment' in rest)
  assert step.endswith("bash -c 'source scripts/setup_environment && setup_environment $EXTRA'")
  done = run(image, ['bash', '-c', 'source scripts/setup_environment && find_python'])
  assert done.returncode == 0, done.stderr


def test_the_extras_of_its_head_exist():
  extras = (*re.findall(r'EXTRA=(\w+)', TEXT), *re.findall(r'# or (\w+)', TEXT))
  assert extras == ('cuda', 'tpu')
  text = (ROOT / 'setup.py').read_text()
  assert all(f"'{extra}': [" in text for extra in extras)


def test_the_first_process_is_the_supervisor_of_a_user_without_rights(image):
  (entry,) = map(json.loads, arguments('ENTRYPOINT'))  # a list is started without a shell
  done = run(image, [*entry, '--help'])
  assert done.returncode == 0 and '--model_dir' in done.stdout
  assert 'supervise: exit code 0' in done.stderr
  names = [name for name, _ in STEPS]
  assert arguments('USER') == ['valkyrie'] and names.index('USER') < names.index('COPY')


def test_the_set_up_replaces_only_its_own_environment(image):
  """A .venv that somebody else made may have packages of theirs."""
  theirs, ours = image / '.venv' / 'theirs', image / '.venv' / 'pins.txt'
  theirs.parent.mkdir()
  theirs.touch()
  make = ['bash', '-c', 'source scripts/setup_environment && find_python && make_venv']
  done = run(image, make)
  assert done.returncode == 1 and theirs.exists()
  assert f'{theirs.parent} was not made by these scripts' in done.stderr
  theirs.parent.rename(image / 'renamed')
  done = run(image, make)
  assert done.returncode == 0, done.stderr
  assert (image / '.venv' / 'bin' / 'python').exists()
  assert ours.exists()  # an installation that was interrupted is begun anew
  ours.parent.joinpath('left').touch()
  assert run(image, make).returncode == 0
  assert not ours.parent.joinpath('left').exists()


@pytest.mark.parametrize('name', ['.venv', '.venv-newest'])
@pytest.mark.parametrize('is_link', [False, True])
def test_an_environment_of_somebody_else_stays(tmp_path, name, is_link):
  """A link may lead to the environment of another clone."""
  image = tmp_path / 'clone'
  image.mkdir()
  shutil.copytree(ROOT / 'scripts', image / 'scripts')
  shutil.copytree(ROOT / 'constraints', image / 'constraints')
  shutil.copy(ROOT / 'setup.py', image)
  theirs = image / 'theirs' if is_link else image / name
  theirs.mkdir()
  (theirs / 'kept').touch()
  if is_link:
    (theirs / 'pins.txt').touch()
    (image / name).symlink_to(theirs)
  newest = 'yes' if name.endswith('newest') else ''
  begin = f'source scripts/setup_environment; newest={newest}; setup_environment'
  done = run(image, ['bash', '-c', begin])
  assert done.returncode == 1, done.stderr
  assert f'{image / name} was not made by these scripts' in done.stderr
  assert (theirs / 'kept').exists() and (image / name).is_symlink() == is_link
