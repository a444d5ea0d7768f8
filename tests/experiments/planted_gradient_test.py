"""planted_gradient: on a short row, in float64, both derivatives are the same."""

import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_the_gradient_of_a_planted_token_is_the_derivative_forwards():
  sizes = '--gin_file=gin/models/micro.gin --tokens=4096 --chunk_size=256 --dtype=float64'
  done = subprocess.run(
    [sys.executable, 'scripts/experiments/planted_gradient.py', *sizes.split()],
    cwd=ROOT, env={**os.environ, 'PYTHONPATH': str(ROOT)}, capture_output=True, text=True,
    check=False,
  )  # fmt: skip
  # It fails by itself if the gradient is zero, or does not vanish where the states are cut.
  assert done.returncode == 0, done.stderr
  (difference,) = re.findall(r'they differ by (\S+)\. ', done.stdout)
  assert float(difference) < 1e-12
