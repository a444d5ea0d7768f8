"""Text to token ids and back, without TensorFlow.

`load` takes one of three specifications:

  'bytes'                     the ids of seqio's ByteVocabulary: 0 pad, 1 EOS, 2 unknown, byte + 3
  'path/to/NAME.model'        a SentencePiece model
  'path/to/tokenizer.json'    a Hugging Face tokenizer (needs the package `tokenizers`)

No id is special beyond EOS: GPT-2 has no padding, and its id 0 is the ordinary token '!'.
"""

from collections.abc import Iterable
import hashlib
import json
import pathlib
from typing import Protocol

from valkyrie.errors import ConfigurationError

# Where tokenizer_config.json does not say which token closes a document, the names in use.
_EOS_NAMES = ('<|endoftext|>', '</s>', '<eos>', '<|end_of_text|>', '<|eot_id|>', '<|im_end|>')


class Vocabulary(Protocol):
  """A codec. Ids are in [0, size); `encode` adds no EOS; `fingerprint` tells codecs apart."""

  size: int
  eos_id: int
  fingerprint: str

  def encode(self, text: str) -> list[int]: ...

  def decode(self, ids: Iterable[int]) -> str: ...


class ByteVocabulary:
  """UTF-8 bytes, shifted by the three special ids. Source: ByT5, https://arxiv.org/abs/2105.13626"""

  size = 259
  eos_id = 1
  fingerprint = 'bytes'
  _specials = 3

  def encode(self, text: str) -> list[int]:
    return [byte + self._specials for byte in text.encode('utf-8', errors='replace')]

  def decode(self, ids: Iterable[int]) -> str:
    """The text; special ids say nothing, and bytes that are no UTF-8 become U+FFFD."""
    kept = bytes(i - self._specials for i in ids if self._specials <= i < self.size)
    return kept.decode('utf-8', errors='replace')


class SentencePieceVocabulary:
  """A SentencePiece .model file."""

  def __init__(self, path: pathlib.Path):
    import sentencepiece  # noqa: PLC0415  (the byte vocabulary needs no package)

    content = _content(path)
    self._processor = sentencepiece.SentencePieceProcessor()
    try:
      self._processor.LoadFromSerializedProto(content)
    except (RuntimeError, OSError) as error:
      raise ConfigurationError(
        f'The vocabulary {path} is not a SentencePiece model ({error}). '
        'Name a .model file as spm_train writes it.'
      ) from error
    self.size = self._processor.GetPieceSize()
    self.eos_id = self._processor.eos_id()
    if self.eos_id < 0:
      raise ConfigurationError(
        f'The SentencePiece model {path} has no end-of-sentence piece, which must close each '
        'document. Train it with an eos_id.'
      )
    self.fingerprint = f'sentencepiece-{hashlib.sha256(content).hexdigest()}'

  def encode(self, text: str) -> list[int]:
    return self._processor.EncodeAsIds(text)

  def decode(self, ids: Iterable[int]) -> str:
    return self._processor.DecodeIds([int(i) for i in ids if 0 <= i < self.size])


class HuggingFaceVocabulary:
  """A Hugging Face tokenizer.json; EOS is what tokenizer_config.json beside it names, if any."""

  def __init__(self, path: pathlib.Path):
    content = _content(path)
    try:
      import tokenizers  # noqa: PLC0415  (an optional package)
    except ImportError as error:
      raise ConfigurationError(
        f'The vocabulary {path} needs the package tokenizers, which is not installed: '
        "pip install tokenizers, or use vocabulary = 'bytes'."
      ) from error
    try:
      self._tokenizer = tokenizers.Tokenizer.from_str(content.decode('utf-8'))
    except Exception as error:  # tokenizers raises bare Exception
      raise ConfigurationError(
        f'The vocabulary {path} is not a Hugging Face tokenizer.json ({error}).'
      ) from error
    # The text of a document must not be able to write an EOS into the stream.
    self._tokenizer.encode_special_tokens = True
    ids = self._tokenizer.get_vocab(with_added_tokens=True)
    self.size = max(ids.values()) + 1
    self.eos_id = ids[_eos_name(path, ids)]
    self.fingerprint = f'huggingface-{hashlib.sha256(content).hexdigest()}'

  def encode(self, text: str) -> list[int]:
    return self._tokenizer.encode(text, add_special_tokens=False).ids

  def decode(self, ids: Iterable[int]) -> str:
    return self._tokenizer.decode([int(i) for i in ids if 0 <= i < self.size])


def load(specification: str) -> Vocabulary:
  """The codec that `specification` names (see the module's head).

  Raises:
    ConfigurationError: no such form, or the file is missing or not what its name says.
  """
  if specification == 'bytes':
    return ByteVocabulary()
  path = pathlib.Path(specification).expanduser()
  if path.suffix == '.model':
    return SentencePieceVocabulary(path)
  if path.suffix == '.json':
    return HuggingFaceVocabulary(path)
  raise ConfigurationError(
    f"Unknown vocabulary {specification!r}: expected 'bytes', the path of a SentencePiece "
    '.model file, or the path of a Hugging Face tokenizer.json.'
  )


def _content(path: pathlib.Path) -> bytes:
  try:
    content = path.read_bytes()
  except OSError as error:
    raise ConfigurationError(
      f'The vocabulary file {path} cannot be read ({error.strerror}).'
    ) from error
  if not content:
    raise ConfigurationError(f'The vocabulary file {path} is empty.')
  return content


def _eos_name(path: pathlib.Path, ids: dict[str, int]) -> str:
  names = list(_EOS_NAMES)
  beside = path.with_name('tokenizer_config.json')
  if beside.is_file():
    try:
      named = json.loads(beside.read_text()).get('eos_token')
    except (ValueError, AttributeError) as error:
      raise ConfigurationError(f'{beside} is not a tokenizer configuration ({error}).') from error
    if named is not None:
      names = [named['content'] if isinstance(named, dict) else named]
  found = [name for name in names if name in ids]
  if not found:
    raise ConfigurationError(
      f'The vocabulary {path} has none of {", ".join(names)} to close a document with. '
      f'Name its end-of-text token as "eos_token" in {beside}.'
    )
  return found[0]
