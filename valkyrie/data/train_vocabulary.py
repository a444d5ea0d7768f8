"""Trains the tokenizer of a run on its training split, for `--run_mode=vocabulary`."""

import collections
from collections.abc import Callable, Iterator, Sequence
import dataclasses
import io
import os
import pathlib
from typing import Annotated

import gin
import numpy as np

from valkyrie.config.paths import TOKENIZER
from valkyrie.config.ranges import Range
from valkyrie.data import document_source, store_builder, vocabularies
from valkyrie.data.document_source import TaskReader
from valkyrie.data.feed import TaskFeed
from valkyrie.data.mixture import Mixture
from valkyrie.errors import ConfigurationError, converted
from valkyrie.storage import whole_file

_BYTES = vocabularies.ByteVocabulary()
_PARTS = 16  # of a split, which are read in turns: the sample is from all of it
_SAMPLE = 2**25  # bytes of text, or a little more
_PIECE = 4096  # characters; the trainer skips longer texts


@gin.configurable
def train_vocabulary(
  feed: Callable[[], TaskFeed | Mixture],
  size: Annotated[int, Range('[260, 1048576]')],  # beyond the bytes
  model_dir: str | os.PathLike,
) -> None:
  """Writes a SentencePiece tokenizer of `size` tokens to model_dir/tokenizer.model.

  It is a byte-pair encoding (Sennrich et al. 2016) of the text that `feed` reads, or of a sample of
  32 MiB. Rare characters become bytes, so every text has ids, and they give it back, except that
  U+2581, SentencePiece's sign for a space, becomes a space.

  Raises:
    ConfigurationError: the file exists, the text is too small for the size, or there is none.
    DataError: as in a build of the store.
    StorageError: the file cannot be written.
  """
  output = pathlib.Path(model_dir, f'{TOKENIZER}.model')
  if output.exists():
    raise ConfigurationError(
      f'{output} exists. Use it by --gin.vocabulary=\'"{output}"\', or name another --model_dir.'
    )
  opened = feed()
  feeds = opened.sources.values() if isinstance(opened, Mixture) else [opened]
  selections = [dataclasses.replace(feed.selection, vocabulary=_BYTES) for feed in feeds]
  for selection in selections:
    _check_text(selection.task)
  tasks = [store_builder.open_task(selection) for selection in selections]
  texts = [*sample(tasks)]
  content = trained(texts, size)
  whole_file.write(output, content)
  vocabulary = vocabularies.load(str(output))
  sizes = [len(text.encode()) for text in texts]
  lengths = [len(vocabulary.ids(text)) for text in texts]
  text_bytes = sum(sizes)
  tokens = sum(lengths)
  ratio = text_bytes / tokens
  sources = ', '.join(map(str, selections))
  print(
    f'{output}: {size:,} tokens, trained on {text_bytes:,} bytes of {sources}, '
    f'{ratio:.2f} bytes a token. Use it by --gin.vocabulary=\'"{output}"\''
  )


def _check_text(task: str) -> None:
  """Raises a ConfigurationError if the documents of a task are not text."""
  _, name = document_source.loaded(task)
  registered = document_source.TASKS.get(name)
  if registered is not None and registered.source.other_than_text:
    raise ConfigurationError(
      f'The task {task} has {registered.source.other_than_text}, but a tokenizer is trained on '
      'text. Use a tokenizer that exists (--gin.vocabulary=\'"FILE"\'), which for token ids is the '
      'one that wrote them, or train one on a task with text, such as gin/data/text.gin.'
    )


def trained(texts: Sequence[str], size: int) -> bytes:
  """The content of a .model file of `size` tokens; a ConfigurationError if the texts do not fit."""
  import sentencepiece  # noqa: PLC0415  (the other run modes need no trainer)

  characters = collections.Counter(character for text in texts for character in text)
  more_tokens = size - _BYTES.size
  usual = characters.most_common(max(1, more_tokens // 2))
  model = io.BytesIO()
  message = f'SentencePiece cannot train {size} tokens on {characters.total():,} characters of text'
  advice = "Give another train_vocabulary.size, use more text, or vocabulary = 'bytes'."
  with converted((RuntimeError, OSError), ConfigurationError, message, advice):
    sentencepiece.SentencePieceTrainer.Train(
      sentence_iterator=iter(texts),
      model_writer=model,
      model_type='bpe',
      vocab_size=size,
      pad_id=0, eos_id=1, unk_id=2, bos_id=-1,  # as the ids of bytes
      byte_fallback=True,
      # At most half of the tokens are single characters, if those are 98% of the text, which is the
      # least that the trainer accepts. The others become bytes.
      character_coverage=max(0.98, sum(n for _, n in usual) / max(1, characters.total())),
      normalization_rule_name='identity',
      remove_extra_whitespaces=False,
      add_dummy_prefix=False,
      allow_whitespace_only_pieces=True,
      max_sentence_length=8 * _PIECE,
      minloglevel=2,
    )  # fmt: skip
  return model.getvalue()


def sample(readers: Sequence[TaskReader]) -> Iterator[str]:
  """Texts of at most _PIECE characters, from documents of all parts of the splits in turns."""
  parts = []
  for part in range(_PARTS):
    for reader in readers:
      documents = reader.documents(part, _PARTS)
      parts.append(documents)
  left = _SAMPLE
  while parts:
    for part in [*parts]:
      document = next(part, None)
      if document is None:
        parts.remove(part)
        continue
      pieces = document.tokens
      if isinstance(pieces, np.ndarray):
        pieces = [pieces]
      for ids in pieces:
        text = _BYTES.decode(ids.tolist())
        for begin in range(0, len(text), _PIECE):
          yield text[begin : begin + _PIECE]
        left -= len(ids)
        if left <= 0:
          return
