"""Vocabularies: their ids, and messages about invalid files."""

import sys

from hypothesis import given
from hypothesis import strategies as st
import pytest
import tiny_run

from valkyrie.data import vocabularies
from valkyrie.errors import ConfigurationError

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


def test_sentencepiece(tmp_path):
  import sentencepiece  # noqa: PLC0415

  (tmp_path / 'text').write_text(TEXT)
  sentencepiece.SentencePieceTrainer.train(
    input=str(tmp_path / 'text'), model_prefix=str(tmp_path / 'm'), vocab_size=24, minloglevel=2
  )
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
  with pytest.raises(ConfigurationError, match='none of <end>'):
    vocabularies.load(str(tmp_path / 'tokenizer.json'))


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
