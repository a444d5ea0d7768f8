"""The examples of docs/ run as printed, in a folder of a user's own.

Of a page, in order: a block with the name of a file is written to it, ```python runs and its last
line asserts the outcome, and ```bash is run by the shell.
"""

import ast
import json
import os
import pathlib
import re
import subprocess
import sys

import llama_reference
import pytest
from safetensors.numpy import save_file

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / 'docs').glob('*.md'))
BLOCK = re.compile(r'^```(python|bash|gin)(?: (\S+))?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
BLOCKS = {page.stem: BLOCK.findall(page.read_text()) for page in PAGES}


def test_pages_have_examples():
  assert {'encoder', 'data', 'optimizers', 'finetune', 'hooks', 'mixers', 'layouts'} <= {
    page for page, blocks in BLOCKS.items() if blocks
  }
  assert all(block.count('\n') < 50 for blocks in BLOCKS.values() for *_, block in blocks)


@pytest.mark.parametrize('page', [page for page, blocks in BLOCKS.items() if blocks])
def test_examples(page, tmp_path):
  texts = tmp_path / 'my_text'
  texts.mkdir()
  for number in range(80):
    (texts / f'{number}.txt').write_text(f'This is text number {number}. ' * (1 + number % 9))
  notes = (json.dumps({'text': f'Note {number} of many.'}) for number in range(80))
  (tmp_path / 'my_notes.jsonl').write_text('\n'.join(notes))
  answers = (
    json.dumps({'question': f'Text {n}? ', 'reply': f'This is text number {n}.'}) for n in range(80)
  )
  (tmp_path / 'my_answers.jsonl').write_text('\n'.join(answers))
  _write_llama(tmp_path / 'my_llama')
  environment = {
    **os.environ,
    'PATH': os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ['PATH']]),
    'PYTHONPATH': os.pathsep.join([str(ROOT), str(tmp_path)]),
    'VALKYRIE_CACHE': str(tmp_path / 'stores'),
  }
  for language, file, block in BLOCKS[page]:
    if file:
      (tmp_path / file).parent.mkdir(exist_ok=True)
      (tmp_path / file).write_text(block)
      continue
    command = ['bash', '-eu', '-c', block]
    if language == 'python':
      assert isinstance(ast.parse(block).body[-1], ast.Assert)
      command = [sys.executable, '-c', block]
    done = subprocess.run(
      command, cwd=tmp_path, env=environment, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, block + done.stderr


def _write_llama(folder):
  """A Llama of bytes with random weights, as Hugging Face keeps it."""
  config = llama_reference.config(vocab_size=259)
  folder.mkdir()
  (folder / 'config.json').write_text(json.dumps(config))
  save_file(llama_reference.tensors(config), folder / 'model.safetensors')
