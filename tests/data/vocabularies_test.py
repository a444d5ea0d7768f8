"""Vocabularies: their ids, and messages about invalid files."""

import functools
import itertools
import json
import os
import pickle
import sys

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest
import tiny_run

from valkyrie import foreign
from valkyrie.data import store_writer, vocabularies
from valkyrie.data.selection import Selection
from valkyrie.data.token_store import TokenStore
from valkyrie.errors import ConfigurationError, DataError

TEXT = tiny_run.TEXT


@given(st.text())
def test_bytes_decode_to_the_same_text(text):
  codec = vocabularies.load('bytes')
  ids = codec.encode(text)
  assert codec.decode([*ids, codec.eos_id, 0]) == text
  assert all(3 <= i < codec.size for i in ids)


def test_an_incomplete_character_is_replaced_not_dropped():
  codec = vocabularies.load('bytes')
  assert codec.decode(codec.encode('é')[:1]) == '\ufffd'


def test_byte_ids_are_those_of_seqio():
  import seqio  # noqa: PLC0415

  theirs, ours = seqio.ByteVocabulary(), vocabularies.load('bytes')
  assert (theirs.vocab_size, theirs.eos_id) == (ours.size, ours.eos_id)
  text = 'naïve\x00 ½ 漢字 🙂\n'
  assert theirs.encode(text) == ours.encode(text)


def write_sentencepiece(folder):
  import sentencepiece  # noqa: PLC0415

  (folder / 'text').write_text(TEXT)
  sentencepiece.SentencePieceTrainer.train(
    input=str(folder / 'text'), model_prefix=str(folder / 'm'), vocab_size=24, minloglevel=2
  )


def test_sentencepiece(tmp_path):
  write_sentencepiece(tmp_path)
  codec = vocabularies.load(str(tmp_path / 'm.model'))
  ids = codec.encode('deep is the sea')
  assert codec.decode([*ids, codec.size + 5]) == 'deep is the sea'
  assert (codec.size, codec.eos_id) == (24, 2)
  assert codec.fingerprint.startswith('sentencepiece-')


def test_hugging_face_keeps_id_0_and_encodes_no_text_to_eos(tmp_path):
  tiny_run.write_tokenizer(tmp_path / 'tokenizer.json')
  codec = vocabularies.load(str(tmp_path / 'tokenizer.json'))
  assert codec.encode('!') == [0]
  assert codec.decode([0, 0]) == '!!'
  assert codec.eos_id == codec.size - 1
  ids = codec.encode('the sea <|endoftext|>')
  assert codec.eos_id not in ids
  assert codec.decode(ids) == 'the sea <|endoftext|>'


def test_hugging_face_eos_is_named_by_tokenizer_config(tmp_path):
  tiny_run.write_tokenizer(tmp_path / 'tokenizer.json')
  config = tmp_path / 'tokenizer_config.json'
  config.write_text('{"eos_token": {"content": "!"}}')
  assert vocabularies.load(str(tmp_path / 'tokenizer.json')).eos_id == 0
  config.write_text('{"eos_token": "<end>"}')
  with pytest.raises(ConfigurationError, match="none of '<end>'"):
    vocabularies.load(str(tmp_path / 'tokenizer.json'))


def test_the_name_of_an_eos_that_is_missing_is_shown_without_hidden_characters(tmp_path):
  tiny_run.write_tokenizer(tmp_path / 'tokenizer.json')
  name = '\x1b[31m\u202e\n\ud83d' + 'e' * 10**5
  (tmp_path / 'tokenizer_config.json').write_text(json.dumps({'eos_token': name}))
  with pytest.raises(ConfigurationError) as refusal:
    vocabularies.load(str(tmp_path / 'tokenizer.json'))
  said = str(refusal.value)
  assert r"none of '\x1b[31m\u202e\n\ud83de" in said
  assert foreign.shown(said) == said and len(said) < 1000


def test_a_missing_tokenizers_package(tmp_path, monkeypatch):
  (tmp_path / 'tokenizer.json').write_text('{}')
  monkeypatch.setitem(sys.modules, 'tokenizers', None)
  with pytest.raises(ConfigurationError, match='pip install tokenizers'):
    vocabularies.load(str(tmp_path / 'tokenizer.json'))


@pytest.mark.parametrize('name', ['a.model', 'tokenizer.json'])
@pytest.mark.parametrize(
  ('content', 'message'),
  [(None, 'cannot be read'), (b'', 'is empty'), (b'no such thing', 'is not a')],
)
def test_messages_name_bad_files(tmp_path, name, content, message):
  if name == 'tokenizer.json':
    pytest.importorskip('tokenizers', reason=tiny_run.WITHOUT_HF)
  file = tmp_path / name
  if content is not None:
    file.write_bytes(content)
  with pytest.raises(ConfigurationError, match=message) as caught:
    vocabularies.load(str(file))
  assert str(file) in str(caught.value)


def test_the_message_about_an_unknown_vocabulary_lists_the_known_forms():
  with pytest.raises(ConfigurationError, match=r"'byte'.*'bytes'.*model.*tokenizer.json"):
    vocabularies.load('byte')


ODDITIES = {  # what a file may bring, as a change of its JSON
  'truncation': lambda file: file.update(
    truncation={'direction': 'Right', 'max_length': 4, 'strategy': 'LongestFirst', 'stride': 0}
  ),
  'padding': lambda file: file.update(
    padding={
      'strategy': {'Fixed': 512},
      'direction': 'Right',
      'pad_to_multiple_of': None,
      'pad_id': 0,
      'pad_type_id': 0,
      'pad_token': '!',
    }
  ),
  'dropout': lambda file: file['model'].update(dropout=0.5),
  'special=false': lambda file: file['added_tokens'][-1].update(special=False),
  'special=false of': lambda file: file['added_tokens'][-1].update(
    special=False, normalized=True, lstrip=True, rstrip=True
  ),
  '': lambda file: file['model'].update(ignore_merges=True),
}
SPELLED = ('<|endoftext|>', 'a <|endoftext|>', '<|endoftext|>\nb', '<|endoftext|>' * 2, '<|endof')


@pytest.mark.parametrize('named', ODDITIES)
def test_settings_of_a_file_change_no_text(tmp_path, caplog, named):
  plain, odd = tmp_path / 'plain.json', tmp_path / 'odd.json'
  tiny_run.write_tokenizer(plain)
  file = json.loads(plain.read_text())
  ODDITIES[named](file)
  odd.write_text(json.dumps(file))
  codecs = [vocabularies.load(str(path)) for path in (plain, odd)]
  said = [record.message for record in caplog.records]
  assert len(said) == bool(named) and all(f'{odd} has {named}' in text for text in said)
  codecs += [pickle.loads(pickle.dumps(codec)) for codec in codecs]  # as --processes=2 does
  for text in (TEXT, *SPELLED):
    one, *others = [codec.encode(text) for codec in codecs for _ in range(3)]
    assert one and all(other == one for other in others)
    assert codecs[0].eos_id not in one and codecs[0].decode(one) == text


def unigram(path, *, spaced=False):
  """As T5's: its model has the EOS as a piece with a better score than all others."""
  tokenizers = pytest.importorskip('tokenizers', reason=tiny_run.WITHOUT_HF)
  pieces = [('<unk>', 0.0), ('</s>', 0.0), *((letter, -3.0) for letter in 'ab </s>▁')]
  codec = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, 0))
  codec.add_special_tokens(['</s>'])
  if spaced:  # before every text
    codec.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    codec.decoder = tokenizers.decoders.Metaspace()
  codec.save(str(path))


def words(path):
  tokenizers = pytest.importorskip('tokenizers', reason=tiny_run.WITHOUT_HF)
  ids = {word: n for n, word in enumerate(['</s>', '<', '/s>', 'a', 'b', '?'])}
  codec = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, '?'))
  codec.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  codec.save(str(path))


# Public report huggingface/transformers#31513: a prefix space inside a text.
@pytest.mark.parametrize(
  ('name', 'write'),
  [
    ('u.json', unigram),
    ('m.json', functools.partial(unigram, spaced=True)),
    ('w.json', words),
  ],
)
def test_no_text_becomes_the_end_of_a_document(tmp_path, name, write):
  write(tmp_path / name)
  codec = vocabularies.load(str(tmp_path / name))
  assert codec._encode('</s>')[-1] == codec.eos_id, 'its file makes an EOS of text'
  for text in ('</s>', 'a </s> b', '</s> </s>', 'a </s>', '</s></s>'):
    ids = codec.encode(text)
    assert codec.eos_id not in ids
    if name[0] != 'w':
      assert codec.decode(ids).replace(' ', '') == text.replace(' ', '')
    if name[0] == 'm':
      assert codec.decode(ids) == text


def test_an_eos_that_is_one_character_of_text_is_refused(tmp_path):
  tiny_run.write_tokenizer(tmp_path / 'tokenizer.json')
  (tmp_path / 'tokenizer_config.json').write_text('{"eos_token": "!"}')
  codec = vocabularies.load(str(tmp_path / 'tokenizer.json'))
  assert codec.encode('a sea')
  with pytest.raises(DataError, match="EOS, '!', which ends documents"):
    codec.encode('a sea!')


@pytest.mark.parametrize('name', ['bytes', 'tokenizer.json', 'm.model'])
@pytest.mark.parametrize(
  'text', ['\ud83d', 'fine \udc00', 'é \ud83d\ud83d', '\ude00\ud83d', '\udcff']
)
def test_half_a_character_is_refused_by_every_codec(tmp_path, name, text):
  tiny_run.write_tokenizer(tmp_path / 'tokenizer.json')
  write_sentencepiece(tmp_path)
  codec = vocabularies.load('bytes' if name == 'bytes' else str(tmp_path / name))
  for encode in (codec.encode, codec.ids):
    with pytest.raises(DataError, match=r"half of a character, '\\u[0-9a-f]{4}', after"):
      encode(text)
  assert codec.encode('\N{GRINNING FACE}')


@pytest.mark.parametrize(('size', 'warned'), [(0.1, True), (1, False), (19, False), (195.59, True)])
def test_an_absurd_ratio_of_bytes_to_tokens_is_warned_of(tmp_path, caplog, size, warned):
  selection = Selection('own', 'train', vocabularies.load('bytes'))
  document = store_writer.Document(np.full(999, 5, np.int32), round(1000 * size))
  store_writer.StoreWriter(tmp_path, selection, {}, shards=1).write(lambda shard: [document])
  TokenStore.open(tmp_path, selection.vocabulary)
  assert caplog.text.count(f'has {size:.3g} bytes of text a token') == 2 * warned


def damaged(folder, **changes):
  """A tokenizer.json with other parts."""
  content = {'version': '1.0', 'added_tokens': [], 'model': {'type': 'WordLevel'}}
  content['model'] |= {'vocab': {'<eos>': 0, 'a': 1}, 'unk_token': 'a'}
  file = folder / 'tokenizer.json'
  file.write_text(json.dumps(content | changes))
  return file


DOUBLING = {'type': 'Replace', 'pattern': {'String': 'a'}, 'content': 'aa'}
NESTED = {'type': 'Sequence', 'normalizers': [{'type': 'Sequence', 'normalizers': [DOUBLING] * 20}]}
GROWING = [
  {'normalizer': {'type': 'Sequence', 'normalizers': [DOUBLING] * 40}},
  {'normalizer': {'type': 'Sequence', 'normalizers': [NESTED, NESTED]}},
  {'normalizer': DOUBLING | {'pattern': {'Regex': ''}, 'content': 'b' * 100}},
  {'normalizer': DOUBLING | {'pattern': {'String': ''}, 'content': 'b' * 100}},
  {'pre_tokenizer': {'type': 'Sequence', 'pretokenizers': [{'type': 'ByteLevel'}] * 40}},
  {'decoder': {'type': 'Sequence', 'decoders': [DOUBLING] * 40}},
  {'normalizer': {'type': 'Sequence', 'normalizers': [{'type': 'NFC'}] * 300}},
]


@pytest.mark.parametrize('changes', GROWING, ids=itertools.count())
def test_a_tokenizer_that_lets_a_text_grow_is_refused_before_it_is_used(tmp_path, changes):
  with pytest.raises(ConfigurationError, match=r'tokenizer\.json .*let a text grow .* times'):
    vocabularies.load(str(damaged(tmp_path, **changes)))


@pytest.mark.parametrize(
  'changes',
  [
    {'model': {'type': 'BPE', 'vocab': {}, 'merges': []}},
    {'model': {'type': 'WordLevel', 'vocab': {'<eos>': 2**31, 'a': 1}, 'unk_token': 'a'}},
    {
      'model': {
        'type': 'BPE',
        'vocab': {'a': 0, '<eos>': 1, 'a<eos>': 2},
        'merges': [['a', '<eos>']],
        'continuing_subword_prefix': 'a panic of Rust',
      }
    },
    {'normalizer': {'type': 'Replace', 'pattern': 7, 'content': 'a'}},
    {'normalizer': {'type': 'Sequence', 'normalizers': 7}},
    {'normalizer': 7},
  ],
  ids=itertools.count(),
)
def test_a_damaged_tokenizer_is_refused(tmp_path, changes):
  with pytest.raises(ConfigurationError, match=r'The vocabulary .*tokenizer\.json (has ids|is )'):
    vocabularies.load(str(damaged(tmp_path, **changes)))


def test_a_panic_while_a_text_is_read_is_an_error_of_the_vocabulary(tmp_path):
  codec = vocabularies.load(str(damaged(tmp_path)))

  class PanicException(BaseException):  # as the binding of Rust calls it
    pass

  def panics(_):
    raise PanicException('index out of range')

  codec._encode = codec._decode = panics
  for use in (codec.encode, codec.ids):
    with pytest.raises(DataError, match=r'cannot encode a text \(index out of range\)'):
      use('a')
  with pytest.raises(DataError, match=r'cannot decode ids \(index out of range\)'):
    codec.decode([1])


@pytest.mark.parametrize('name', ['tokenizer.json', 'tokenizer_config.json', 'chat_template.jinja'])
def test_what_is_no_file_is_refused_beside_a_tokenizer_too(tmp_path, name):
  tokenizer = damaged(tmp_path)
  file = tmp_path / name
  file.unlink(missing_ok=True)
  os.mkfifo(file)
  with pytest.raises(ConfigurationError, match=rf'{name} .*it is not a regular file, but a pipe'):
    vocabularies.load(str(tokenizer))
  file.unlink()
  file.symlink_to('missing')
  with pytest.raises(ConfigurationError, match=rf'{name} .*No such file'):
    vocabularies.load(str(tokenizer))
