"""Problems of long contexts: their length, their facts, and the run mode that asks them."""

import importlib
import itertools
import json
import re
import types

import matplotlib
import numpy as np
from PIL import Image
import pytest

from valkyrie.data.vocabularies import ByteVocabulary
from valkyrie.errors import ConfigurationError, DataError
from valkyrie.lab.suites import babilong
from valkyrie.lab.suites.long_context import long_context
from valkyrie.lab.suites.problem import (
  NOISE,
  SUITES,
  Problem,
  Question,
  Suite,
  TooShortError,
  fitted,
  inserted,
  placed,
  register,
  sentences_of,
)
from valkyrie.monitoring import pictures

TEXT = sentences_of(
  'The bridge is old. Nobody crosses it in winter! Does the river freeze?  It does,\n'
  'in most years. Then children skate.'
)


def tokens(text):
  return len(text.encode())


def problem(name, length=8192, depth=0.5, number=0):
  depth = depth if SUITES[name].has_depth else None
  return fitted(name, length, depth, TEXT, tokens, (0, number))


def test_sentences_keep_their_ends():
  assert TEXT == [
    'The bridge is old.',
    'Nobody crosses it in winter!',
    'Does the river freeze?',
    'It does, in most years.',
    'Then children skate.',
  ]


@pytest.mark.parametrize('name', SUITES)
def test_a_problem_fills_its_length_and_its_facts_answer(name):
  for number, length in enumerate((8192, 50_000)):
    context, questions = found = problem(name, length, number=number)
    used = tokens(context) + max(tokens(q.text) for q in questions) + SUITES[name].max_tokens
    assert 0.9 * length < used <= length
    assert found == problem(name, length, number=number)
    assert found != problem(name, length, number=number + 1)
    for question in questions:
      assert all(answer in context for answer in question.answers)
      right = ', '.join(question.answers)
      assert SUITES[name].score(f' {right}. More', question) == 1
      assert SUITES[name].score(' nothing of it', question) == 0


@pytest.mark.parametrize('name', [name for name, suite in SUITES.items() if suite.has_depth])
@pytest.mark.parametrize('depth', [0.0, 0.5, 1.0])
def test_facts_lie_at_the_depth(name, depth):
  context, questions = problem(name, 50_000, depth)
  if name.startswith('qa'):
    places = [found.start() for found in re.finditer('|'.join(babilong.PEOPLE), context)]
    low, high = 0.8 * depth - 0.02, 0.8 * depth + 0.22
  else:
    fact = 'for {} is: {}' if name.startswith('niah') else '{}={}'
    keys = [re.search(r'([\w-]+)(=| mentioned)', q.text)[1] for q in questions]
    told = [fact.format(key, q.answers[0]) for key, q in zip(keys, questions, strict=True)]
    places = [context.index(one) for one in told]
    low, high = depth - 0.04, depth + 0.04
  assert places
  assert low <= min(places) / len(context) <= max(places) / len(context) <= high


def test_needles_are_as_many_as_their_names_say():
  def values(name):
    context, (question,) = problem(name)
    return len(re.findall(r'special magic numbers for', context)), len(question.answers)

  assert values('niah_single_1') == (1, 1)
  assert values('niah_multikey_1') == (4, 1)
  assert values('niah_multivalue') == (4, 4)
  assert values('niah_multiquery') == (4, 4)
  assert values('niah_multikey_2')[0] > 80
  assert problem('niah_single_1').questions[0].text.endswith('in the provided text is')
  assert problem('niah_multivalue').questions[0].text.endswith('in the provided text are')


def test_a_chain_of_variables_leads_to_the_value():
  context, (question,) = problem('vt')
  value = re.search(r'assigned the value (\d{5}) in', question.text)[1]
  names = [re.search(rf'VAR (\w{{5}}) = {value}\n', context)[1]]
  while found := re.search(rf'VAR (\w{{5}}) = VAR {names[-1]}\n', context):
    names.append(found[1])
  assert names == question.answers and len(names) == 5
  assert context.count(NOISE) > 50


@pytest.mark.parametrize(('length', 'often', 'seldom'), [(3000, 6, 1), (20_000, 30, 3)])
def test_ten_words_are_common(length, often, seldom):
  context, (question,) = problem('cwe', length)
  listed = re.findall(r'\d+\. (\w+)', context.rpartition('most often.')[2])
  counts = {word: listed.count(word) for word in listed}
  assert {word for word, count in counts.items() if count == often} == {*question.answers}
  assert {*counts.values()} == {often, seldom}


def simulated(context):
  """The rooms of people and objects after a story, read from its sentences."""
  at, held, rooms = {}, {}, {}
  people, things = '|'.join(babilong.PEOPLE), '|'.join(babilong.OBJECTS)
  for who, said in re.findall(rf'({people}) ([^.]*)\.', context):
    thing = re.search(things, said)
    if thing is None:
      at[who] = said.split()[-1]
      for what in [who, *(one for one, holder in held.items() if holder == who)]:
        rooms.setdefault(what, []).append(at[who])
    elif said.endswith('there'):
      assert thing[0] not in held and rooms.get(thing[0], [at[who]])[-1] == at[who]
      held[thing[0]] = who
      rooms.setdefault(thing[0], [at[who]])
    else:
      assert held.pop(thing[0]) == who
  return rooms


@pytest.mark.parametrize('number', range(8))
def test_stories_have_their_answers(number):
  context, (question,) = problem('qa1', number=number)
  who = re.search(r'Where is (\w+)\?', question.text)[1]
  assert simulated(context)[who][-1:] == question.answers
  context, (question,) = problem('qa2', number=number)
  what = re.search(r'Where is the (\w+)\?', question.text)[1]
  assert simulated(context)[what][-1:] == question.answers
  context, (question,) = problem('qa3', number=number)
  what, after = re.search(r'was the (\w+) before the (\w+)\?', question.text).groups()
  rooms = [room for room, _ in itertools.groupby(simulated(context)[what])]
  assert rooms[-2:] == [*question.answers, after]


def test_an_answer_names_one_room():
  question = Question(' Where was the apple before the garden? It was in the', ['office'])
  score = SUITES['qa3'].score
  assert score(' office. Then the kitchen', question) == 1
  assert score(' garden or the office', question) == 1
  assert score(' office or the kitchen', question) == 0
  assert score(' garden', question) == 0


def test_placed_and_inserted_keep_all():
  hay = [*'abcdef']
  assert placed(hay, ['X', 'Y', 'Z'], [0, 3, 6]) == [*'XabcYdefZ']
  found = inserted(np.random.default_rng(0), hay, [*'XYZ'])
  assert [one for one in found if one in 'XYZ'] == [*'XYZ'] and len(found) == 9


def test_a_length_below_the_shortest_is_refused():
  with pytest.raises(TooShortError, match=r'A problem of cwe has at least .*, more than the 500'):
    problem('cwe', 500)


def test_a_suite_keeps_its_name():
  with pytest.raises(ConfigurationError, match='A suite vt is registered already'):
    register('vt', SUITES['vt'])


class Searching:
  """A model that finds the value of a needle or a pair in what it has read."""

  tokenizer, steps, origin = ByteVocabulary(), (7,), None

  def __init__(self):
    self.asked = 0

  def read(self, texts, *, cut=None):
    return [text if cut is None else text[-2000:] if cut == 'state' else '' for text in texts]

  def rows(self, carry, numbers):
    return [carry[number] for number in numbers]

  def generate(self, prompts, carry, *, max_tokens, batch_size):
    assert len(prompts) == len(carry) <= batch_size
    self.asked += len(prompts)
    return [
      types.SimpleNamespace(text=self.find(asked, known)[:max_tokens])
      for asked, known in zip(prompts, carry, strict=True)
    ]

  def find(self, asked, known):
    key = re.search(r'([\w-]+)(=| mentioned)', asked)[1]
    found = re.search(rf'{key}(?:=| is: )([^.]*)\.', known)
    return found[1] if found else 'unknown'


def run(folder, model, **options):
  options = {
    'suites': ('niah_single_1', 'mqar_8'),
    'lengths': (8192,),
    'depths': (0.0, 1.0),
    'samples': 3,
    'cuts': ('state',),
    **options,
  }
  long_context(str(folder), opened=lambda *_: model, seed=0, batch_size=2, **options)
  lines = (folder / 'long_context' / 'results.jsonl').read_text().splitlines()
  return {
    (line['suite'], line['length'], line['depth'], line['cut']): line['score']
    for line in map(json.loads, lines)
  }


def test_a_run_is_asked_with_and_without_its_memory(tmp_path, capsys):
  model = Searching()
  found = run(tmp_path, model)
  for name in ('niah_single_1', 'mqar_8'):
    assert found[name, 8192, 0.0, None] == found[name, 8192, 1.0, None] == 1
    assert found[name, 8192, 1.0, 'state'] == 1 and found[name, 8192, 0.0, 'state'] == 0
    picture = np.asarray(Image.open(tmp_path / 'long_context' / f'{name}.png'))
    colors = {tuple(matplotlib.colormaps[pictures.MAP](score, bytes=True)) for score in (0.0, 1.0)}
    assert colors <= {*map(tuple, picture.reshape(-1, 4))}
  assert model.asked == 2 * 2 * 3 * (1 + 8)
  assert 'niah_single_1, 8,192 tokens, depth 0%, state cut: 0.0%' in capsys.readouterr().out

  # What is measured is not repeated; what is new is added.
  again = Searching()
  assert run(tmp_path, again, depths=(0.0, 0.5, 1.0), suites=('mqar_8',)).items() > found.items()
  assert again.asked == 2 * 3 * 8
  other = Searching()
  run(tmp_path, other, suites=('mqar_8',), samples=1)
  assert other.asked == 2 * 2 * 8


def test_answers_under_other_bindings_are_not_reused(tmp_path, monkeypatch, capsys):
  options = {'suites': ('mqar_8',), 'samples': 1}
  run(tmp_path, Searching(), **options)
  lines = ['LongformerAttention.window was 16, is 8']
  module = importlib.import_module('valkyrie.lab.suites.long_context')
  monkeypatch.setattr(module, 'changed_bindings', lambda *_, **__: lines)
  for asked in (2 * 2 * 8, 0):
    model = Searching()
    run(tmp_path, model, **options)
    assert model.asked == asked
  assert f'changed since the checkpoint: {lines[0]}' in capsys.readouterr().out
  monkeypatch.undo()
  model = Searching()
  run(tmp_path, model, **options)
  assert not model.asked
  for asked in (2 * 2 * 8, 0):
    model = Searching()
    model.origin = {'first_carry': 'of another task'}
    run(tmp_path, model, **options)
    assert model.asked == asked
  # The size of chunks matters where they are cut.
  monkeypatch.setattr(module, 'changed_bindings', lambda *_, is_cut=False: ['size'] * is_cut)
  model = Searching()
  run(tmp_path, model, **options)
  assert model.asked == 2 * 8


def test_what_cannot_be_asked_is_named(tmp_path, capsys):
  with pytest.raises(
    ConfigurationError, match=r"contains 'niah'.*The suites are .*niah_single_1, "
  ):
    run(tmp_path, None, suites=('niah',))
  with pytest.raises(ConfigurationError, match='qa1 hides facts in a text'):
    run(tmp_path, None, suites=('qa1',))
  with pytest.raises(ConfigurationError, match=r"long_context\.cuts='window' is unknown"):
    run(tmp_path, None, cuts=('window',))
  (tmp_path / 'text.txt').write_bytes(b'\xff\xfe')
  with pytest.raises(DataError, match='Expected files in UTF-8'):
    run(tmp_path, None, suites=('qa1',), text=str(tmp_path / 'text.txt'))
  with pytest.raises(ConfigurationError, match='every problem of the suites is longer'):
    run(tmp_path, Searching(), suites=('niah_single_1',), lengths=(100,))
  assert 'has at least' in capsys.readouterr().out


def test_a_suite_of_ones_own(tmp_path, monkeypatch):
  def make(order):
    noise = ['Noise.'] * order.units
    text = ' '.join(placed(noise, ['code=17.'], [round(order.depth * len(noise))]))
    return Problem(text, [Question(' code=', ['17'])])

  monkeypatch.setitem(SUITES, 'code', Suite(make, SUITES['mqar_4'].score, 2))
  found = run(tmp_path, Searching(), suites=('code',), cuts=())
  assert found['code', 8192, 0.0, None] == 1
