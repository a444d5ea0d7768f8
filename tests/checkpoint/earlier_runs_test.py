"""Runs of earlier versions, in earlier_runs/: later versions open, evaluate and resume them.

An archive holds a run of 4 steps and its text. The numbers are from the version that saved it.
"""

import json
import pathlib
import tarfile

import gin
import pytest

from valkyrie import main

ARCHIVES = pathlib.Path(__file__).parent / 'earlier_runs'
# {version: losses of the validation split at step 4, and at step 6 after that version resumed}
LOSSES = {'0.1': (5.755583111130856, 5.734290892078031)}

pytestmark = pytest.mark.process


def test_every_archive_is_tried():
  assert {file.name.removesuffix('.tar.xz') for file in ARCHIVES.iterdir()} == LOSSES.keys()


@pytest.mark.parametrize('version', LOSSES)
def test_a_run_of_an_earlier_version_evaluates_and_resumes(version, tmp_path, monkeypatch):
  with tarfile.open(ARCHIVES / f'{version}.tar.xz') as archive:
    # Python 3.11.4 and later have the filter, which 3.14 uses by default.
    archive.extraction_filter = getattr(tarfile, 'data_filter', None)
    archive.extractall(tmp_path)
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv('VALKYRIE_CACHE', str(tmp_path / 'cache'))

  def loss():
    return json.loads(pathlib.Path('run/eval/metrics.jsonl').read_text().splitlines()[-1])['loss']

  def run(*flags):
    gin.clear_config()
    return main.main(['--model_dir=run', *flags])

  assert run('--run_mode=eval') == 0
  assert loss() == pytest.approx(LOSSES[version][0], rel=1e-5)
  more = ['--gin.train_steps=6', '--gin.eval_every=6']
  assert run(*more) == 78  # the record of the step names another version
  assert run(*more, '--allow_changed=versions') == 0
  assert loss() == pytest.approx(LOSSES[version][1], rel=1e-5)
