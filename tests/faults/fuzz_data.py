"""Altered files on the side of data: texts, stores, tokenizers, chat templates, prompts."""

from collections.abc import Callable, Iterator
import gzip
import hashlib
import json
import pathlib

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet

from faults import fuzz
from faults.fuzz import Kind
from faults.harness import BYTES, Harness
from faults.table import Trial, fault
from valkyrie.data import (
  chat_template,
  feed,
  provenance,
  store_builder,
  template_files,
  token_store,
  train_vocabulary,
  vocabularies,
)
from valkyrie.data.records import Records
from valkyrie.data.selection import Selection
from valkyrie.data.token_store import TokenStore
from valkyrie.errors import DataError
from valkyrie.inference import infer

TEXTS = [f'The text number {number} of some words, é and 漢字.' for number in range(40)]
ROWS = [{'text': text, 'id': number} for number, text in enumerate(TEXTS)]
TALK = [{'role': 'user', 'content': 'Hello'}, {'role': 'assistant', 'content': 'Hi!'}]
TEMPLATE = (
  '{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}'
  '{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}'
)


def _text(suffix: str, content: bytes) -> Kind:
  """A file of texts."""

  def make(folder: pathlib.Path) -> pathlib.Path:
    file = folder / f'a{suffix}'
    file.write_bytes(content)
    return file

  def read(file: pathlib.Path) -> None:
    for parts in (1, 2):
      for _ in Records(str(file), ['text']).rows(0, parts):
        pass

  return Kind(make, read)


def _lines(rows: list[dict]) -> bytes:
  return ''.join(json.dumps(row, ensure_ascii=False) + '\n' for row in rows).encode()


def _separated(separator: str) -> bytes:
  rows = [f'{row["id"]}{separator}"{row["text"]}"' for row in ROWS]
  return '\n'.join([f'id{separator}text', *rows, '']).encode()


def _table() -> pa.Table:
  texts = pa.array(TEXTS)
  columns = {'text': texts, 'id': np.arange(len(TEXTS)), 'kind': texts.dictionary_encode()}
  columns['more'] = pa.array([{'a': [1, 2], 'b': 'c'}] * len(TEXTS))
  return pa.table(columns)


def _parquet(table: pa.Table, **options) -> bytes:
  stream = pa.BufferOutputStream()
  pyarrow.parquet.write_table(table, stream, row_group_size=15, **options)
  return stream.getvalue().to_pybytes()


def _arrow(table: pa.Table, new: Callable = pyarrow.ipc.new_file, compression: str = '') -> bytes:
  stream = pa.BufferOutputStream()
  options = pyarrow.ipc.IpcWriteOptions(compression=compression or None)
  with new(stream, table.schema, options=options) as writer:
    writer.write_table(table, max_chunksize=15)
  return stream.getvalue().to_pybytes()


def _renamed(column: str) -> pa.Table:
  """The table with another of its columns as the text."""
  table = _table()
  return table.select([column]).rename_columns(['text'])


def _compressed(content: bytes, codec: str) -> bytes:
  return pa.compress(content, codec=codec, asbytes=True)


def _texts() -> dict[str, Kind]:
  zstd = pa.BufferOutputStream()
  with pa.CompressedOutputStream(zstd, 'zstd') as stream:
    stream.write(_lines(ROWS))
  contents = {
    'txt': ('.txt', '\n'.join(TEXTS).encode()),
    'md': ('.md', '\n'.join(TEXTS).encode()),
    'jsonl': ('.jsonl', _lines(ROWS)),
    'ndjson': ('.ndjson', _lines(ROWS)),
    'json': ('.json', json.dumps(ROWS).encode()),
    'csv': ('.csv', _separated(',')),
    'tsv': ('.tsv', _separated('\t')),
    'jsonl.gz': ('.jsonl.gz', gzip.compress(_lines(ROWS))),
    'txt.gz': ('.txt.gz', gzip.compress('\n'.join(TEXTS).encode())),
    'jsonl.zst': ('.jsonl.zst', zstd.getvalue().to_pybytes()),
    'parquet': ('.parquet', _parquet(_table())),
    'parquet of zstd': ('.parquet', _parquet(_table(), compression='zstd')),
    'parquet without dictionaries': ('.parquet', _parquet(_table(), use_dictionary=False)),
    'parquet.gz': ('.parquet.gz', gzip.compress(_parquet(_table()))),
    'arrow': ('.arrow', _arrow(_table())),
    'arrow stream': ('.arrow', _arrow(_table(), pyarrow.ipc.new_stream)),
    'arrow of zstd': ('.arrow', _arrow(_table(), compression='zstd')),
    'arrow of lz4': ('.arrow', _arrow(_table(), compression='lz4')),
    'arrow with dictionaries': ('.arrow', _arrow(_renamed('kind'))),
  }
  return {name: _text(*content) for name, content in contents.items()}


def _build(folder: pathlib.Path) -> pathlib.Path:
  """A store with prompts and without duplicates."""
  (folder / 'text.jsonl').write_bytes(
    _lines([{'prompt': text[:9], 'answer': text[9:]} for text in [*TEXTS, *TEXTS[:3]]])
  )
  selection = Selection('prompts', 'train', BYTES, str(folder / 'text.jsonl'), unique=True)
  store_builder.build(selection, folder / 'store', shards=2)
  return folder / 'store'


def _read_store(store: pathlib.Path) -> tuple[list, np.ndarray]:
  """(all that a store has, which of its documents are damaged)."""
  opened = TokenStore.open(store, BYTES)
  provenance.check(store, opened.information, 'build it again.', [])
  documents = np.arange(len(opened.lengths))
  damaged = opened.damaged(documents)
  tokens = opened.read(documents, np.zeros_like(documents), opened.lengths)
  places = opened.places(documents)
  read = feed.TaskFeed('prompts', 'train', 2, 0, reset_at='sequence', bad_documents=10**6)
  read.__dict__['store'] = opened
  read.read(0, 512)
  fields = (opened.lengths, opened.sequence_keys, opened.prompts, opened.later_prompts)
  arrays = [array.tolist() for array in (tokens, places, *fields)]
  return [*arrays, opened.tokens_per_byte], damaged


def _read_intact(store: pathlib.Path) -> list:
  """All that a store has; refuses damaged documents, as a run does."""
  read, damaged = _read_store(store)
  if damaged.any():
    raise DataError('documents are damaged')
  return read


def _of_store(name: str, *, sealed: bool) -> Kind:
  """A file of a store; `sealed` alterations have their hashes in store.json."""

  def seal(file: pathlib.Path) -> None:
    store = file.parents[len(pathlib.PurePath(name).parents) - 1]
    record = store / token_store.STORE_FILE
    information = json.loads(record.read_text())
    information.pop('sha256', None)
    if file != record:
      content = file.read_bytes()
      found = {'bytes': len(content), 'sha256': hashlib.sha256(content).hexdigest()}
      token_store.recorded_files(information)[name] |= found
    information['sha256'] = token_store.content_hash(information)
    record.write_text(json.dumps(information))

  def read(file: pathlib.Path) -> object:
    store = file.parents[len(pathlib.PurePath(name).parents) - 1]
    return _read_store(store) if sealed else _read_intact(store)

  make = Kind(lambda folder: _build(folder) / name, read)
  return make._replace(seal=seal) if sealed else make._replace(is_hashed=True)


def _built_further(store: pathlib.Path) -> list:
  """Goes on with a build that was stopped, and reads the store."""
  selection = Selection('prompts', 'train', BYTES, str(store.parent / 'text.jsonl'), unique=True)
  store_builder.build(selection, store, shards=2)
  return _read_intact(store)


def _shard(file: pathlib.Path) -> list:
  store = file.parents[1]
  (store / token_store.STORE_FILE).unlink()
  return _built_further(store)


def _source_record(folder: pathlib.Path) -> pathlib.Path:
  store = _build(folder)
  information = json.loads((store / token_store.STORE_FILE).read_text())
  (store / token_store.STORE_FILE).unlink()
  file = store / '.source.jsonl'
  file.write_text(''.join(json.dumps([*f, 0]) + '\n' for f in information['origin']['files']))
  return file


def _stores() -> dict[str, Kind]:
  shard = 'shard-00000-of-00002'
  arrays = ('tokens', 'offsets', 'hashes', 'keys', 'prompts')
  names = [token_store.STORE_FILE, token_store.DUPLICATES_FILE]
  names += [f'{shard}/{array}.npy' for array in arrays]
  kinds = {f'sealed {name.split("/")[-1]}': _of_store(name, sealed=True) for name in names}
  kinds |= {name.split('/')[-1]: _of_store(name, sealed=False) for name in names}
  kinds['shard.json'] = Kind(
    lambda folder: _build(folder) / shard / 'shard.json', _shard, is_hashed=True
  )
  kinds['.source.jsonl'] = Kind(
    _source_record, lambda file: _built_further(file.parent), is_hashed=True
  )
  return kinds


def _tokenizer(folder: pathlib.Path, template: str | list = TEMPLATE) -> pathlib.Path:
  """A tokenizer.json of byte pairs, with what tokenizers of the wild have."""
  import tokenizers  # noqa: PLC0415  (an optional package)
  from tokenizers import (  # noqa: PLC0415
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
  )

  codec = tokenizers.Tokenizer(models.BPE(byte_fallback=True))
  codec.normalizer = normalizers.Sequence(
    [normalizers.NFC(), normalizers.Replace('  ', ' '), normalizers.Prepend(' ')]
  )
  codec.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Split(tokenizers.Regex(r'\s?\p{L}+|\d+'), 'isolated'),
      pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
  )
  codec.decoder = decoders.ByteLevel()
  special = ['<eos>', '<bos>', '<|im_start|>', '<|im_end|>']
  codec.train_from_iterator(
    TEXTS, trainers.BpeTrainer(vocab_size=330, special_tokens=special, show_progress=False)
  )
  codec.post_processor = processors.TemplateProcessing(
    single='<bos> $A', special_tokens=[('<bos>', 1)]
  )
  file = folder / 'tokenizer.json'
  codec.save(str(file))
  config = {'eos_token': '<eos>', 'bos_token': '<bos>', 'chat_template': template}
  config |= {'add_bos_token': True, 'tokenizer_class': 'LlamaTokenizer'}
  (folder / 'tokenizer_config.json').write_text(json.dumps(config))
  return file


def _use(specification: str, chat: bool = False) -> None:
  """Encodes and decodes by a vocabulary."""
  codec = vocabularies.load(specification)
  for text in ['', *TEXTS[:3], 'é' * 300, '<eos> a <bos>']:
    codec.decode(codec.begun(text).tolist())
  codec.decode(range(0, codec.size, max(1, codec.size // 100)))
  _ = codec.specials
  if chat:
    template = chat_template.ChatTemplate(codec)
    template.prompt([TALK[0]], 'messages')
    template.render(TALK, 'messages', asks=False)
    template.stops('')


def _pieces(folder: pathlib.Path) -> pathlib.Path:
  file = folder / 'a.model'
  file.write_bytes(train_vocabulary.trained(TEXTS * 20, 300))
  (folder / 'tokenizer_config.json').write_text('{"add_bos_token": false}')
  return file


def _template(folder: pathlib.Path) -> pathlib.Path:
  _tokenizer(folder)
  file = folder / template_files.TEMPLATE
  file.write_text(TEMPLATE)
  return file


def _named_templates(folder: pathlib.Path) -> pathlib.Path:
  templates = [{'name': 'default', 'template': TEMPLATE}, {'name': 'rag', 'template': TEMPLATE}]
  return _tokenizer(folder, templates).with_name('tokenizer_config.json')


def _named(name: str, content: bytes) -> Callable[[pathlib.Path], pathlib.Path]:
  def make(folder: pathlib.Path) -> pathlib.Path:
    (folder / name).write_bytes(content)
    return folder / name

  return make


def _tokenizers() -> dict[str, Kind]:
  return {
    'tokenizer.json': Kind(_tokenizer, lambda file: _use(str(file), chat=True)),
    'tokenizer_config.json': Kind(
      lambda folder: _tokenizer(folder).with_name('tokenizer_config.json'),
      lambda file: _use(str(file.with_name('tokenizer.json')), chat=True),
    ),
    'tokenizer_config.json with named templates': Kind(
      _named_templates,
      lambda file: _use(str(file.with_name('tokenizer.json')), chat=True),
    ),
    'chat_template.jinja': Kind(
      _template, lambda file: _use(str(file.with_name('tokenizer.json')), chat=True)
    ),
    'model': Kind(_pieces, lambda file: _use(str(file))),
    'prompts.jsonl': Kind(
      _named('a.jsonl', _lines([{'prompt': text} for text in TEXTS])), infer._read_prompts
    ),
    'prompts.txt': Kind(_named('a.txt', '\n'.join(TEXTS).encode()), infer._read_prompts),
    'messages.jsonl': Kind(
      _named('a.jsonl', _lines([{'messages': TALK}] * 9)),
      lambda file: infer._read_conversations(str(file)),
    ),
  }


KINDS = {**_texts(), **_stores(), **_tokenizers()}


@fault(
  'an altered file of texts, a store, a tokenizer or prompts, or a pipe or device in its place',
  'is read, or refused in one sentence, within 20 seconds and 2 GiB',
  full=300,
)
def fuzzed_data(harness: Harness, times: int) -> Iterator[Trial]:
  yield from fuzz.trials('faults.fuzz_data', KINDS, 0, times)
