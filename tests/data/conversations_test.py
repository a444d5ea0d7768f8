"""Conversations as training data and as prompts, by the chat template of a tokenizer."""

import dataclasses
import importlib
import itertools
import json
import re
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny
import tiny_run

from valkyrie import foreign
from valkyrie.command_line import parse_command_line
from valkyrie.data import chat_template, store_builder, vocabularies
from valkyrie.data.chat_template import ChatTemplate
from valkyrie.data.feed import TaskFeed
from valkyrie.data.store_location import store_path
from valkyrie.data.token_store import TokenStore
from valkyrie.data.tokenizer_copy import copy_tokenizer
from valkyrie.errors import ConfigurationError, DataError, UsageError
from valkyrie.inference.generation import Sampling
from valkyrie.inference.infer import infer
from valkyrie.inference.loaded import LoadedModel

WITHOUT = "only pip install '.[hf]' or '.[test]' installs jinja2"
CHATML = (
  "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] "
  "+ '<|im_end|>' + '\\n' }}{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# As transformers 5 renders it.
TRICKY = """
{%- if messages[0]['role'] == 'system' %}
    {%- set about = messages[0]['content'] %}
{%- endif %}
{{ bos_token }}{{ about | tojson }} é
{% for message in messages if message['role'] != 'system' %}
    {% if loop.index > 3 %}{% break %}{% endif %}
    {% if message.role == 'assistant' %}
        {% generation %}{{ message.content.strip() }}{{ eos_token }}{% endgeneration %}
    {% else %}
        [{{ message['content'] | trim }}{% if tools is not none %}tools{% endif %}]
    {% endif %}
{% endfor %}
"""
TALK = (
  ('system', 'Be <kind>.'),
  ('user', 'the sea'),
  ('assistant', '\nthe deep sea\n'),
  ('user', 'more'),
  ('assistant', 'deep'),
  ('user', 'unanswered'),
)
RENDERED = (
  '<|im_start|>system\nBe <kind>.<|im_end|>\n<|im_start|>user\nthe sea<|im_end|>\n'
  '<|im_start|>assistant\n\nthe deep sea\n<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n'
  '<|im_start|>assistant\ndeep<|im_end|>'
)
ASK = [{'role': 'user', 'content': 'the sea'}]


def messages(talk=TALK):
  return [{'role': role, 'content': content} for role, content in talk]


def sharegpt(talk=TALK):
  names = {'user': 'human', 'assistant': 'gpt'}
  return [{'from': names.get(role, role), 'value': content} for role, content in talk]


IMAGE = {'type': 'image_url', 'image_url': {'url': 'a.png'}}
FUNCTION = {'name': 'add', 'parameters': {'type': 'object', 'properties': {}}}
TOOL = {'type': 'function', 'function': FUNCTION}
CALL = {'id': 'c', 'type': 'function', 'function': {'name': 'add', 'arguments': '{"a": 1}'}}
BAD_CALL = {'type': 'function', 'function': {'name': 'add', 'arguments': '{"a": 1'}}


def weighted(**fields):
  """The conversation with fields of the first answer."""
  talk = messages()
  talk[2] |= fields
  return talk


@pytest.fixture
def tokenizer(tmp_path):
  """The path of a tokenizer.json that begins texts with BOS, with the template CHATML."""
  tokenizers = pytest.importorskip('tokenizers', reason=tiny_run.WITHOUT_HF)
  pytest.importorskip('jinja2', reason=WITHOUT)
  file = tmp_path / 'tokenizer.json'
  tiny_run.write_tokenizer(file)
  codec = tokenizers.Tokenizer.from_file(str(file))
  codec.add_special_tokens(['<|im_start|>', '<|im_end|>', '<s>'])
  codec.save(str(file))
  write_template(tmp_path, CHATML)
  return file


def write_template(folder, template):
  config = {'chat_template': template, 'add_bos_token': True, 'bos_token': '<s>'}
  config |= {'tokenizer_class': 'PreTrainedTokenizerFast', 'eos_token': '<|endoftext|>'}
  (folder / 'tokenizer_config.json').write_text(json.dumps(config))


def compiled(tokenizer, template=CHATML):
  write_template(tokenizer.parent, template)
  return ChatTemplate(vocabularies.load(str(tokenizer)))


@pytest.fixture
def feed(tmp_path, tokenizer):
  def make(*talks, column='messages', shards=1, **options):
    (tmp_path / 'talks.jsonl').write_text('\n'.join(json.dumps({column: talk}) for talk in talks))
    (tmp_path / 'held.jsonl').write_text(json.dumps({column: messages()}))
    found = TaskFeed(
      'conversations', 'train', 1, 0, vocabulary=str(tokenizer),
      source=str(tmp_path / 'talks.jsonl'), shuffle=False, epochs=1, data_dir=str(tmp_path),
      options={'column': column, 'held_out': str(tmp_path / 'held.jsonl')}, **options,
    )  # fmt: skip
    store_builder.build(
      found.selection, store_path(found.selection, str(tmp_path)), shards=shards, rebuild=True
    )
    return found

  return make


def shown(codec, ids):
  """The text of ids, with the names of special tokens."""
  names = {number: name for name, number in codec.specials.items()}
  return ''.join(names.get(int(number)) or codec.decode([int(number)]) for number in ids)


def learned(feed, batch):
  weights = batch.weights[0]
  runs = np.split(batch.targets[0], np.flatnonzero(np.diff(weights)) + 1)
  return [shown(feed.vocabulary, ids) for ids in runs[int(not weights[0]) :: 2]]


@pytest.mark.parametrize(('column', 'form'), [('messages', messages), ('conversations', sharegpt)])
def test_only_answers_and_what_ends_them_are_learned(feed, column, form):
  found = feed(form(), column=column)
  batch = found.read(0, found.row_tokens)
  assert shown(found.vocabulary, batch.inputs[0]) == f'{RENDERED}<|endoftext|>'  # and no BOS
  assert learned(found, batch) == ['\nthe deep sea\n<|im_end|>', 'deep<|im_end|>']
  assert found.tokens_per_byte is None  # of bytes that are not all learned


def test_answers_without_weight_are_read_only(feed):
  talk = messages()
  talk[2]['weight'] = 0
  greeting = [('assistant', 'Hello!'), ('user', 'sea?'), ('assistant', 'sea.')]
  found = feed(talk, messages(greeting))
  answers = ['deep<|im_end|>', 'sea.<|im_end|>']
  assert learned(found, found.read(0, found.row_tokens)) == answers


def test_answers_that_are_not_to_be_trained_are_read_only(feed):
  found = feed(weighted(train=False), [*sharegpt()[:2], {**sharegpt()[2], 'train': True}])
  answers = ['deep<|im_end|>', '\nthe deep sea\n<|im_end|>']
  assert learned(found, found.read(0, found.row_tokens)) == answers


# As Qwen's: tools in the first message, calls as JSON, answers of tools as messages of the user.
OF_TOOLS = (
  '{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}'
  "<|im_end|>\n{% endif %}{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
  '{% if message.reasoning_content %}[{{ message.reasoning_content }}]{% endif %}'
  '{{ message.content }}{% for call in message.tool_calls %}'
  '{{ call.function.name }}({{ call.function.arguments | tojson }}){% endfor %}'
  "{{ '<|im_end|>\n' }}{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize('earlier', [False, True])
@pytest.mark.parametrize('as_text', [False, True])
def test_tools_and_calls_are_given_to_the_template(feed, tokenizer, tmp_path, earlier, as_text):
  (tokenizer.parent / 'chat_template.jinja').write_text(OF_TOOLS)
  talk = [
    {'role': 'user', 'content': [{'type': 'text', 'text': 'add '}, {'type': 'text', 'text': '1'}]},
    {'role': 'assistant', 'content': None, 'reasoning_content': 'why', 'tool_calls': [CALL]},
    {'role': 'tool', 'content': '1', 'tool_call_id': 'c', 'name': None},
    {'role': 'assistant', 'content': 'one'},
  ]
  row = {'messages': talk, 'tools': [{**TOOL, 'strict': None}]}
  if earlier:
    talk[1] |= {'tool_calls': None, 'function_call': CALL['function']}
    talk[2] |= {'role': 'function', 'name': 'add', 'tool_call_id': None}
    row = {'messages': talk, 'functions': [FUNCTION]}
  if as_text:
    (name,) = row.keys() - {'messages'}
    row[name] = json.dumps(row[name])
  found = feed(messages())
  (tmp_path / 'talks.jsonl').write_text(json.dumps(row))
  store_builder.build(found.selection, store_path(found.selection, str(tmp_path)), rebuild=True)
  found.__dict__.pop('store', None)
  text = shown(found.vocabulary, found.read(0, found.row_tokens).inputs[0])
  assert text == (
    f'<|im_start|>system\n{json.dumps(TOOL)}<|im_end|>\n<|im_start|>user\nadd 1<|im_end|>\n'
    '<|im_start|>assistant\n[why]add({"a": 1})<|im_end|>\n<|im_start|>tool\n1<|im_end|>\n'
    '<|im_start|>assistant\none<|im_end|><|endoftext|>'
  )
  answers = ['[why]add({"a": 1})<|im_end|>', 'one<|im_end|>']
  assert learned(found, found.read(0, found.row_tokens)) == answers


def test_both_forms_may_stand_in_one_file(feed, tmp_path):
  found = feed(messages())
  rows = [
    {'messages': messages()},
    {'conversations': sharegpt(TALK[1:]), 'system': 'Be <kind>.'},
    {'messages': None, 'conversations': messages()},
  ]
  columns = {name: [row.get(name) for row in rows] for name in ('messages', *rows[1])}
  pq.write_table(pa.table(columns), tmp_path / 'table.parquet')
  (tmp_path / 'lines.jsonl').write_text('\n'.join(map(json.dumps, rows)))
  for name in 'table.parquet', 'lines.jsonl':
    selection = dataclasses.replace(found.selection, source=str(tmp_path / name))
    store_builder.build(selection, tmp_path / f'{name}.store', shards=1)
    store = TokenStore.open(tmp_path / f'{name}.store', selection.vocabulary)
    assert len(store.lengths) == 3 and len({*store.lengths.tolist()}) == 1
  with pytest.raises(DataError, match='no column talk; it has messages'):
    selection = dataclasses.replace(found.selection, options={'column': 'talk'})
    store_builder.build(selection, tmp_path / 'other', shards=1)


def test_what_a_template_leaves_out_is_named(feed, tokenizer):
  only = CHATML.replace('in messages %}', "in messages if message.role != 'developer' %}")
  (tokenizer.parent / 'chat_template.jinja').write_text(only)
  with pytest.raises(DataError, match=r'leaves out the message 1, of the role developer'):
    feed(messages([('developer', 'Be brief.'), *TALK]))
  # Also where another message has the same words.
  _, question = TALK[0]
  with pytest.raises(DataError, match=r'leaves out the message 1, of the role developer'):
    feed(messages([('developer', question[:3]), *TALK]))


def test_what_a_template_leaves_out_is_named_in_a_question(run, tokenizer):
  only = CHATML.replace('in messages %}', "in messages if message.role != 'system' %}")
  write_template(tokenizer.parent, only)
  with pytest.raises(DataError, match=r'leaves out the message 1, of the role system'):
    run.generate(messages=[{'role': 'system', 'content': 'In French.'}, *ASK])


MARKED = (
  '{% for m in messages %}{{ "<|im_start|>" + m.role + "\n" + m.content + "\n" }}{% endfor %}'
)
MARKED += '{% if add_generation_prompt %}{{ "<|im_start|>assistant\n" }}{% endif %}'
PLAIN = '{% for m in messages %}{{ m.role + ": " + m.content + "\n" }}{% endfor %}'
PLAIN += '{% if add_generation_prompt %}{{ "assistant: " }}{% endif %}'


@pytest.mark.parametrize(
  ('template', 'mark', 'stop'),
  [(MARKED, '<|im_start|>', '<|im_start|>'), (PLAIN, 'user:', 'user:')],
)
def test_answers_without_an_end_are_learned_up_to_the_next_mark(
  feed, tokenizer, template, mark, stop, caplog
):
  (tokenizer.parent / 'chat_template.jinja').write_text(template)
  chat_template._warn_once.cache_clear()
  found = feed(messages())
  answers = [f'\nthe deep sea\n\n{mark}', f'deep\n{mark}']
  assert learned(found, found.read(0, found.row_tokens)) == answers
  assert ChatTemplate(found.vocabulary).stops('x') == [stop, 'x']
  assert f'begins the next message, {stop!r}' in caplog.text


def test_a_template_that_teaches_no_end_is_refused(feed, tokenizer):
  (tokenizer.parent / 'chat_template.jinja').write_text(
    '{% for m in messages %}{{ m.content }}{% endfor %}'
  )
  with pytest.raises(ConfigurationError, match='Nothing ends an answer'):
    feed(messages())


def test_named_templates(tokenizer):
  named = [{'name': 'default', 'template': CHATML}, {'name': 'tool_use', 'template': OF_TOOLS}]
  template = compiled(tokenizer, [*named, {'name': 'rag', 'template': '{{ 1 }}'}])
  assert template.render(ASK, 'here', asks=False) == '<|im_start|>user\nthe sea<|im_end|>\n'
  assert json.dumps(TOOL) in template.render(ASK, 'here', asks=False, tools=[TOOL])
  folder = tokenizer.parent / 'additional_chat_templates'
  folder.mkdir()
  (folder / 'tool_use.jinja').write_text(OF_TOOLS)
  template = compiled(tokenizer, CHATML)
  assert json.dumps(TOOL) in template.render(ASK, 'here', asks=False, tools=[TOOL])
  assert template.stops([]) == ['<|im_end|>']
  (tokenizer.parent / 'run').mkdir()
  codec = vocabularies.load(str(tokenizer))
  copy_tokenizer(codec, tokenizer.parent / 'run')
  kept = vocabularies.load(str(tokenizer.parent / 'run' / 'tokenizer.json'))
  assert chat_template.described(kept) == chat_template.described(codec)
  (folder / 'tool_use.jinja').unlink()
  with pytest.raises(ConfigurationError, match="template, only those named 'tool_use', 'rag'"):
    compiled(tokenizer, [named[1], {'name': 'rag', 'template': CHATML}])


@pytest.mark.parametrize('files', [False, True])
@pytest.mark.parametrize('name', [['rag'], {}, None, '\x1b[31m\u202e\n\ud83d', 'r' * 10**5])
def test_names_of_templates_are_of_a_stranger(tokenizer, name, files):
  if files:
    folder = tokenizer.parent / 'additional_chat_templates'
    folder.mkdir()
    (folder / 'other.jinja').write_text(CHATML)
  listed = [{'name': name, 'template': CHATML}, {'name': 'tool_use', 'template': CHATML}]
  with pytest.raises(ConfigurationError, match='no chat template, only those named') as refusal:
    compiled(tokenizer, listed)
  said = str(refusal.value)
  assert foreign.shown(said) == said and len(said) < 1000


def test_a_store_of_an_earlier_rendering_is_refused(feed, monkeypatch):
  with monkeypatch.context() as earlier:
    earlier.setattr(chat_template, '_RENDERING', 1)
    found = feed(messages())
  with pytest.raises(ConfigurationError, match=r'(?s)a version that read no tools.*--rebuild'):
    _ = found.store


def test_a_table_of_messages_is_read(feed, tmp_path):
  talk = [{**message, 'weight': None} for message in messages()]
  talk[2]['weight'] = 0
  pq.write_table(pa.Table.from_pylist([{'messages': talk}]), tmp_path / 'talks.parquet')
  selection = dataclasses.replace(
    feed(messages()).selection, source=str(tmp_path / 'talks.parquet')
  )
  store_builder.build(selection, tmp_path / 'table', shards=1)
  store = TokenStore.open(tmp_path / 'table', selection.vocabulary)
  first = RENDERED.removesuffix('deep<|im_end|>')
  assert store.prompts.tolist() == [len(selection.vocabulary.template_ids(first))]
  assert not store.later_prompts.size


def test_conversations_are_packed_whole_however_they_are_cut(feed):
  talks, answers = [], []
  for number in range(12):
    said = [(f'ask {number} {turn}', f'say {number} {turn}') for turn in range(1 + number % 4)]
    talks.append(messages([m for q, a in said for m in (('user', q), ('assistant', a))]))
    answers += [f'{answer}<|im_end|>' for _, answer in said]
  found = feed(*talks, talks[3], talks[7], shards=3, unique=True)
  whole = found.read(0, found.row_tokens)
  assert len(found.store.lengths) == 12
  assert sorted(learned(found, whole)) == sorted(answers)
  for cuts in ([1, 50], [7, 8, 9, 300], range(1, found.row_tokens, 11)):
    places = [0, *cuts, found.row_tokens]
    parts = [found.read(a, b - a) for a, b in itertools.pairwise(places)]
    for leaf, pieces in zip(whole, zip(*parts, strict=True), strict=True):
      np.testing.assert_array_equal(np.concatenate(pieces, axis=1), leaf)


def test_the_text_is_that_of_transformers(tokenizer):
  """The literal is what transformers 5.24 renders."""
  template = compiled(tokenizer, TRICKY)
  expected = '<s>"Be <kind>." é\n        [the sea]\nthe deep sea<|endoftext|>        [more]\n'
  assert template.render(messages(), 'here', asks=True) == expected
  transformers = pytest.importorskip('transformers', reason="only '.[learn]' installs transformers")
  theirs = transformers.AutoTokenizer.from_pretrained(tokenizer.parent)
  for asks in (True, False):
    for each in (TRICKY, CHATML):
      ours = compiled(tokenizer, each).render(messages(), 'here', asks=asks)
      assert ours == theirs.apply_chat_template(
        messages(), chat_template=each, tokenize=False, add_generation_prompt=asks
      )


def test_special_tokens_of_the_template_are_tokens(tokenizer):
  import tokenizers  # noqa: PLC0415  (which the fixture asked for)

  ids = compiled(tokenizer).prompt(messages(), 'here')
  theirs = tokenizers.Tokenizer.from_file(str(tokenizer))
  text = f'{RENDERED}\n<|im_start|>user\nunanswered<|im_end|>\n<|im_start|>assistant\n'
  assert ids.tolist() == theirs.encode(text, add_special_tokens=False).ids
  codec = vocabularies.load(str(tokenizer))
  codec.template_ids('<|im_end|>')
  assert len(codec.ids('<|im_end|>')) > 1  # elsewhere they stay text


@pytest.mark.parametrize(
  ('row', 'message'),
  [
    ({'messages': []}, r'nothing to learn'),
    ({'messages': 'Hello'}, r"has 'Hello' in the column messages, expected a list"),
    ({'messages': ['Hello']}, r'expected a list'),
    ({'messages': None}, r'expected a list'),
    ({'messages': messages(TALK[:2])}, r'nothing to learn'),
    ({'messages': messages(TALK[2:3])}, r'nothing to learn'),
    ({'messages': messages([('bot', 'x'), *TALK])}, r"message 1 is .*'bot'.*expected a role"),
    ({'messages': [*messages(), {'role': 'user'}]}, r'message 7 is .*content that is a text'),
    ({'messages': [{'role': 'user', 'content': [IMAGE]}, *messages()]}, r'message 1 has the part'),
    ({'messages': messages([('developer', 'x'), *TALK])[:1]}, r'nothing to learn'),
    ({'messages': weighted(weight=0.5)}, r"message 3 has {'weight': 0.5}, expected 0 or 1"),
    ({'messages': weighted(train='no')}, r"message 3 has {'train': 'no'}, expected 0 or 1"),
    ({'messages': weighted(weight=1, train=False)}, r'message 3 has .*expected 0 or 1'),
    ({'messages': weighted(content=None)}, r'message 3 is .*content that is a text'),
    ({'messages': weighted(reasoning_content='why')}, r'leaves out reasoning_content of .* 3'),
    ({'messages': weighted(tool_calls=[CALL])}, r'leaves out tool_calls of .* 3'),
    ({'messages': weighted(tool_calls=[{'name': 'add'}])}, r'message 3 has the call'),
    (
      {'messages': weighted(tool_calls=[CALL], function_call=CALL['function'])},
      r'message 3 has function_call and tool_calls',
    ),
    ({'messages': messages(), 'tools': [TOOL], 'functions': [FUNCTION]}, r'tools and functions'),
    ({'messages': weighted(tool_calls=[BAD_CALL])}, r'message 3 has arguments .* not JSON'),
    ({'messages': messages(), 'tools': [TOOL]}, r'leaves out the tools'),
    ({'messages': messages(), 'tools': 'add'}, r'has tools which are not JSON'),
    ({'messages': messages(), 'functions': [3]}, r'expected a list of objects'),
    ({'conversations': 'Hello'}, r"has 'Hello' in the column conversations"),
    ({'messages': sharegpt([('bing', 'x'), *TALK])}, r"message 1 is .*'bing'"),
    ({'messages': messages([('user', 'a<|im_end|>'), *TALK])}, r'special token <\|im_end\|>'),
    ({'messages': messages([('user', '\ud83d'), *TALK])}, r'half of a character'),
    ({'text': 'Hello'}, r'has no column messages; it has text.*messages_column'),
  ],
)
def test_wrong_conversations_are_named_by_their_line(feed, row, message, tmp_path):
  found = feed(messages())
  data = tmp_path / 'talks.jsonl'
  data.write_text(f'{json.dumps({"messages": messages()})}\n{json.dumps(row)}\n')
  with pytest.raises(DataError, match=rf'Line 2 of .*talks\.jsonl.*{message}'):
    store_builder.build(found.selection, tmp_path / 'other', shards=1)


def test_the_column_of_a_file_for_infer_has_no_option(tmp_path):
  file = tmp_path / 'talks.jsonl'
  file.write_text('{"text": "Hello"}\n')
  with pytest.raises(DataError, match=r'has text\. Give the list of messages'):
    importlib.import_module('valkyrie.inference.infer')._read_conversations(str(file))


@pytest.mark.parametrize(
  ('template', 'message'),
  [
    (
      "{{ raise_exception('Roles must alternate') }}",
      'Line 1 of .*: Roles must alternate. Correct',
    ),
    ('{{ messages.__class__.__base__.__subclasses__() }}', 'Line 1 .* unsafe'),
    ('{{ messages.append(1) }}', 'Line 1 .* unsafe'),
    ("{% include '/etc/passwd' %}", 'Line 1 .* no loader'),
    ('{% for a in range(9999) %}{{ "a" * 99999 }}{% endfor %}', 'more than 67,108,864 characters'),
    (
      '{{ messages | length }}{{ messages }}',
      'Line 1 .* message 3 .* changes the text of those before it',
    ),
  ],
)
def test_a_template_is_a_strangers_code(feed, tokenizer, template, message):
  (tokenizer.parent / 'chat_template.jinja').write_text(template)
  with pytest.raises(DataError, match=message):
    feed(messages())


def test_a_tokenizer_without_a_usable_template_is_refused(feed, tokenizer, monkeypatch):
  with pytest.raises(ConfigurationError, match=r'chat template of .* is wrong .*endfor'):
    compiled(tokenizer, '{% for a in b %}')
  with pytest.raises(ConfigurationError, match=r'tokenizer.json has no chat template. Use'):
    compiled(tokenizer, None)
  with pytest.raises(ConfigurationError, match=r'bytes has no chat template. Use'):
    ChatTemplate(vocabularies.load('bytes'))
  (tokenizer.parent / 'chat_template.jinja').write_bytes(b'\xff')
  with pytest.raises(ConfigurationError, match=r'chat_template.jinja is not a .*decode'):
    compiled(tokenizer)
  (tokenizer.parent / 'chat_template.jinja').write_text(CHATML)  # goes before the configuration
  assert compiled(tokenizer, '{{ wrong }}').stops('x') == ['<|im_end|>', 'x']
  monkeypatch.setitem(sys.modules, 'jinja2', None)
  with pytest.raises(ConfigurationError, match='pip install jinja2'):
    compiled(tokenizer)


def test_a_store_of_another_template_is_refused(feed, tokenizer):
  found = feed(messages())
  assert found.store.information['source']['chat_template'] == CHATML
  (tokenizer.parent / 'chat_template.jinja').write_text(CHATML.replace('assistant', 'helper'))
  del found.store
  with pytest.raises(ConfigurationError, match=r'(?s)another chat template.*--rebuild'):
    _ = found.store


def test_a_run_keeps_the_template(tokenizer, tmp_path):
  (tmp_path / 'chat_template.jinja').write_text(CHATML)
  (tmp_path / 'run').mkdir()
  copy_tokenizer(vocabularies.load(str(tokenizer)), tmp_path / 'run')
  kept = vocabularies.load(str(tmp_path / 'run' / 'tokenizer.json'))
  assert chat_template.sources_of(kept) == {'default': CHATML}


@pytest.fixture
def run(tokenizer):
  codec = vocabularies.load(str(tokenizer))
  model = tiny.model(vocabulary_size=codec.size)
  params, _ = tiny.init(model, 1)
  return LoadedModel(model, params, codec, model_dir='', steps=(1,), chunk_size=16)


def test_messages_are_answered_up_to_the_end_of_the_turn(run, tokenizer, tmp_path, capsys):
  sampling = {'max_tokens': 30, 'sampling': Sampling(temperature=1.0)}
  (whole,) = run.generate(messages=ASK, **sampling)
  prompt = '<|im_start|>user\nthe sea<|im_end|>\n<|im_start|>assistant\n'
  assert run.generate(run.tokenizer.template_ids(prompt), **sampling) == [whole]
  # The prompt stays the same with a template that ends answers by what this model says.
  end = re.search(r'[a-zA-Z0-9]', whole.text)[0]
  ends = f"+ ({end!r} if message['role'] == 'assistant' else '<|im_end|>')"
  write_template(tokenizer.parent, CHATML.replace("+ '<|im_end|>'", ends))
  (answer,) = run.generate(messages=ASK, **sampling)
  assert (answer.text, answer.ended) == (whole.text[: whole.text.index(end)], 'stop')
  file = tmp_path / 'asked.jsonl'
  file.write_text(f'{json.dumps({"messages": ASK})}\n' * 2)
  infer('', messages=str(file), opened=lambda *_: run, seed=0, max_tokens=30, temperature=1.0)
  lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
  assert [line['prompt'] for line in lines] == [ASK, ASK]
  assert lines[0]['text'] == answer.text
  file.write_text(
    f'{json.dumps({"messages": ASK})}\n{json.dumps({"messages": messages(TALK[:3])})}'
  )
  with pytest.raises(DataError, match=r'Line 2 of .*asked.jsonl: nothing asks.*assistant'):
    infer('', messages=str(file), opened=lambda *_: run, seed=0)


def test_wrong_questions_are_refused(run):
  for wrong in ([], messages(TALK[:3])):
    with pytest.raises(DataError, match=r'^messages: nothing asks for an answer'):
      run.generate(messages=wrong)
  for wrong in ({}, 'Hello', ['Hello']):
    with pytest.raises(DataError, match=r'^messages has .*expected a list such as'):
      run.generate(messages=wrong)
  # Other forms of messages are read as they are in training.
  sharegpt = run.generate(messages=({'from': 'human', 'value': 'Hello'},), max_tokens=3)
  assert sharegpt == run.generate(messages=[{'role': 'user', 'content': 'Hello'}], max_tokens=3)
  with pytest.raises(DataError, match=r'^messages: the message 1 is'):
    run.generate(messages=[{'role': 'user'}])
  with pytest.raises(UsageError, match='prompts and messages'):
    run.generate('Hello', messages=ASK)
  with pytest.raises(UsageError, match='--prompts and --messages exclude'):
    parse_command_line(['--model_dir=r', '--run_mode=infer', '--prompts=a', '--messages=b'])
