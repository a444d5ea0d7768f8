"""Models, steps and the loop import neither TensorFlow nor seqio, which take seconds."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]

IMPORT_ALL = """
import importlib, pkgutil, sys
names = [
  'valkyrie.config.load', 'valkyrie.sharding.partitioner', 'valkyrie.data.feed',
  'valkyrie.run.train', 'valkyrie.run.evaluate', 'valkyrie.inference.infer',
]
for room in ('valkyrie.models', 'valkyrie.training'):
  found = list(pkgutil.walk_packages(importlib.import_module(room).__path__, room + '.'))
  assert found, room
  names += [module.name for module in found]
for name in names:
  importlib.import_module(name)
heavy = {'tensorflow', 'tensorflow_datasets', 'seqio', 'clu.metric_writers', 'torch'}
print(sorted(heavy & set(sys.modules)))
"""


@pytest.mark.invariant(13)
def test_nothing_heavy_is_imported():
  done = subprocess.run(
    [sys.executable, '-c', IMPORT_ALL], cwd=ROOT, capture_output=True, text=True, check=False
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout == '[]\n'


def test_the_folder_of_gin_files_is_no_package():
  """With an __init__.py, `import gin` from the clone would find it instead of gin itself."""
  assert (ROOT / 'gin').is_dir()
  assert not list((ROOT / 'gin').rglob('__init__.py'))
