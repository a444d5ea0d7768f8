"""Tokenizers trained on a split: every text comes back, only training text is read."""

import functools

import numpy as np
import pytest
import tiny_run

from valkyrie import main
from valkyrie.data import store_builder, train_vocabulary, vocabularies
from valkyrie.data.document_source import TaskReader
from valkyrie.data.feed import TaskFeed
from valkyrie.data.selection import Selection
from valkyrie.data.store_writer import Document
from valkyrie.errors import ConfigurationError

WORDS = 'def read_lines(path):\n    return path.read_text().splitlines()\n'


def trained(path, size, **options):
  """Trains a tokenizer on a text file -> the vocabulary."""
  feed = functools.partial(TaskFeed, 'text', 'train', 1, 0, source=str(path), options=options)
  train_vocabulary.train_vocabulary(feed, size, path.parent)
  return vocabularies.load(str(path.parent / 'tokenizer.model'))


def test_every_text_comes_back(tmp_path):
  random = np.random.default_rng(0)
  words = [''.join(random.choice([*'abcdefgh'], random.integers(1, 6))) for _ in range(500)]
  file = tmp_path / 'text.txt'
  file.write_text(' '.join(random.choice(words, 5000)) + '  \n\t中文 é\r\n')
  vocabulary = trained(file, 600)
  assert vocabulary.size == 600
  assert (vocabulary.eos_id, vocabulary.bos) == (1, ())
  every = ''.join(map(chr, [*range(0x80), 0xE9, 0x4E2D, 0x1F600, 0x301, 0xFEFF, 0x3000, 0x2028]))
  for text in (every, ' a', 'a ', '  \n\n a', '\r\n\r', '</s><unk><0x41>', file.read_text(), ''):
    ids = vocabulary.encode(text)
    assert vocabulary.decode(ids) == text
    assert vocabulary.eos_id not in ids
  usual = ' '.join(words)
  assert len(vocabulary.encode(usual)) < len(usual) / 1.5


def test_held_out_text_is_not_read(tmp_path):
  held_out, file = tmp_path / 'held_out.txt', tmp_path / 'text.txt'
  held_out.write_text('zqzqzqzq' * 100)
  file.write_text(WORDS * 50)
  vocabulary = trained(file, 300, held_out=held_out)
  assert len(vocabulary.encode('zq')) == 2
  assert len(vocabulary.encode(WORDS)) < len(WORDS) / 1.5


def test_a_run_reads_by_its_own_tokenizer(tmp_path):
  """The sources of a mixture together; the ids of bytes keep their places."""
  for name in ('words', 'letters'):
    (tmp_path / f'{name}.txt').write_text({'words': WORDS, 'letters': 'zq'}[name] * 200)
  sources = {name: str(tmp_path / f'{name}.txt') for name in ('words', 'letters')}
  flags = [
    *('--gin_file=gin/tiny_cpu.gin', '--gin_file=gin/data/mixture.gin'),
    *(f'--gin.sources={sources}', "--gin.weights={'words': 1, 'letters': 1}"),
    *(f'--model_dir={tmp_path}', '--gin.train_vocabulary.size=320'),
  ]
  assert main.main([*flags, '--run_mode=vocabulary']) == 0
  vocabulary = vocabularies.load(str(tmp_path / 'tokenizer.model'))
  assert vocabulary.size == 320
  assert len(vocabulary.encode('zqzq')) < 4
  assert len(vocabulary.encode(WORDS)) < len(WORDS) / 1.5


def test_a_sample_is_of_all_parts_and_bounded(monkeypatch):
  """A long document comes in pieces, a short one of each part before its second one."""
  monkeypatch.setattr(train_vocabulary, '_SAMPLE', 100)
  encode = tiny_run.BYTES.ids

  def documents(part, parts):
    assert parts == 16
    if part == 1:  # a long document, in pieces
      yield Document(iter([encode('b' * 10), encode('c' * 10)]), 20)
    if part == 2:
      yield Document(encode('e' * 9000), 9000)
    for _ in range(3 * (part == 0)):
      yield Document(encode('a' * 10), 10)

  def texts():
    reader = TaskReader({}, [], None, documents)
    return [(text[0], len(text)) for text in train_vocabulary.sample([reader])]

  assert texts() == [('a', 10), ('b', 10), ('c', 10), ('e', 4096), ('e', 4096), ('e', 808)]
  monkeypatch.setattr(train_vocabulary, '_SAMPLE', 9045)
  assert texts()[-2:] == [('a', 10), ('a', 10)]


@pytest.mark.parametrize(
  ('size', 'content', 'said'),
  [
    (2048, WORDS, 'Vocabulary size too high'),
    (300, ''.join(map(chr, range(0x4E00, 0x5600))), 'smaller than required_chars'),
    (-3, WORDS, 'cannot train -3 tokens'),
  ],
)
def test_a_text_that_does_not_fit_the_size_is_refused(tmp_path, size, content, said):
  file = tmp_path / 'text.txt'
  file.write_text(content)
  with pytest.raises(ConfigurationError, match=said):
    trained(file, size)
  assert not (tmp_path / 'tokenizer.model').exists()


@pytest.mark.parametrize(
  ('task', 'said'),
  [('token_ids', 'has token ids, but'), ('conversations', 'has conversations, but')],
)
def test_documents_that_are_no_text_are_refused_unread(tmp_path, task, said):
  feed = functools.partial(TaskFeed, task, 'train', 1, 0, source=str(tmp_path / 'missing'))
  with pytest.raises(ConfigurationError, match=f'The task {task} {said}.* Use a tokenizer that'):
    train_vocabulary.train_vocabulary(feed, 300, tmp_path)


def test_nothing_is_overwritten(tmp_path):
  (tmp_path / 'text.txt').write_text(WORDS)
  (tmp_path / 'tokenizer.model').write_text('mine')
  with pytest.raises(ConfigurationError, match='model exists'):
    trained(tmp_path / 'text.txt', 280)
  assert (tmp_path / 'tokenizer.model').read_text() == 'mine'


def test_prompts_and_answers_are_read():
  selection = Selection('passkey.64', 'train', tiny_run.BYTES)
  text = next(train_vocabulary.sample([store_builder.open_task(selection)]))
  assert text[-2:].isdecimal()
