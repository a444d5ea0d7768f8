"""Prompts that are no text, and outputs that cannot be written."""

import json
import os
import resource
import subprocess
import sys

import pytest

from valkyrie.errors import DataError, StorageError
from valkyrie.inference.infer import _read_prompts, _writer

SCRIPT = """
import sys
from letters import Letters, built
from valkyrie.errors import ValkyrieError, message_of
from valkyrie.inference.infer import infer
from valkyrie.inference.loaded import LoadedModel

class Accents(Letters):
  def encode(self, text):
    return [ord(letter) % 49 for letter in text]

  def decode(self, ids):
    return 'é' * len(list(ids))

model = built()
run = LoadedModel(model.model, model.params, Accents(), model_dir='', steps=(1,), chunk_size=16)
try:
  for samples in map(int, sys.argv[1:]):
    infer('', 'A€', opened=lambda *_: run, seed=0, max_tokens=5, samples=samples)
except ValkyrieError as error:
  print(message_of(error), file=sys.stderr)
  sys.exit(error.exit_code)
"""


def start(*samples, stdout, **environment):
  """Infers once for each number of samples; one text is written in pieces, several as lines."""
  path = os.pathsep.join(sys.path)
  return subprocess.run(
    [sys.executable, '-c', SCRIPT, *map(str, samples)],
    env={**os.environ, 'PYTHONPATH': path, **environment},
    check=False, stdout=stdout, stderr=subprocess.PIPE, text=True, encoding='utf-8',
  )  # fmt: skip


def test_output_is_utf_8_whatever_the_locale_says():
  done = start(1, 2, stdout=subprocess.PIPE, PYTHONIOENCODING='ascii', LC_ALL='C')
  assert done.returncode == 0, done.stderr
  assert done.stdout.count('A€') == 3 and 'é' in done.stdout


def test_an_output_that_cannot_be_written_ends_with_74():
  read, write = os.pipe()
  os.close(read)
  with open('/dev/full', 'w') as full, open(write, 'w') as unread:
    for samples, stdout, reason in ((1, full, 'No space left'), (2, unread, 'Broken pipe')):
      done = start(samples, stdout=stdout)
      assert (done.returncode, done.stderr.count('\n')) == (74, 1), done.stderr
      assert f'Standard output cannot be written: {reason}' in done.stderr.replace('[', '')


def test_a_printed_gin_file_that_cannot_be_written_ends_with_74(tmp_path):
  sizes = {'vocab_size': 9, 'hidden_size': 8, 'num_hidden_layers': 1, 'intermediate_size': 8}
  more = {'model_type': 'llama', 'num_attention_heads': 2, 'max_position_embeddings': 8}
  (tmp_path / 'config.json').write_text(json.dumps(sizes | more))
  with open('/dev/full', 'w') as full:
    command = [sys.executable, '-m', 'valkyrie.weights.huggingface', str(tmp_path)]
    done = subprocess.run(command, check=False, stdout=full, stderr=subprocess.PIPE, text=True)
  assert (done.returncode, done.stderr.count('\n')) == (74, 1), done.stderr


@pytest.mark.parametrize(
  ('line', 'message'),
  [
    (rb'{"prompt": "\ud83d"}', 'half of a'),
    (rb'{"prompt": "A\udc00B"}', 'half of a'),
    (b'{"prompt": ""}', 'Write a text'),
    (b'{"prompt": ["A"]}', 'Write a text'),
    (b'{"text": "A"}', 'was expected'),
    (b'"A"', 'was expected'),
    (b'\xff', 'was expected'),
    (b'[' * 100_000, 'was expected'),
    (b'{"prompt": "A"', 'was expected'),
  ],
)
@pytest.mark.parametrize('suffix', ['jsonl', 'JSONL', 'ndjson'])
def test_a_prompt_that_is_no_text_is_named_by_its_line(tmp_path, line, message, suffix):
  file = tmp_path / f'prompts.{suffix}'
  file.write_bytes(b'\xef\xbb\xbf{"prompt": "\\u00e9"}\r\n\n' + line + b'\n')
  with pytest.raises(DataError, match=rf'prompts\.{suffix}:3: .*{message}'):
    _read_prompts(file)
  file.write_bytes(b'\xef\xbb\xbf{"prompt": "\\u00e9"}\r\n\n{"prompt": "\\ud83d\\ude00"}')
  assert _read_prompts(file) == ['é', '😀']
  (tmp_path / 'prompts.txt').write_bytes('\ufeffone\r\n{"two"}'.encode())
  assert _read_prompts(tmp_path / 'prompts.txt') == ['one', '{"two"}']


@pytest.mark.parametrize('ending', [KeyboardInterrupt, SystemExit, ValueError])
def test_an_interrupted_output_leaves_nothing_in_the_way_of_the_next_try(tmp_path, ending):
  output = tmp_path / 'answers.jsonl'
  with pytest.raises(ending), _writer(str(output)) as file:
    print('a line', file=file, flush=True)
    raise ending
  assert not [*tmp_path.iterdir()]
  with _writer(str(output)) as file:
    print('é', file=file)
  assert output.read_text(encoding='utf-8') == 'é\n'
  with pytest.raises(StorageError, match='is there already'), _writer(str(output)):
    pass


def test_an_output_that_the_disk_does_not_take_leaves_nothing(tmp_path):
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
  try:
    with pytest.raises(StorageError, match='ulimit -f'), _writer(f'{tmp_path}/a') as file:
      print('a line' * 100, file=file, flush=True)
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
  assert not [*tmp_path.iterdir()]


def test_an_output_that_is_a_link_is_not_written(tmp_path):
  (tmp_path / 'link').symlink_to(tmp_path / 'prompts.txt')
  with pytest.raises(StorageError, match='is there already'), _writer(f'{tmp_path}/link'):
    pass
  assert not (tmp_path / 'prompts.txt').exists()
