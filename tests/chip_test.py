"""scripts/chip: everything that it measures on a chip, on a toy."""

import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]


def test_a_toy_is_measured_killed_resumed_and_checked(tmp_path):
  toy = tmp_path / 'toy.gin'
  toy.write_text("include 'gin/tiny_cpu.gin'\ninclude 'gin/models/toy.gin'\n")
  shape = '--tokens 16 64 --chunk_size=16 --steps=600'.split()
  files = [f'--gin_file={toy}', '--model=gin/models/toy.gin', f'--results={tmp_path / "results"}']
  command = [sys.executable, 'scripts/chip.py', *files, *shape]
  ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  assert ended.returncode == 0, ended.stdout + ended.stderr
  page = (tmp_path / 'results' / 'chip.md').read_text()
  titles = [line for line in page.splitlines() if line.startswith('### ')]
  assert titles == [f'### {t}' for t in ('Peak and parts', 'Steps', 'Kill and resume', 'Generation', 'Checks')]
  assert 'FAILED' not in page
  findings = json.loads((tmp_path / 'results' / 'verify' / 'verify.json').read_text())['findings']
  assert f'All {len(findings)} comparisons' in page
  (timed, longer) = (line.split('|') for line in page.splitlines() if line.startswith(('| 16 | 0', '| 64 | 0')))
  assert float(longer[2]) > 0
  # Nothing is overwritten.
  ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  assert ended.returncode == 2
  assert 'is there already' in ended.stderr
