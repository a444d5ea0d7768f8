"""scripts/experiment chip: everything that it measures on a chip, on a toy."""

import json
import os
import pathlib
import subprocess
import sys

from faults import quick_compiler

ROOT = pathlib.Path(__file__).parents[2]


def test_a_toy_is_measured_killed_resumed_and_checked(tmp_path):
  # What is measured does not depend on the model, and one layer of S5 compiles quickly.
  model = tmp_path / 'model.gin'
  model.write_text(
    "include 'gin/models/toy.gin'\nBlock.mixers = (@S5,)\nLanguageModel.layers = 1\n"
  )
  toy = tmp_path / 'toy.gin'
  toy.write_text(f"include 'gin/h100.gin'\ninclude '{model}'\n")
  results = tmp_path / 'results'
  command = [
    sys.executable,
    'tests/support/chip_process.py',
    f'--gin_file={toy}',
    f'--model={model}',
    f'--results={results}',
    '--chunk_size=16',
    '--steps=300',
    '--tokens',
    '16',
  ]
  one_device = {'XLA_FLAGS': quick_compiler.FLAGS}
  options = {'cwd': ROOT, 'env': {**os.environ, **one_device}, 'capture_output': True, 'text': True}
  ended = subprocess.run(command, check=False, **options)
  assert ended.returncode == 0, ended.stdout + ended.stderr
  page = (results / 'chip.md').read_text()
  for title in 'Peak and parts', 'Steps', 'Kill and resume', 'Generation', 'Checks':
    assert f'### {title}\n' in page
  assert 'FAILED' not in page
  findings = json.loads((results / 'verify' / 'verify.json').read_text())['findings']
  assert f'All {len(findings)} comparisons' in page
  of_steps = [json.loads(line) for line in (results / 'steps_16' / 'metrics.jsonl').open()]
  timed = [found['step_seconds'] for found in of_steps if found['step'] == 3 and 'loss' in found]
  assert f'| 16 | {timed[0]:,.3f} | {16 / timed[0]:,.0f} |' in page
  # Nothing is overwritten.
  ended = subprocess.run(command, check=False, **options)
  assert ended.returncode == 2
  assert 'is there already' in ended.stderr
