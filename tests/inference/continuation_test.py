"""Texts that grow token by token, against the whole decoded at once, by tokenizers of all kinds."""

import pathlib

import hypothesis
from hypothesis import strategies
import pytest
import sentencepiece
import tiny_run

from valkyrie.data.vocabularies import ANY_TEXT, ByteVocabulary, following, load
from valkyrie.errors import ConfigurationError
from valkyrie.inference.generation import Continuation

TEXT = "import os and sys: it's a the end, don't you know? Grüße 😀 to (Mary) and (Max).\n" * 40
SPECIALS = ['[UNK]', '</s>', '<|im_end|>']


def _sentencepiece(folder, kind, **options):
  (folder / 'text.txt').write_text(TEXT)
  sentencepiece.SentencePieceTrainer.train(
    input=str(folder / 'text.txt'), model_prefix=str(folder / 'one'), model_type=kind,
    vocab_size=330, byte_fallback=True, hard_vocab_limit=False, minloglevel=2,
    control_symbols=['<|im_end|>'], **options,
  )  # fmt: skip
  return folder / 'one.model'


def _huggingface(folder, model, trainer, before, decoder):
  t = pytest.importorskip('tokenizers', reason=tiny_run.WITHOUT_HF)
  codec = t.Tokenizer(
    getattr(t.models, model)(**({} if model == 'BPE' else {'unk_token': '[UNK]'}))
  )
  codec.pre_tokenizer, codec.decoder = before(t), decoder(t)
  options = {'end_of_word_suffix': '</w>'} if trainer == 'suffix' else {}
  if trainer == 'bytes':
    options['initial_alphabet'] = t.pre_tokenizers.ByteLevel.alphabet()
  train = getattr(t.trainers, {'BPE': 'BpeTrainer'}.get(model, f'{model}Trainer'))(
    vocab_size=380, special_tokens=SPECIALS, show_progress=False, **options
  )
  codec.train_from_iterator([TEXT], train)
  codec.save(str(folder / 'tokenizer.json'))
  return folder / 'tokenizer.json'


KINDS = {
  'bytes': lambda folder: 'bytes',
  'unigram': lambda folder: _sentencepiece(folder, 'unigram'),
  'bpe': lambda folder: _sentencepiece(folder, 'bpe'),
  'spaces kept': lambda folder: _sentencepiece(
    folder, 'bpe', remove_extra_whitespaces=False, normalization_rule_name='identity'
  ),
  'byte level': lambda folder: _huggingface(
    folder, 'BPE', 'bytes',
    lambda t: t.pre_tokenizers.ByteLevel(add_prefix_space=True), lambda t: t.decoders.ByteLevel(),
  ),
  'metaspace': lambda folder: _huggingface(
    folder, 'BPE', '', lambda t: t.pre_tokenizers.Metaspace(), lambda t: t.decoders.Metaspace()
  ),
  'llama': lambda folder: _huggingface(
    folder, 'BPE', '', lambda t: t.pre_tokenizers.Metaspace(), lambda t: t.decoders.Sequence([
      t.decoders.Replace('▁', ' '), t.decoders.ByteFallback(), t.decoders.Fuse(),
      t.decoders.Strip(' ', 1, 0)]),
  ),
  'word pieces': lambda folder: _huggingface(
    folder, 'WordPiece', '',
    lambda t: t.pre_tokenizers.BertPreTokenizer(), lambda t: t.decoders.WordPiece(cleanup=False),
  ),
  'suffixes': lambda folder: _huggingface(
    folder, 'BPE', 'suffix',
    lambda t: t.pre_tokenizers.WhitespaceSplit(), lambda t: t.decoders.BPEDecoder(),
  ),
}  # fmt: skip


@pytest.fixture(scope='module', params=KINDS)
def vocabulary(request, tmp_path_factory):
  return load(str(KINDS[request.param](tmp_path_factory.mktemp('tokenizer'))))


def grown(vocabulary, prompt, tokens, stop=()):
  growing = Continuation(vocabulary, stop, prompt)
  pieces = []
  for token in tokens:
    pieces.append(growing.add(token))
    if growing.ended is not None:
      break
  else:
    pieces.append(growing.end())
  assert ''.join(pieces) == growing.text
  return growing


def test_a_continuation_is_the_whole_less_the_prompt(vocabulary):
  tokens = vocabulary.encode(TEXT[: 2 * len(TEXT) // 40])
  characters = 0
  for split in range(1, len(tokens) - 1):
    whole, prompt = vocabulary.decode(tokens), vocabulary.decode(tokens[:split])
    if not whole.startswith(prompt):
      continue  # inside a character, or what joins words
    characters += 1
    found = grown(vocabulary, tokens[:split], tokens[split:])
    assert found.text == whole[len(prompt) :]
    assert found.tokens == tokens[split:]
    if found.text.startswith(' '):  # after a text that only the carry knows, between words
      assert grown(vocabulary, (), tokens[split:]).text == found.text
  assert characters > 20


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(drawn=strategies.lists(strategies.integers(0, 10**6), min_size=2, max_size=60),
                  split=strategies.integers(1, 59))  # fmt: skip
def test_any_tokens_decode_piece_by_piece(vocabulary, drawn, split):
  """Spaces too, any number of them; bytes that are no character are left to the other test."""
  known = [
    token
    for token in range(4, vocabulary.size)  # without the special ones
    if '\N{REPLACEMENT CHARACTER}' not in vocabulary.decode([token])
  ]
  tokens = vocabulary.encode('a') + [known[number % len(known)] for number in drawn]
  whole, prompt = vocabulary.decode(tokens), vocabulary.decode(tokens[:split])
  if whole.startswith(prompt):
    assert grown(vocabulary, tokens[:split], tokens[split:]).text == whole[len(prompt) :]


def test_a_special_token_stops(vocabulary):
  if vocabulary.file is None:
    pytest.skip('bytes have no other special token')
  tokens = vocabulary.encode(TEXT[:30])
  stop = special_of(vocabulary.file)
  found = grown(vocabulary, tokens[:3], [*tokens[3:], stop, *tokens], '<|im_end|>')
  assert found.ended == 'stop'
  assert found.text == grown(vocabulary, tokens[:3], tokens[3:]).text
  assert grown(vocabulary, tokens[:3], [*tokens, stop, *tokens], 'x</s>').ended == 'length'


@pytest.mark.parametrize(
  ('stop', 'kept'),
  [
    ('<|im_end|>\nUser', 1),
    ('the<|im_end|>', 0),
    ('the<|im_end|>\nUser', 0),
    (('<|im_end|>\nUser', 'no'), 1),
    (('x', '<|im_end|>', '<|im_end|>\nUser'), 1),
    ('<|im_end|><|im_end|>', 2),  # the first one is followed by text
    (('<|im_end|>\nBot', 'User'), 2),
    ('<|im_end|>Users', None),
    ('<|im_end|> \nUser', None),
  ],
)
def test_a_special_token_between_texts_stops(kind_of_bytes, stop, kept):
  """The text before the stop; 1: what precedes the special token, 2: also 'newline' after it."""
  vocabulary, special = kind_of_bytes
  before, after, rest = (vocabulary.encode(text) for text in ('deep is the', '\nUser', 's of it'))
  again = [special, special] if '<|im_end|><|im_end|>' in stop else []
  found = grown(vocabulary, before[:1], [*before[1:], special, *after, *again, *rest], stop)
  expected = {0: 'deep is ', 1: 'deep is the', 2: 'deep is the\n', None: 'deep is the\nUsers of it'}
  if again:
    expected[2] = 'deep is the\nUser'
  assert found.ended == ('length' if kept is None else 'stop')
  assert vocabulary.decode(before[:1]) + found.text == expected[kept]


@pytest.fixture(scope='module')
def kind_of_bytes(tmp_path_factory):
  file = tmp_path_factory.mktemp('tokenizer') / 'tokenizer.json'
  tiny_run.write_tokenizer(file)
  import tokenizers  # noqa: PLC0415  (which `write_tokenizer` asked for)

  codec = tokenizers.Tokenizer.from_file(str(file))
  codec.add_special_tokens(['<|im_end|>', '<|im'])
  codec.save(str(file))
  return load(str(file)), codec.token_to_id('<|im_end|>')


def special_of(file: pathlib.Path) -> int:
  if file.suffix == '.json':
    tokenizers = pytest.importorskip('tokenizers', reason=tiny_run.WITHOUT_HF)
    return tokenizers.Tokenizer.from_file(str(file)).token_to_id('<|im_end|>')
  return sentencepiece.SentencePieceProcessor(model_file=str(file)).PieceToId('<|im_end|>')


def test_a_string_is_one_stop_and_an_empty_one_none():
  bytes_ = ByteVocabulary()
  tokens = bytes_.encode('a (b M (M c')
  found = grown(bytes_, (), tokens, '(M')
  assert (found.text, found.ended) == ('a (b M ', 'stop')
  assert grown(bytes_, (), tokens, ['(M']).text == found.text
  for wrong in ('', ('',), ('a', ''), (1,), [None]):
    if wrong or wrong == '':
      with pytest.raises(ConfigurationError, match='or is empty'):
        Continuation(bytes_, wrong)


def test_a_text_that_follows_another_has_the_tokens_of_the_whole(vocabulary, request):
  """Codecs put a space before a text; between two parts of one it would be a token too many."""
  kind = request.node.callspec.params['vocabulary']
  text = TEXT[: len(TEXT) // 40] + 'A: Paris'
  whole, apart = vocabulary.encode(text), 0
  for split in range(1, len(text)):
    before, after = text[:split], text[split:]
    begun = vocabulary.encode(before)
    found = [*begun, *following(vocabulary.encode, before, after)]
    if whole[: len(begun)] == begun:
      assert found == whole
    elif kind not in ('word pieces', 'suffixes'):  # whose words cannot go on
      apart += 1
      assert vocabulary.decode(found) == vocabulary.decode(whole)
  assert apart or kind in ('bytes', 'word pieces', 'suffixes')
  if kind not in ('word pieces', 'suffixes'):
    unknown = [*vocabulary.encode('one'), *following(vocabulary.encode, ANY_TEXT, ' of two')]
    assert vocabulary.decode(unknown) == vocabulary.decode(vocabulary.encode('one of two'))
