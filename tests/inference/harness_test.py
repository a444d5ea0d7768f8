"""Answers to the questions of the lm-evaluation-harness; with the package, its own tasks, too.

.venv/bin/python -m pip install lm-eval
.venv/bin/python -m pytest tests/inference/harness_test.py
"""

import importlib
import importlib.util
import json
import math
import sys
import types

from letters import Letters, built, text
import numpy as np
import pytest
import tiny

from valkyrie.errors import ConfigurationError
from valkyrie.inference import harness

MODEL = 'valkyrie.inference.harness_model'
REASON = "only pip install '.[lm-eval]' installs lm_eval"


class Asked:
  """A loaded model behind the harness's interface."""

  def __init__(self, model):
    self._model = model

  def log_likelihoods(self, questions):
    return self._model.loglikelihood(requests(questions))

  def rolling(self, texts):
    return self._model.loglikelihood_rolling(requests([(text,) for text in texts]))

  def continuations(self, questions):
    return self._model.generate_until(requests(questions))


def requests(arguments):
  return [types.SimpleNamespace(args=one) for one in arguments]


@pytest.fixture
def answers(monkeypatch):
  """(a loaded model, batch size) -> its answers; without the package, behind a stand-in of it."""
  missing = importlib.util.find_spec('lm_eval') is None
  if missing:
    hook = types.SimpleNamespace(add_partial=lambda *_: None)
    model = types.SimpleNamespace(LM=type('LM', (), {'cache_hook': hook}))
    registry = types.SimpleNamespace(register_model=lambda name: lambda kind: kind)
    for name, module in (('model', model), ('registry', registry)):
      monkeypatch.setitem(sys.modules, f'lm_eval.api.{name}', module)
    monkeypatch.delitem(sys.modules, MODEL, raising=False)
  harness_model = importlib.import_module(MODEL)

  def ask(loaded, batch_size=2):
    monkeypatch.setattr(harness_model, 'load', lambda *_, **__: loaded)
    return Asked(harness_model.HarnessModel('run', batch_size=batch_size))

  yield ask
  if missing:
    del sys.modules[MODEL]


@pytest.mark.parametrize('batch_size', [1, 3, 16])
def test_a_continuation_has_its_part_of_the_score_of_the_whole_text(answers, batch_size, capsys):
  loaded = built()
  contexts = [text(21), text(3, 1), text(40, 2)]
  questions = [(c, text(n, n)) for c in contexts for n in (1, 9, 20)]
  questions.append((text(9, 5), ''))
  ask = answers(loaded, batch_size)
  score = loaded.score
  together = []

  def counted(texts, carry, **options):
    together.append(options['batch_size'])
    return score(texts, carry, **options)

  loaded.score = counted
  found = ask.log_likelihoods(questions)
  loaded.score = score
  assert {*together} == {batch_size}
  for (context, continuation), (log_prob, greedy) in zip(questions, found, strict=True):
    (whole,) = loaded.score(context + continuation)
    part = slice(len(context), None)
    assert log_prob == pytest.approx(float(whole.log_probs[part].sum()), rel=1e-4, abs=1e-5)
    assert greedy == whole.greedy[part].all()
  assert not capsys.readouterr().err


def test_a_greedy_continuation_is_named_so(answers):
  loaded = built()
  prompt = text(12)
  made = loaded.generate(prompt, max_tokens=5)[0].text
  other = made[:-1] + ('A' if made[-1] != 'A' else 'B')
  ask = answers(loaded)
  assert [greedy for _, greedy in ask.log_likelihoods([(prompt, made), (prompt, other)])] == [
    True,
    False,
  ]


def test_the_first_token_of_a_document_costs_that_of_a_guess(answers):
  loaded = built()
  ask = answers(loaded)
  texts = [text(30), text(4, 1), text(1, 2)]
  expected = [one.log_prob - math.log(tiny.VOCABULARY) for one in loaded.score(texts)]
  assert ask.rolling(texts) == pytest.approx(expected, rel=1e-5)
  found = ask.log_likelihoods([('', one) for one in texts])
  assert [log_prob for log_prob, _ in found] == pytest.approx(expected, rel=1e-5)


class Merging(Letters):
  """'AB' is one token, and a word begins with its space."""

  def encode(self, letters):
    merged = letters.replace('AB', '\x01').replace(' C', '\x02')
    return [{'\x01': 30, '\x02': 31}.get(one, ord(one) - ord('A')) for one in merged]


# Public report EleutherAI/lm-evaluation-harness#4055: a token across context and continuation.
@pytest.mark.parametrize(
  ('context', 'continuation', 'of_context'), [('DA', 'BE', 1), ('D ', 'CE', 1), ('DE', 'AB', 2)]
)
def test_a_token_across_the_edge_belongs_to_the_continuation(
  answers, monkeypatch, context, continuation, of_context
):
  loaded = built()
  monkeypatch.setattr(loaded, 'tokenizer', Merging())
  ask = answers(loaded)
  ((log_prob, _),) = ask.log_likelihoods([(context, continuation)])
  (whole,) = loaded.score(context + continuation)
  assert log_prob == pytest.approx(float(whole.log_probs[of_context:].sum()), rel=1e-4)


def test_generations_follow_the_settings_of_each(answers):
  loaded = built()
  prompts = [text(5), text(19, 1), text(8, 2)]
  whole = [one.text for one in loaded.generate(prompts, max_tokens=12)]
  stop = whole[1][3]
  settings = [
    {'max_gen_toks': 12},
    {'max_gen_toks': 12, 'until': stop},
    {'max_gen_toks': 12, 'until': [], 'do_sample': False, 'temperature': 0.9},
  ]
  ask = answers(loaded)
  found = ask.continuations(list(zip(prompts, settings, strict=True)))
  assert found == [whole[0], whole[1][: whole[1].index(stop)], whole[2]]
  sampled = {'max_gen_toks': 12, 'do_sample': True, 'temperature': 2.0}
  assert ask.continuations([(prompts[0], sampled)]) != [whole[0]]
  for name in ('max_new_tokens', 'max_tokens', 'max_completion_tokens'):
    plain = {name: 12, 'num_beams': 1, 'until': None, 'temperature': 0.0, 'top_p': None}
    assert ask.continuations([(prompts[0], plain)]) == [whole[0]]
  assert ask.continuations([(prompts[0], {'max_gen_toks': 12, 'temperature': 2.0})]) != [whole[0]]
  for wrong, message in (
    ({'num_beams': 2}, 'num_beams=2, but there is no beam search'),
    (
      {'max_tokens': 9, 'max_new_tokens': 12},
      'max_new_tokens=12 and max_tokens=9 are limits of the same tokens',
    ),
    ({'length_penalty': 2}, 'length_penalty is not a setting of'),
    ({'max_new_tokens': -1}, 'max_tokens = -1 is out of range'),
    ({'until': ['']}, 'or is empty'),
  ):
    with pytest.raises(ConfigurationError, match=message):
      ask.continuations([(prompts[0], wrong)])


def test_a_context_longer_than_the_model_loses_its_beginning(answers, capsys):
  loaded = built('full')
  context, end = text(60), text(6, 1)
  ask = answers(loaded)
  ((log_prob, _),) = ask.log_likelihoods([(context, end)])
  (whole,) = loaded.score((context + end)[-48:])
  assert log_prob == pytest.approx(float(whole.log_probs[-6:].sum()), rel=1e-4)
  assert capsys.readouterr().err.startswith('1 contexts were longer than the 48 tokens')
  made = ask.continuations([(context, {'max_gen_toks': 8})])
  assert made == [loaded.generate(context[-40:], max_tokens=8)[0].text]
  assert len(capsys.readouterr().err.splitlines()) == 1
  with pytest.raises(ConfigurationError, match='has 49 tokens, too many for the 48'):
    ask.log_likelihoods([('A', text(49))])


class Growing(Letters):
  """Half of a pair decodes to a letter that encodes to two tokens."""

  def encode(self, letters):
    return [number for one in letters for number in {'é': [3, 4], '?': [5, 6]}.get(one, [7])]

  def decode(self, ids):
    return ''.join('?' if int(number) == 4 else 'A' for number in ids)


def test_a_context_is_cut_by_tokens(answers, monkeypatch):
  loaded = built('full')
  monkeypatch.setattr(loaded, 'tokenizer', Growing())
  settings = {'max_gen_toks': 9}
  (found,) = answers(loaded).continuations([('é' * 500, settings)])
  tokens = np.array([4, *[3, 4] * 19], np.int32)
  assert found == loaded.generate(tokens, max_tokens=9)[0].text


@pytest.mark.parametrize('length', [1, 47, 48, 49, 95, 96, 143])
def test_texts_longer_than_the_model_are_scored_in_windows(answers, length):
  loaded = built('full')  # reads 48 tokens
  whole = text(length)
  expected, begin = -math.log(tiny.VOCABULARY), 1
  while begin < length:  # each token once, with all context that fits
    end = min(length, 48 if begin == 1 else begin + 47)
    (score,) = loaded.score(whole[max(0, end - 48) : end])
    expected += float(score.log_probs[begin - end :].sum(dtype=np.float64))
    begin = end
  assert answers(loaded).rolling([whole, whole]) == pytest.approx([expected] * 2, rel=1e-5)


def test_without_the_package_the_command_names_it(monkeypatch, capsys):
  def missing(name):
    raise ModuleNotFoundError(name=name)

  monkeypatch.setattr(harness.importlib, 'import_module', missing)
  assert harness.main() == ConfigurationError.exit_code
  assert f'{sys.executable} -m pip install lm-eval' in capsys.readouterr().err


def write_task(folder, name, rows, **settings):
  """A task of the harness over a local file."""
  (folder / f'{name}.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
  settings = {
    'task': name,
    'dataset_path': 'json',
    'dataset_kwargs': {'data_files': {'test': str(folder / f'{name}.jsonl')}},
    'test_split': 'test',
    **settings,
  }
  (folder / f'{name}.yaml').write_text(json.dumps(settings))


def test_the_harness_reads_its_tasks_from_local_files(answers, tmp_path, monkeypatch):
  evaluator = pytest.importorskip('lm_eval.evaluator', reason=REASON)
  from lm_eval.tasks import TaskManager  # noqa: PLC0415

  from valkyrie.inference import harness_model  # noqa: PLC0415

  monkeypatch.setenv('HF_DATASETS_CACHE', str(tmp_path / 'cache'))
  loaded = built()
  choices = [[text(6, n), text(3, n + 1), text(9, n + 2)] for n in range(0, 12, 3)]
  rows = [
    {'ctx': text(12, n), 'endings': endings, 'label': n % 3} for n, endings in enumerate(choices)
  ]
  write_task(
    tmp_path,
    'endings',
    rows,
    output_type='multiple_choice',
    doc_to_text='{{ctx}}',
    doc_to_target='{{label}}',
    doc_to_choice='{{endings}}',
    target_delimiter='',
    metric_list=[{'metric': 'acc'}],
  )
  write_task(
    tmp_path,
    'documents',
    [{'page': text(30, n)} for n in range(3)],
    output_type='loglikelihood_rolling',
    doc_to_text='',
    doc_to_target='{{page}}',
    metric_list=[{'metric': 'bits_per_byte'}],
  )
  made = [one.text for one in loaded.generate([text(9, n) for n in range(3)], max_tokens=5)]
  write_task(
    tmp_path,
    'answers',
    [{'question': text(9, n), 'answer': made[n] if n else 'no'} for n in range(3)],
    output_type='generate_until',
    doc_to_text='{{question}}',
    doc_to_target='{{answer}}',
    generation_kwargs={'until': ['\n'], 'max_gen_toks': 5, 'do_sample': False},
    metric_list=[{'metric': 'exact_match'}],
  )
  monkeypatch.setattr(harness_model, 'load', lambda *_, **__: loaded)
  results = evaluator.simple_evaluate(
    model=harness_model.HarnessModel('run', batch_size='3'),
    tasks=['endings', 'documents', 'answers'],
    task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
    bootstrap_iters=0,
  )['results']
  right = 0
  for row in rows:
    scores = [loaded.score(row['ctx'] + one)[0].log_probs[12:].sum() for one in row['endings']]
    right += int(np.argmax(scores)) == row['label']
  assert results['endings']['acc,none'] == right / len(rows)
  nats = -sum(answers(loaded).rolling([text(30, n) for n in range(3)]))
  assert results['documents']['bits_per_byte,none'] == pytest.approx(nats / 90 / math.log(2))
  assert results['answers']['exact_match,none'] == pytest.approx(2 / 3)


def test_arguments_of_the_model_are_checked():
  pytest.importorskip('lm_eval', reason=REASON)
  from valkyrie.inference.harness_model import HarnessModel  # noqa: PLC0415

  with pytest.raises(ConfigurationError, match=r'--model_args has dtype\. Use model_dir'):
    HarnessModel('run', dtype='float16')
  with pytest.raises(ConfigurationError, match='--batch_size is auto'):
    HarnessModel('run', batch_size='auto')
