"""Whole runs of a few thousand parameters, from the real gin files, that the tests share."""

import json
import pathlib

import gin
import numpy as np
import pytest

from valkyrie import main
from valkyrie.config.load import load_gin
from valkyrie.data import store_writer, vocabularies
from valkyrie.data.selection import Selection
from valkyrie.data.store_location import store_path
from valkyrie.run import train as run_mode

BYTES = vocabularies.ByteVocabulary()
TEXT = 'Wide! is the sea, and deep is the sea; 1 + 1 = 2.\n' * 8
WITHOUT_HF = "only pip install '.[hf]' or '.[test]' installs tokenizers"
LONGEST = 40  # tokens of a document, its EOS included


def output_of(capsys, model_dir: pathlib.Path, *flags: str) -> str:
  """What a command about a run prints, which ends with 0."""
  gin.clear_config(clear_constants=True)
  code = main.main([f'--model_dir={model_dir}', *flags])
  out, said = capsys.readouterr()
  assert code == 0, said
  return out


def write_stores(data_dir: pathlib.Path, task: str, letters: str, vocabulary=BYTES) -> None:
  """Stores of the task's splits, 'train' and 'validation', of 24 random documents each."""
  for number, split in enumerate(('train', 'validation')):
    random = np.random.default_rng(number)
    lengths = [LONGEST - 1, *random.integers(12, LONGEST, 23)]
    texts = [''.join(random.choice(list(letters), length)) for length in lengths]
    write_store(data_dir, task, split, texts, vocabulary)


def write_store(data_dir: pathlib.Path, task: str, split: str, texts, vocabulary=BYTES) -> None:
  """The store of a split with these texts, by bytes."""
  path = store_path(Selection(task, split, BYTES), str(data_dir))
  writer = store_writer.StoreWriter(path, Selection(task, split, vocabulary), {}, shards=1)
  writer.write(
    lambda shard: [
      store_writer.Document(np.asarray(BYTES.encode(text)), len(text)) for text in texts
    ]
  )


def write_tokenizer(path: pathlib.Path) -> None:
  """A byte-level BPE as GPT-2's: no padding, id 0 is '!', the last id is EOS."""
  tokenizers = pytest.importorskip('tokenizers', reason=WITHOUT_HF)
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=270, initial_alphabet=alphabet, show_progress=False
  )
  tokenizer.train_from_iterator([TEXT], trainer)
  tokenizer.add_special_tokens(['<|endoftext|>'])
  tokenizer.save(str(path))


BOTH = '(@LongformerAttention, @S5)'
# What makes a program that compiles quickly.
QUICK = """
StepSettings.remat_chunks = False
LanguageModel.remat_policy = None
LongformerAttention.document_start = 0
"""


def gin_text(
  data_dir: pathlib.Path,
  partition='single',
  curriculum='constant',
  layers=1,
  mixers='(@S5,)',
  quick=QUICK,
  more='',
) -> str:
  """What gin/tiny_cpu.gin is made of, with the toy model, and `more`; a planner needs 2 layers.

  pulse_test.py has all of it: `quick` is empty there. One mixer takes half the time of both.
  """
  return f"""
seed = 0
batch_size = 8
chunk_size = 16
chunks = 2
backprop_chunks = 2
train_steps = 2
log_every = 1
eval_every = 2
checkpoint_every = 2
learning_rate = 3e-3
warmup_steps = 1
{'short_steps = 1' if curriculum == 'short_then_long' else ''}

include 'gin/run.gin'
include 'gin/models/toy.gin'
include 'gin/partition/{partition}.gin'
include 'gin/curriculum/{curriculum}.gin'
include 'gin/data/python_stdlib.gin'

LanguageModel.layers = {layers}
Block.mixers = {mixers}
{quick}
task = 'letters'
TaskFeed.data_dir = '{data_dir}'
{more}
"""


def train(
  model_dir, data_dir, *flags, data='', allowed_imports=(), allow_changed=(), **options
) -> pathlib.Path:
  """Trains in this process by `gin_text` and the gin text `data`, as the command line would."""
  gin.clear_config(clear_constants=True)
  file, other = model_dir.with_suffix('.gin'), model_dir.with_suffix('.data.gin')
  file.write_text(gin_text(data_dir, **options))
  other.write_text(data)
  load_gin(
    [str(file), str(other)],
    flags,
    allowed_imports=allowed_imports,
    modules=main.CONFIGURABLE_MODULES,
  )
  run_mode.train(model_dir=str(model_dir), allow_changed=allow_changed)
  return model_dir


def metrics(model_dir: pathlib.Path, stream: str = '') -> dict[int, dict]:
  """metrics.jsonl by step; where a step stands there twice, the later line counts."""
  lines = (model_dir / stream / 'metrics.jsonl').read_text().splitlines()
  return {line['step']: line for line in map(json.loads, lines)}
