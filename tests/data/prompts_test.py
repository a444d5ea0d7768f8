"""Prompts and answers of a user's own."""

import json

import numpy as np
import pytest

from valkyrie.data.feed import TaskFeed
from valkyrie.errors import ConfigurationError, DataError

ROWS = [(f'What is {n} plus one? ', f'{n + 1}.') for n in range(60)]


@pytest.fixture
def feed(tmp_path):
  lines = (json.dumps({'question': question, 'reply': reply}) for question, reply in ROWS)
  (tmp_path / 'answers.jsonl').write_text('\n'.join(lines))

  def make(split='train', learn_eos=True, **options):
    options = {'prompt': 'question', 'answer': 'reply', 'held_out': 0.3, **options}
    return TaskFeed(
      'prompts', split, 1, 0, source=str(tmp_path / 'answers.jsonl'), options=options,
      data_dir=str(tmp_path), learn_eos=learn_eos, epochs=1, shuffle=False,
    )  # fmt: skip

  return make


def learned(feed):
  """The texts of the targets with weight, EOS as |."""
  batch = feed.read(0, feed.row_tokens)
  texts, before = [], -2
  for t in np.flatnonzero(batch.weights[0]):
    token = int(batch.targets[0, t])
    text = '|' if token == feed.vocabulary.eos_id else feed.vocabulary.decode([token])
    if t == before + 1:
      texts[-1] += text
    else:
      texts.append(text)
    before = t
  return texts


def test_answers_and_their_end_are_learned_and_prompts_are_not(feed):
  train, validation = learned(feed()), learned(feed('validation'))
  assert sorted([*train, *validation]) == sorted(f'{answer}|' for _, answer in ROWS)
  assert len(validation) > 5
  assert '|' not in ''.join(learned(feed(learn_eos=False)))


def test_wrong_columns_and_options_are_named(feed):
  with pytest.raises(DataError, match='question, reply'):
    learned(feed(answer='answer'))
  with pytest.raises(ConfigurationError, match=r'no option cut\. It has prompt, answer, held_out'):
    learned(feed(cut=3))
