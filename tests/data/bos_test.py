"""The BOS before each document of a store and each text, as the tokenizer's own library has it."""

import json

import numpy as np
import pytest
import sentencepiece
import tiny
import tiny_run

from valkyrie.data import build_store, store_writer, vocabularies
from valkyrie.data.feed import TaskFeed
from valkyrie.data.selection import Selection
from valkyrie.data.token_store import TokenStore
from valkyrie.errors import ConfigurationError
from valkyrie.inference.loaded import LoadedModel

TEXT = 'deep is the sea'
NO, YES = {'add_bos_token': False}, {'add_bos_token': True, 'bos_token': {'content': '<s>'}}
LLAMA = {'tokenizer_class': 'LlamaTokenizerFast'}


def _template(single):
  names = ('<s>', '<x>', '<|endoftext|>')
  return lambda t, ids: t.processors.TemplateProcessing(
    single=single, special_tokens=[(name, ids[name]) for name in names]
  )


def _as_llama_3(t, ids):
  byte_level = t.processors.ByteLevel(trim_offsets=True)
  return t.processors.Sequence([byte_level, _template('<s> $A')(t, ids)])


def _as_roberta(t, ids):
  pairs = (('<|endoftext|>', ids['<|endoftext|>']), ('<s>', ids['<s>']))
  return t.processors.RobertaProcessing(*pairs)


# {name: (post-processor of a tokenizer.json, None for SentencePiece; tokenizer_config.json; BOS)}
KINDS = {
  'no processor': (lambda t, ids: None, {}, []),
  'GPT-2': (lambda t, ids: t.processors.ByteLevel(), {}, []),
  'Llama 2': (_template('<s> $A'), {}, ['<s>']),
  'Llama 3': (_as_llama_3, {'tokenizer_class': 'PreTrainedTokenizerFast'}, ['<s>']),
  'OPT': (_template('<|endoftext|> $A'), {}, ['<|endoftext|>']),
  'BERT': (_template('<s> $A <|endoftext|>'), {'add_bos_token': None}, ['<s>']),
  'RoBERTa': (_as_roberta, {}, ['<s>']),
  'T5': (_template('$A <|endoftext|>'), {}, []),
  'two': (_template('<s> <x> $A'), {}, ['<s>', '<x>']),
  'said so': (lambda t, ids: None, YES, ['<s>']),
  'said not': (_template('<s> $A'), NO, []),
  'SentencePiece': (None, {}, []),
  'SentencePiece of Llama': (None, LLAMA, ['<s>']),
  'SentencePiece of Gemma': (
    None,
    {'tokenizer_class': 'GemmaTokenizer', 'add_bos_token': None},
    ['<s>'],
  ),
  'SentencePiece said so': (None, YES, ['<s>']),
  'SentencePiece said not': (None, NO | LLAMA, []),
}


def _write(folder, process, config):
  """Writes a vocabulary -> its path, ids by name, and (its library's own encoding, BOS -> ids)."""
  (folder / 'tokenizer_config.json').write_text(json.dumps(config))
  if process is None:
    (folder / 'text').write_text(tiny_run.TEXT)
    sentencepiece.SentencePieceTrainer.train(
      input=str(folder / 'text'), model_prefix=str(folder / 'm'), vocab_size=24, minloglevel=2
    )
    codec = sentencepiece.SentencePieceProcessor(model_file=str(folder / 'm.model'))
    return folder / 'm.model', codec.PieceToId, lambda text, bos: codec.Encode(text, add_bos=bos)
  path = folder / 'tokenizer.json'
  tiny_run.write_tokenizer(path)
  import tokenizers  # noqa: PLC0415  (which `write_tokenizer` asked for)

  codec = tokenizers.Tokenizer.from_file(str(path))
  codec.add_special_tokens(['<s>', '<x>'])
  if (processor := process(tokenizers, codec.get_vocab())) is not None:
    codec.post_processor = processor
  codec.save(str(path))
  eos, begin = codec.token_to_id('<|endoftext|>'), codec.token_to_id('<s>')

  def encode(text, bos):
    framed = codec.encode(text, add_special_tokens=config.get('add_bos_token') is None).ids
    framed = framed[:-1] if framed[-1] == eos else framed  # which the store adds
    return [begin] * bool(config.get('add_bos_token')) + framed

  return path, codec.token_to_id, encode


@pytest.mark.parametrize('name', KINDS)
def test_documents_begin_as_the_tokenizer_has_them(tmp_path, name):
  process, config, names = KINDS[name]
  path, ids, encode = _write(tmp_path, process, config)
  codec = vocabularies.load(str(path))
  assert codec.bos == tuple(map(ids, names))
  texts = [TEXT, 'the sea', 'a', TEXT * 9]
  expected = [encode(text, bool(names)) for text in texts]
  assert [codec.begun(text).tolist() for text in texts] == expected
  assert codec.decode(expected[0]) == codec.decode(codec.encode(TEXT)) == TEXT

  (tmp_path / 'd').mkdir()
  lines = [json.dumps({'text': text}) for text in texts]
  (tmp_path / 'd' / 'a.jsonl').write_text('\n'.join([*lines, '{"text": ""}']))
  flags = {'task': 'text', 'source': tmp_path / 'd', 'vocabulary': path, 'data_dir': tmp_path}
  options = [f'--{flag}={value}' for flag, value in flags.items()]
  assert build_store.main([*options, '--option=held_out=0.0000001', '--shards=1']) == 0
  (folder,) = tmp_path.glob('text-train-*')
  store = TokenStore.open(folder, codec)
  kept = [one for one in expected if len(one) > len(names) + 1]  # of two tokens or more
  found = [
    store.read(np.array([n]), np.zeros(1, int), store.lengths[[n]]) for n in range(len(kept))
  ]
  assert [one.tolist() for one in found] == [[*one, codec.eos_id] for one in kept]
  text_bytes = store.information['text_bytes']
  assert store.tokens_per_byte * text_bytes == pytest.approx(
    sum(len(one) + 1 - len(names) for one in kept)
  )

  feed = TaskFeed(
    'text', 'train', 1, 0, vocabulary=str(path), shuffle=False, data_dir=str(tmp_path),
    source=str(tmp_path / 'd'), options={'held_out': '0.0000001'},
  )  # fmt: skip
  length = len(kept[0]) + 1
  batch = feed.read(0, length)
  assert batch.inputs[0].tolist() == [*kept[0], codec.eos_id]
  # The BOS is context: nothing predicts it, it predicts the first token of the text.
  assert batch.weights[0].tolist() == [1] * (length - 1) + [0]
  assert batch.positions[0].tolist() == [*range(length)]


def test_prompts_lie_behind_the_bos(tmp_path):
  path, *_ = _write(tmp_path, *KINDS['Llama 2'][:2])
  codec = vocabularies.load(str(path))
  prompt, answer = codec.ids('the sea'), codec.ids(' is deep')
  document = store_writer.Document(np.concatenate([prompt, answer]), 15, None, len(prompt))
  selection = Selection('own', 'train', codec)
  folder = tmp_path / selection.name
  store_writer.StoreWriter(folder, selection, {}, shards=1).write(lambda shard: [document])
  store = TokenStore.open(folder, codec)
  assert store.lengths.tolist() == [len(prompt) + len(answer) + 2]
  assert store.prompts.tolist() == [1 + len(prompt)]


def test_a_store_without_bos_is_another_store(tmp_path):
  path, *_ = _write(tmp_path, KINDS['Llama 2'][0], NO)
  without = vocabularies.load(str(path))
  document = store_writer.Document(without.ids(TEXT), len(TEXT))
  before = Selection('own', 'train', without)
  store_writer.StoreWriter(tmp_path / 's', before, {}, shards=1).write(lambda shard: [document])
  (tmp_path / 'tokenizer_config.json').unlink()
  codec = vocabularies.load(str(path))
  after = Selection('own', 'train', codec)
  assert after.name != before.name
  with pytest.raises(ConfigurationError, match=r'was built with .*asks for .*\+'):
    TokenStore.open(tmp_path / 's', codec)
  (tmp_path / 's' / 'store.json').unlink()  # an unfinished store
  with pytest.raises(ConfigurationError, match='built with another vocabulary'):
    store_writer.StoreWriter(tmp_path / 's', after, {}, shards=1).write(lambda shard: [document])


@pytest.mark.parametrize('name', ['Llama 2', 'two', 'GPT-2', 'SentencePiece of Llama'])
def test_a_model_reads_texts_after_the_bos(tmp_path, name):
  process, config, names = KINDS[name]
  path, _, encode = _write(tmp_path, process, config)
  codec = vocabularies.load(str(path))
  model = tiny.model((tiny.s5,), vocabulary_size=codec.size)
  params, _ = tiny.init(model, 1)
  place = {'model_dir': '', 'steps': (1,), 'chunk_size': 16}
  run = LoadedModel(model, params, codec, **place)
  expected = np.array(encode(TEXT, bool(names)), np.int32)
  (by_text,), (by_ids,) = run.score(TEXT), run.score(expected)
  assert by_text.tokens.tolist() == expected.tolist()
  np.testing.assert_array_equal(by_text.log_probs, by_ids.log_probs)
  assert len(run.logits(TEXT)) == len(expected)
  made, again = run.generate(TEXT, max_tokens=3), run.generate(expected, max_tokens=3)
  assert made == again
  nothing = np.array(codec.bos or codec.encode('\n'), np.int32)
  assert run.generate(max_tokens=3) == run.generate(nothing, max_tokens=3)
  carry = run.read(TEXT)
  assert carry.position.tolist() == [len(expected)]
  assert run.read(' is', carry).position.tolist() == [len(expected) + len(codec.ids(' is'))]


@pytest.mark.parametrize('config', [
  {'add_bos_token': True}, {'add_bos_token': True, 'bos_token': '<nowhere>'},
  {'add_bos_token': 'true'}, {'add_bos_token': 1}, {'add_bos_token': True, 'bos_token': [3]}, [],
])  # fmt: skip
def test_a_bos_that_is_not_there_is_refused(tmp_path, config):
  path, *_ = _write(tmp_path, KINDS['GPT-2'][0], {})
  (tmp_path / 'tokenizer_config.json').write_text(json.dumps(config))
  with pytest.raises(ConfigurationError, match=r'tokenizer_config\.json'):
    vocabularies.load(str(path))


@pytest.mark.parametrize(('inputs', 'targets'), [([7], [8, 9]), ([], [7, 8, 9])])
@pytest.mark.parametrize('begun', [[], [0, 2]])
def test_a_bos_that_a_task_of_seqio_adds_is_not_doubled(inputs, targets, begun):
  from valkyrie.data import seqio_tasks  # noqa: PLC0415, TensorFlow

  class Codec(vocabularies.ByteVocabulary):
    bos = (0, 2)

  example = {'inputs': np.array(begun + inputs), 'targets': np.array([*targets, 1])}
  if not inputs:
    example = {'targets': np.array([*begun, *targets, 1])}
  found = seqio_tasks._document(example, bool(inputs), Codec())
  assert found.tokens.tolist() == [7, 8, 9]
  assert found.prompt_tokens == len(inputs)


def test_a_tokenizer_without_a_token_for_unknown_text_has_no_bos(tmp_path):
  tokenizers = pytest.importorskip('tokenizers', reason=tiny_run.WITHOUT_HF)
  codec = tokenizers.Tokenizer(tokenizers.models.WordLevel({'</s>': 0, 'b': 1}))
  codec.save(str(tmp_path / 'w.json'))
  assert vocabularies.load(str(tmp_path / 'w.json')).bos == ()
