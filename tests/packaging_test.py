"""A wheel is as whole as a clone."""

import pathlib
import shutil
import subprocess
import sys
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
WHERE = """
import valkyrie.config.paths, valkyrie.tasks
print(valkyrie.tasks.__file__, valkyrie.config.paths.GIN)
"""


def source_files(folder: pathlib.Path) -> set[str]:
  files = (file for file in folder.rglob('*') if file.suffix in ('.py', '.gin'))
  return {str(file.relative_to(folder)) for file in files}


def test_a_wheel_carries_the_gin_files_and_the_tasks_inside_the_package(tmp_path):
  clone, installed = tmp_path / 'clone', tmp_path / 'installed'
  for folder in ('valkyrie', 'gin', 'tasks'):
    shutil.copytree(ROOT / folder, clone / folder)
  for file in ('setup.py', 'pyproject.toml', 'LICENSE'):
    shutil.copy(ROOT / file, clone)
  build = [sys.executable, '-m', 'pip', 'wheel', '--no-deps', '--no-build-isolation']
  subprocess.run([*build, f'--wheel-dir={tmp_path}', clone], check=True, capture_output=True)
  (wheel,) = tmp_path.glob('valkyrie-*.whl')
  zipfile.ZipFile(wheel).extractall(installed)

  inside = installed / 'valkyrie'
  assert source_files(inside / 'gin') == source_files(ROOT / 'gin')
  assert source_files(inside / 'tasks') == source_files(ROOT / 'tasks')
  assert source_files(inside) > source_files(ROOT / 'valkyrie')
  found = subprocess.run(
    [sys.executable, '-c', WHERE],
    env={'PYTHONPATH': str(installed)},
    cwd=tmp_path,
    check=True,
    capture_output=True,
    text=True,
  )
  assert found.stdout.split() == [str(inside / 'tasks/__init__.py'), str(inside / 'gin')]
