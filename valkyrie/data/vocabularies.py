"""Vocabularies: text to token ids and back, without TensorFlow.

`load` takes one of three specifications:

  'bytes'                     the ids of seqio's ByteVocabulary: 0 pad, 1 EOS, 2 unknown, byte + 3
  'path/to/NAME.model'        a SentencePiece model
  'path/to/tokenizer.json'    a Hugging Face tokenizer (needs the package `tokenizers`)

Only EOS and the BOS of a tokenizer are special: GPT-2 has no padding, and its id 0 is the ordinary
token '!'. Encoding never produces EOS. Truncation, padding and dropout of the file are ignored.
"""

from collections.abc import Callable, Iterable
import contextlib
import functools
import hashlib
import logging
import pathlib
import re
from typing import Any, Protocol

import gin
import numpy as np

from valkyrie import foreign, packages
from valkyrie.config.computation import may_change_on_resume
from valkyrie.data import tokenizer_config, tokenizer_file
from valkyrie.errors import (
  ConfigurationError,
  DataError,
  converted,
  raise_outage,
  reason_of,
  with_home,
)

_CONTEXT = 64  # characters that decide how the text after them begins
ANY_TEXT = '#'  # stand-in for preceding text that is unknown
# The tokenizers of transformers that begin a text with BOS, unless their configuration says no.
_WITH_BOS = re.compile('(Code)?(Llama|Gemma)Tokenizer(Fast)?')


class Vocabulary(Protocol):
  """A codec: text to ids in [0, size) and back. `encode` does not add an EOS.

  file: the file of the codec; None for bytes.
  bos: the ids before each document, usually one or none; the fingerprint names them.
  specials: {name: id} of the tokens that no text has.
  ids: `encode` as an int32 array [tokens].
  """

  size: int
  eos_id: int
  fingerprint: str
  file: pathlib.Path | None
  bos: tuple[int, ...] = ()

  def encode(self, text: str) -> list[int]: ...

  def ids(self, text: str) -> np.ndarray:
    return np.asarray(self.encode(text), np.int32)

  def begun(self, text: str) -> np.ndarray:
    """The ids of a text that begins a document, with its BOS."""
    bos = np.asarray(self.bos, np.int32)
    return np.concatenate([bos, self.ids(text)])

  def decode(self, ids: Iterable[int]) -> str: ...

  @functools.cached_property
  def specials(self) -> dict[str, int]:
    return {}


class ByteVocabulary(Vocabulary):
  """UTF-8 bytes, shifted by the three special ids: ByT5, https://arxiv.org/abs/2105.13626."""

  size = 259
  eos_id = 1
  fingerprint = 'bytes'
  file: pathlib.Path | None = None
  _first = 3

  def encode(self, text: str) -> list[int]:
    return self.ids(text).tolist()

  def ids(self, text: str) -> np.ndarray:
    content = np.frombuffer(as_utf8(text, 'A text'), np.uint8)
    return content.astype(np.int32) + self._first

  def decode(self, ids: Iterable[int]) -> str:
    """The text, without special ids, and with U+FFFD for bytes that are not UTF-8."""
    values = [number - self._first for number in ids if self._first <= number < self.size]
    content = bytes(values)
    return content.decode('utf-8', errors='replace')


class FileVocabulary(Vocabulary):
  """A tokenizer file. Encoding never produces EOS."""

  _eos: str  # the EOS as the file spells it

  def __reduce__(self) -> Any:  # a tokenizer that is pickled forgets settings
    return load, (str(self.file),)

  def encode(self, text: str) -> list[int]:
    """The ids of a text; an EOS that is spelled out in it becomes two pieces of ordinary text.

    Raises a DataError if the text is not Unicode, or if its EOS cannot be divided.
    """
    as_utf8(text, 'A text')
    ids = self._pieces(text)
    if self.eos_id in ids:
      first = re.escape(self._eos[:1])
      rest = re.escape(self._eos[1:])
      pieces = re.split(f'(?<={first})(?={rest})', text)
      ids = self._pieces(pieces[0])
      for piece in pieces[1:]:
        ids += following(self._pieces, ANY_TEXT, piece)
    if self.eos_id in ids:
      raise DataError(
        f'A text contains what {self.file} encodes as its EOS, {self._eos!r}, which ends '
        'documents. Remove it from the text, or name another "eos_token" in tokenizer_config.json.'
      )
    return ids

  def decode(self, ids: Iterable[int]) -> str:
    """The text of ids; those outside the vocabulary are left out."""
    with self._damage('decode ids'):
      known = [int(number) for number in ids if 0 <= number < self.size]
      return self._decode(known)

  def _pieces(self, text: str) -> list[int]:
    with self._damage('encode a text'):
      return self._encode(text)

  def _damage(self, work: str) -> contextlib.AbstractContextManager[None]:
    """Converts what the codec raises; some damage shows only when it is used."""
    failure = f'The vocabulary {self.file} cannot {work}'
    return tokenizer_file.refused(failure, DataError, 'Copy it again.')

  def _encode(self, text: str) -> list[int]: ...

  def _decode(self, ids: list[int]) -> str: ...


class SentencePieceVocabulary(FileVocabulary):
  """A SentencePiece .model file."""

  def __init__(self, path: pathlib.Path, content: bytes):
    import sentencepiece  # noqa: PLC0415  (the byte vocabulary needs no package)

    self._processor = sentencepiece.SentencePieceProcessor()
    message = f'The vocabulary {path} is not a SentencePiece model'
    advice = 'Use a .model file that spm_train wrote.'
    with tokenizer_file.refused(message, ConfigurationError, advice):
      self._processor.LoadFromSerializedProto(content)
    self.size = self._processor.GetPieceSize()
    _check_size(path, self.size)
    self.eos_id = self._processor.eos_id()
    if self.eos_id < 0:
      raise ConfigurationError(
        f'The SentencePiece model {path} has no end-of-sentence piece, which each document needs '
        'as its last token. Train it with an eos_id.'
      )
    self._eos = self._processor.IdToPiece(self.eos_id)
    config = tokenizer_config.read_config(path)
    tokenizer_class = str(config.get('tokenizer_class'))
    usual = _WITH_BOS.fullmatch(tokenizer_class)
    if config.get('add_bos_token', usual):
      bos = tokenizer_config.bos_id(path, self._processor.bos_id())
      self.bos = (bos,)

  def _encode(self, text: str) -> list[int]:
    return self._processor.EncodeAsIds(text)

  def _decode(self, ids: list[int]) -> str:
    return self._processor.DecodeIds(ids)

  @functools.cached_property
  def specials(self) -> dict[str, int]:
    ids = filter(self._processor.IsControl, range(self.size))
    return {self._processor.IdToPiece(number): number for number in ids}


class HuggingFaceVocabulary(FileVocabulary):
  """A Hugging Face tokenizer.json; the tokenizer_config.json beside it may name the EOS."""

  def __init__(self, path: pathlib.Path, content: bytes):
    message = f'The vocabulary {path} needs the package tokenizers, which is not installed'
    install = packages.install('tokenizers')
    advice = f"Use vocabulary = 'bytes', or install it: {install}"
    with converted((ImportError,), ConfigurationError, message, advice):
      import tokenizers  # noqa: PLC0415  (an optional package)
    message = f'The vocabulary {path} is not a Hugging Face tokenizer.json'
    advice = 'Use a file that the save method of tokenizers wrote.'
    with tokenizer_file.refused(message, ConfigurationError, advice):
      tokenizer_file.check(content)
      self._tokenizer = tokenizers.Tokenizer.from_str(content.decode('utf-8'))
    ids = self._tokenizer.get_vocab(with_added_tokens=True)
    largest = max(ids.values(), default=-1)
    self.size = largest + 1
    _check_size(path, self.size)
    config = tokenizer_config.read_config(path)
    self._eos = tokenizer_config.eos_name(path, config, ids)
    self.eos_id = ids[self._eos]
    self._switch_off(path)
    adds_bos = config.get('add_bos_token')
    if adds_bos is None:
      self.bos = self._first_of_texts(ids)
    elif adds_bos:
      bos_name = config.get('bos_token', '')
      bos = tokenizer_config.bos_id(path, ids.get(bos_name))
      self.bos = (bos,)

  def _switch_off(self, path: pathlib.Path) -> None:
    """Switches off what cuts, pads or varies the ids of a text, or makes an EOS of it."""
    codec = self._tokenizer
    model = codec.model
    dropout = getattr(model, 'dropout', None)
    settings = {'truncation': codec.truncation, 'padding': codec.padding, 'dropout': dropout}
    codec.no_truncation()
    codec.no_padding()
    if dropout:
      model.dropout = None
    added = codec.get_added_tokens_decoder().get(self.eos_id)
    if added is not None and not added.special:
      settings['special=false of its EOS'] = True
      codec.add_special_tokens([self._eos])
    codec.encode_special_tokens = True  # as ordinary text
    ignored = [name for name, value in settings.items() if value]
    if ignored:
      _warn_once(
        f'The vocabulary {path} has {" and ".join(ignored)}, which would change texts and is '
        'ignored.'
      )

  def _first_of_texts(self, known: Iterable[str]) -> tuple[int, ...]:
    """The ids that the file puts before a text."""
    if not self._tokenizer.num_special_tokens_to_add(is_pair=False):
      return ()
    text = next(filter(self._encode, ('a', *known)), '')
    framed = self._tokenizer.encode(text)
    first: list[int] = []
    for number, is_special in zip(framed.ids, framed.special_tokens_mask, strict=True):
      if not is_special:
        break
      first.append(number)
    return tuple(first)

  def _encode(self, text: str) -> list[int]:
    return self._tokenizer.encode(text, add_special_tokens=False).ids

  def template_ids(self, text: str) -> np.ndarray:
    """As `ids`, but the names of special tokens in the text are these tokens."""
    self._tokenizer.encode_special_tokens = False
    try:
      return np.asarray(self._pieces(text), np.int32)
    finally:
      self._tokenizer.encode_special_tokens = True

  def _decode(self, ids: list[int]) -> str:
    return self._tokenizer.decode(ids)

  @functools.cached_property
  def specials(self) -> dict[str, int]:
    added = self._tokenizer.get_added_tokens_decoder()
    specials = {}
    for number, token in added.items():
      if token.special:
        specials[token.content] = number
    return specials


_warn_once = functools.cache(logging.warning)  # a run loads its vocabulary several times


def following(encode: Callable[[str], Any], before: str, text: str) -> Any:
  """The ids of a text that follows the text `before`; it may be `ANY_TEXT` if it is unknown.

  Many codecs put a space before a text. So both texts are encoded, and the ids of `before` are
  removed; where a token would span both, `text` is encoded after a sign.
  """
  if not before:
    return encode(text)
  for context in (before[-_CONTEXT:], ANY_TEXT, '\n'):
    context_ids = encode(context)
    ids = encode(context + text)
    if np.array_equal(ids[: len(context_ids)], context_ids):
      return ids[len(context_ids) :]
  return encode(text)


def as_utf8(text: str, place: str) -> bytes:
  """A text in UTF-8; raises a DataError that begins with its place if it is not Unicode."""
  try:
    return text.encode()
  except UnicodeEncodeError as error:
    begin = error.start
    before = text[max(0, begin - 20) : begin]
    raise DataError(
      f'{place} has half of a character, {text[begin]!a}, after {before!r}. '
      'Expected Unicode: write the whole character, or remove this half.'
    ) from error


_CODECS = {
  '.model': ('sentencepiece', SentencePieceVocabulary),
  '.json': ('huggingface', HuggingFaceVocabulary),
}


def fingerprint(path: pathlib.Path, content: bytes, bos: Iterable[int] = ()) -> str:
  """The fingerprint of a vocabulary file's codec, and of what begins a document: '...+1'."""
  kind, _ = _CODECS[path.suffix]
  digest = hashlib.sha256(content).hexdigest()
  parts = [f'{kind}-{digest}']
  parts += map(str, bos)
  return '+'.join(parts)


def load(specification: str) -> Vocabulary:
  """Loads a vocabulary; ConfigurationError if its file is missing or invalid."""
  if specification == 'bytes':
    return ByteVocabulary()
  path = pathlib.Path(with_home(specification))
  if path.suffix not in _CODECS:
    raise ConfigurationError(
      f"The vocabulary {specification!r} is unknown. Use 'bytes', the path of a SentencePiece "
      '.model file, or the path of a Hugging Face tokenizer.json.'
    )
  try:
    content = foreign.content(path, tokenizer_file.LARGEST)
  except (OSError, ValueError) as error:
    raise_outage(f'The vocabulary file {path} cannot be read', error)
    raise ConfigurationError(
      f'The vocabulary file {path} cannot be read ({reason_of(error)}). Check its path.'
    ) from error
  if not content:
    raise ConfigurationError(f'The vocabulary file {path} is empty. Copy or download it again.')
  _, codec = _CODECS[path.suffix]
  with tokenizer_file.refused(
    f'The vocabulary {path} is damaged', ConfigurationError, 'Copy it again.'
  ):
    vocabulary = codec(path, content)
  vocabulary.fingerprint = fingerprint(path, content, vocabulary.bos)
  vocabulary.file = path
  return vocabulary


@may_change_on_resume('vocabulary')  # a checkpoint records the tokenizer
@gin.configurable
@functools.cache  # a large tokenizer.json takes a second, and every trace of the model asks
def vocabulary_size(vocabulary: str) -> int:
  """The number of tokens of a vocabulary, for `LanguageModel.vocabulary_size` in gin files."""
  return load(vocabulary).size


def _check_size(path: pathlib.Path, size: int) -> None:
  if not 0 < size <= tokenizer_file.MOST_TOKENS:
    raise ConfigurationError(
      f'The vocabulary {path} has ids up to {size - 1:,}, expected from 1 to '
      f'{tokenizer_file.MOST_TOKENS:,} tokens. Copy or download it again.'
    )
