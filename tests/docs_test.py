"""Python blocks of docs/: each runs as printed and checks its own outcome."""

import ast
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / 'docs').glob('*.md'))


def blocks(page: pathlib.Path) -> list[str]:
  return re.findall(r'^```python\n(.*?)^```$', page.read_text(), re.DOTALL | re.MULTILINE)


BLOCKS = [(f'{page.stem}-{n}', block) for page in PAGES for n, block in enumerate(blocks(page))]


def test_the_page_on_encoders_has_an_example():
  assert 'encoder-0' in dict(BLOCKS)


@pytest.mark.parametrize('block', [pytest.param(block, id=name) for name, block in BLOCKS])
def test_a_block_runs_and_its_last_line_asserts_the_outcome(block):
  assert isinstance(ast.parse(block).body[-1], ast.Assert)
  done = subprocess.run(
    [sys.executable, '-c', block],
    cwd=ROOT,
    env={**os.environ, 'PYTHONPATH': str(ROOT)},
    check=False,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
