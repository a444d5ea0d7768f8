"""A wheel is as whole as a clone."""

import ast
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
import pytest

from valkyrie import __version__, packages

ROOT = pathlib.Path(__file__).resolve().parents[2]
WHERE = """
import importlib.util
import valkyrie.config.paths, valkyrie.tasks.fineweb
print(valkyrie.tasks.fineweb.__file__, valkyrie.config.paths.GIN)
folders = ('tests', 'scripts', 'docs')
print([name for name in folders if importlib.util.find_spec(f'valkyrie.{name}')])
"""


PINS = {file.stem: file for file in (ROOT / 'constraints').glob('*.txt')}
PYTHONS = sorted(name for name in PINS if name.startswith('python-'))


def requirements():
  """{extra: its requirements} of setup.py; those of every installation are under None."""
  (call,) = (
    node
    for node in ast.walk(ast.parse((ROOT / 'setup.py').read_text()))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == 'setup'
  )
  values = {keyword.arg: keyword.value for keyword in call.keywords}
  always = ast.literal_eval(values['install_requires'])
  return {None: always, **ast.literal_eval(values['extras_require'])}


def pins_of(*names):
  """{package: its version}; the first of the files that has a package counts."""
  pins = {}
  for name in names:
    for line in PINS[name].read_text().splitlines():
      package, equals, version = line.partition('==')
      if equals:
        pins.setdefault(canonicalize_name(package), Version(version))
  return pins


@pytest.mark.parametrize('python', PYTHONS)
@pytest.mark.parametrize('extra', requirements())
def test_the_pins_are_a_solution_of_every_extra(extra, python):
  """`bash scripts/pins` asks a registry, and tries what the packages need in turn, too."""
  pins = pins_of(*([extra] if extra in PINS else []), python)
  for text in [*requirements()[None], *requirements()[extra]]:
    requirement = Requirement(text)
    pin = pins.get(canonicalize_name(requirement.name))
    assert pin is not None, f'{text} has no pin: run bash scripts/pins'
    assert pin in requirement.specifier, f'{text} excludes the pin {pin}'


def test_no_page_or_message_installs_the_package_of_somebody_else():
  """`valkyrie` on the public index is not ours: a command names this clone, or what is missing."""
  listed = subprocess.run(['git', 'ls-files', '-z'], cwd=ROOT, capture_output=True, check=False)
  names = listed.stdout.decode().split('\0')
  files = [ROOT / name for name in names if name] or [*ROOT.rglob('*')]  # the latter in an archive
  command = re.compile(rb"""pip3? install (?:-[-\w]+ )*['"]?valkyrie\b(?!/|-[\d.]+-py)""")
  found = [str(file) for file in files if file.is_file() and command.search(file.read_bytes())]
  assert found == []


def test_what_messages_install_is_what_an_extra_installs(monkeypatch):
  extras = {
    (requirement.name, *requirement.extras)
    for texts in requirements().values()
    for requirement in map(Requirement, texts)
  }
  calls = [
    node.args[0].value
    for file in (ROOT / 'valkyrie').rglob('*.py')
    for node in ast.walk(ast.parse(file.read_text()))
    if isinstance(node, ast.Call) and ast.unparse(node.func) == 'packages.install'
    if isinstance(node.args[0], ast.Constant)
  ]
  assert {'gcsfs', 'jax[tpu]', 'lm-eval', 'tokenizers'} <= {*calls}
  for text in calls:
    requirement = Requirement(text)
    assert (requirement.name, *requirement.extras) in extras, text

  monkeypatch.setattr(sys, 'executable', '/a b/python')
  assert packages.install('jax[tpu]') == "'/a b/python' -m pip install 'jax[tpu]'"
  monkeypatch.setattr(packages.importlib.util, 'find_spec', lambda name: None)
  assert packages.install('gcsfs').startswith("'/a b/python' -m ensurepip && '/a b/python' -m pip ")


def test_the_scripts_name_the_oldest_python_that_works(tmp_path):
  def tried(release):
    program = tmp_path / 'python'
    program.write_text(f'#!/bin/sh\necho {release}\n')
    program.chmod(0o755)
    find = 'source scripts/setup_environment; find_python; echo "$PYTHON_VERSION"'
    return subprocess.run(
      ['bash', '-c', find],
      cwd=ROOT,
      env={'PATH': '/usr/bin:/bin', 'PYTHON': str(program)},
      capture_output=True,
      text=True,
      check=False,
    )

  for python in PYTHONS:
    version = python.removeprefix('python-')
    head = PINS[python].read_text().splitlines()[0]
    oldest = re.match(rf'# Python ({version}\.\d+) or later\.', head)[1]
    assert tried(oldest).stdout == f'{version}\n'
    assert f'{version} ({oldest} or later)' in tried('3.10.13').stderr
    *_, patch = oldest.split('.')
    if int(patch) > 0:
      refused = tried(f'{version}.{int(patch) - 1}')
      assert refused.returncode == 1 and f'{version} ({oldest} or later)' in refused.stderr
    assert oldest in (ROOT / 'CONTRIBUTING.md').read_text()
    assert oldest in (ROOT / 'README.md').read_text()


def imported_from(folder: pathlib.Path, elsewhere: pathlib.Path) -> list[str]:
  """The file of the task fineweb, the gin files, and the other importable folders of the clone."""
  command, environment = [sys.executable, '-c', WHERE], {'PYTHONPATH': str(folder)}
  done = subprocess.run(
    command, env=environment, cwd=elsewhere, check=True, capture_output=True, text=True
  )
  return done.stdout.split()


def source_files(folder: pathlib.Path) -> set[str]:
  files = (file for file in folder.rglob('*') if file.suffix in ('.py', '.gin'))
  return {str(file.relative_to(folder)) for file in files}


def test_a_clone_has_the_tasks_as_a_package_and_none_of_its_other_folders(tmp_path):
  assert imported_from(ROOT, tmp_path) == [str(ROOT / 'tasks/fineweb.py'), str(ROOT / 'gin'), '[]']


def test_a_wheel_carries_the_gin_files_and_the_tasks_inside_the_package(tmp_path):
  clone, installed = tmp_path / 'clone', tmp_path / 'installed'
  for folder in ('valkyrie', 'gin', 'tasks'):
    shutil.copytree(ROOT / folder, clone / folder)
  for file in ('setup.py', 'pyproject.toml', 'LICENSE', 'README.md', 'MANIFEST.in'):
    shutil.copy(ROOT / file, clone)
  shutil.copytree(ROOT / 'scripts', clone / 'scripts')
  build = [sys.executable, '-m', 'pip', 'wheel', '--no-deps', '--no-build-isolation']
  subprocess.run([*build, f'--wheel-dir={tmp_path}', clone], check=True, capture_output=True)
  (wheel,) = tmp_path.glob('valkyrie-*.whl')
  zipfile.ZipFile(wheel).extractall(installed)

  inside = installed / 'valkyrie'
  assert source_files(inside / 'gin') == source_files(ROOT / 'gin')
  assert source_files(inside / 'tasks') == source_files(ROOT / 'tasks')
  assert source_files(inside) > source_files(ROOT / 'valkyrie')
  assert imported_from(installed, tmp_path) == [
    str(inside / 'tasks/fineweb.py'),
    str(inside / 'gin'),
    '[]',
  ]

  assert (inside / 'py.typed').exists()
  (about,) = installed.glob('valkyrie-*.dist-info')
  metadata = (about / 'METADATA').read_text()
  assert '# Valkyrie' in metadata and f'\nVersion: {__version__}\n' in metadata
  assert f'\n## {__version__} ' in (ROOT / 'CHANGELOG.md').read_text()
  commands = (about / 'entry_points.txt').read_text()
  for command, module in re.findall(r'^(\S+) = ([\w.]+):main$', commands, re.M):
    code = f"import sys; sys.argv = ['{command}', '--help']; from {module} import main; main()"
    environment = {'PYTHONPATH': str(installed)}
    found = subprocess.run(
      [sys.executable, '-c', code], env=environment, capture_output=True, text=True, check=True
    )
    lacks = 'pip install lm-eval' in found.stderr and command == 'valkyrie-lm-eval'
    assert lacks or re.search(rf'usage: ({command}|lm-eval) ', found.stdout)
  launchers = {file.name for file in (ROOT / 'scripts').glob('launch_*')}
  assert {file.name for file in installed.glob('valkyrie-*.data/scripts/*')} == launchers
