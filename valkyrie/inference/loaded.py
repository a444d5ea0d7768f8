"""A trained model in Python: texts are scored, continued and read by it."""

from collections.abc import Iterator, Mapping, Sequence
import os
import pathlib
from typing import Any, overload

import numpy as np

from valkyrie.config.ranges import NonNegativeInt, check
from valkyrie.data.chat_template import ChatTemplate, Messages
from valkyrie.data.vocabularies import Vocabulary
from valkyrie.errors import ConfigurationError, UsageError, check_choice, usable_path, with_home
from valkyrie.inference import continuing, documents, scoring
from valkyrie.inference.attribution import Attribution, Attributor
from valkyrie.inference.continuing import Generated
from valkyrie.inference.documents import AnyCarry, Document
from valkyrie.inference.generation import GREEDY, Sampling
from valkyrie.inference.reader import Reader, TextCarry, TextScore
from valkyrie.inference.text_rows import Text, TextRows
from valkyrie.models.model import Model
from valkyrie.types import Array, Params


class LoadedModel:
  """A model with its parameters.

  The texts of a call are documents, or, with the carry of an earlier call, what follows the texts
  that it has read; a carry of one row is used for all texts.

  Attributes:
    model: pure functions, such as model.apply(params, carry, inputs, positions, segment_ids).
    params: {module: {name: array}}; the moving average if the run keeps one.
    tokenizer: encode, decode, eos_id, size; bos, which begins the documents that are texts.
    model_dir, steps: the run, and the checkpoints whose mean the parameters are: usually one.
    origin: fingerprints of what carries depend on, see `carry_origin`; none if only Python knows.
    progress: a function that you may set, called before each chunk of texts and after the last one
      with the tokens read and all tokens of the longest text. First chunks wait for a compiler.
  """

  def __init__(
    self,
    model: Model,
    params: Params,
    tokenizer: Vocabulary,
    *,
    model_dir: str | os.PathLike,
    steps: tuple[int, ...],
    chunk_size: int,
    origin: Mapping[str, str] | None = None,
  ):
    """Sets the attributes; a call of the model reads at most `chunk_size` tokens of a row."""

    def apply(*args, **options):  # without the rows that pad the unembedding
      features, carry = model.apply(*args, **options)
      real = features.unembedding[: model.about.vocabulary_size]
      return features._replace(unembedding=real), carry

    self.model = model._replace(apply=apply)
    self.params = params
    self.tokenizer = tokenizer
    self.model_dir = model_dir
    self.steps = steps
    self.origin = origin
    self._reader = Reader(model, chunk_size)
    self._attributor = Attributor(self._reader)

  @property
  def text_rows(self) -> TextRows:
    """What makes rows of tokens of texts, with the reader of this model."""
    return TextRows(self.model, self.tokenizer, self._reader)  # which a user may have replaced

  progress = property(
    lambda self: self._reader.progress,
    lambda self, function: setattr(self._reader, 'progress', function),
  )

  @overload
  def read(
    self,
    texts: Text | Sequence[Text],
    carry: AnyCarry | None = None,
    *,
    cut: str | None = None,
  ) -> TextCarry: ...

  @overload
  def read(self, texts: Text, *, keep: str | Document) -> Document: ...

  def read(
    self,
    texts: Any,
    carry: Any = None,
    *,
    cut: str | None = None,
    keep: Any = None,
  ) -> Any:
    """Reads texts and returns the carry after them, with a row for each text.

    Its size does not depend on the length of the texts, unless the model has full attention.

    Args:
      texts: one, or several.
      carry: after the texts that these follow.
      cut: a part of the carry to reset before every chunk: 'state', of recurrences, or 'all'.
      keep: for one text from its start, 'log' keeps about log2 of the carries on the way, so that
        one can read on from any place. A `Document` that was read so, such as the text before a
        change in its middle, does the same, and only what follows the nearest carry that both share
        is read. The result is the same, bit for bit.
    """
    rows = self.text_rows.tokens(texts, carry)
    if keep is None:
      begun = self.text_rows.begun(carry, len(rows))
      return self._reader.read(self.params, begun, rows, cut)
    like = None
    if isinstance(keep, Document):
      like = keep
    else:
      check_choice('keep', keep, ('log',))
    if carry is not None or cut is not None or len(rows) != 1:
      raise UsageError(
        'read(..., keep) reads one text from its start. Leave out carry and cut, and pass one text.'
      )
    if like is not None:
      documents.check(like, self._reader)
    (tokens,) = rows
    return documents.read_document(self._reader, self.params, tokens, like)

  def rows(self, carry: AnyCarry, numbers: Sequence[int]) -> TextCarry:
    """The rows of a carry with these numbers, in this order; a number may be repeated.

    Raises an IndexError if the carry has no such row.
    """
    return self.text_rows.chosen(carry, numbers)

  def save_carry(self, path: str | os.PathLike, carry: AnyCarry) -> None:
    """Writes a carry or a document to a new safetensors file.

    Raises:
      UsageError: `origin` is None, so that nobody could tell which models the carry fits.
      StorageError: the file exists or cannot be written.
    """
    file = pathlib.Path(usable_path('The file of a carry', os.fspath(path)))
    documents.save(file, carry, self._known_origin())

  def load_carry(self, path: str | os.PathLike) -> AnyCarry:
    """Reads a carry or a document that was saved by this step of this run.

    Raises:
      UsageError: `origin` is None.
      ConfigurationError: another model or step saved it.
      StorageError: the file is missing or damaged.
    """
    file = pathlib.Path(with_home(os.fspath(path)))
    return documents.load(file, self._reader, self._known_origin())

  def _known_origin(self) -> Mapping[str, str]:
    if self.origin is None:
      raise UsageError(
        'Files of carries need a model whose weights have a fingerprint. Open a run with '
        'valkyrie.load, or pass LoadedModel an origin.'
      )
    return self.origin

  def score(
    self,
    texts: Text | Sequence[Text],
    carry: AnyCarry | None = None,
    *,
    params: Params | None = None,
    batch_size: int = 8,
  ) -> list[TextScore]:
    """The log-probabilities of all tokens of each text; `batch_size` texts are read at once.

    `params` are other parameters of the same model.

    Raises:
      Diverged: a number is not finite, as with weights that are NaN.
      ConfigurationError: a text is longer than the model can read, or has unknown tokens; the carry
        has another number of rows; or a number is out of range.
    """
    return scoring.of_each(
      *(self.text_rows, self._reader.score, self._params_or(params), texts, carry, batch_size)
    )

  def embed(
    self,
    texts: Text | Sequence[Text],
    carry: AnyCarry | None = None,
    *,
    batch_size: int = 8,
  ) -> np.ndarray:
    """A vector for each of N texts, float32 [N, D]: the mean of its tokens' features.

    Features are what the unembedding reads. Errors: see `score`, and UsageError for an empty text.
    """
    vectors = scoring.of_each(
      *(self.text_rows, self._reader.embed, self.params, texts, carry, batch_size)
    )
    width = self.model.about.width
    return np.array(vectors, np.float32).reshape(-1, width)

  def logits(
    self,
    text: Text,
    carry: AnyCarry | None = None,
    *,
    params: Params | None = None,
  ) -> Array:
    """The logits of the token after each token of a text, float32 [T, vocabulary size].

    A pure function of `params`, for gradients; padding of the vocabulary is left out. See `score`
    for the arguments and errors, but what is not finite is returned as it is.
    """
    return scoring.logits(self.text_rows, self._params_or(params), text, carry)

  def activations(
    self,
    text: Text,
    kinds: Sequence[str] = ('stream',),
    carry: AnyCarry | None = None,
  ) -> dict[str, np.ndarray]:
    """Intermediate values of each token: {kind: [layers, T, D]}.

    The kinds are 'mixers' and 'mlp', which a layer adds to the residual stream, and 'stream' after
    it.

    Raises:
      ConfigurationError: a kind is unknown, or the text is longer than the model can read.
      UsageError: the text is empty.
    """
    return scoring.activations(self.text_rows, self.params, text, kinds, carry)

  def attribution(
    self,
    document: Text | Document,
    question: Text,
    answer: Text,
    *,
    since: int = 0,
  ) -> Attribution:
    """How the log-odds of an answer depend on each token before it, to first order.

    The gradient passes through the whole document, in chunks, with about 2 sqrt(n) carries of n. It
    is the one that training uses: roundings to 8 bits (`LanguageModel.quantization`) pass it on.

    Args:
      document, question, answer: texts that follow one another.
      since: a token of the document; chunks before it are only read forwards, and have no effects.

    Raises:
      UsageError: the answer is empty, or `since` is not in the text.
      Diverged, ConfigurationError: see `score`; or the gradient of the model is not exact.
    """
    if not self.model.about.exact_gradient:
      raise ConfigurationError(
        'Attribution needs the exact gradient of the model, but its LanguageModel.insert passes on '
        'only a part of it. Train a model with LanguageModel.insert = None to ask what matters.'
      )
    check('attribution.since', since, NonNegativeInt)
    if isinstance(document, Document):
      document = document.tokens
    (begun,) = self.text_rows.tokens([document], None)
    more = [self.text_rows.tokens_of(text, begins=False) for text in (question, answer)]
    tokens = np.concatenate([begun, *more])
    if not len(more[-1]) or not 0 <= since < len(tokens):
      raise UsageError(
        f'The answer has {len(more[-1])} tokens, and since={since} of {len(tokens)}. Give an '
        'answer of one token or more, and a place in the text, from 0.'
      )
    (effects, sizes), log_prob = self._attributor(self.params, tokens, len(more[-1]), since)
    return Attribution(tokens, effects, sizes, log_prob, self.tokenizer, len(begun))

  def generate(
    self,
    prompts: Text | Sequence[Text] = '',
    carry: AnyCarry | None = None,
    *,
    messages: Messages | None = None,
    max_tokens: int = 256,
    samples: int = 1,
    stop: str | Sequence[str] = (),
    seed: int = 0,
    first: int = 0,
    batch_size: int = 8,
    sampling: Sampling = GREEDY,
  ) -> list[Generated]:
    """Continues prompts.

    An empty one continues the carry, or begins a document with BOS, or without BOS a line break.

    Args:
      messages: a conversation instead, [{'role': 'user', 'content': TEXT}], which the assistant of
        the tokenizer's chat template answers.
      max_tokens: the largest number of tokens of a continuation.
      samples: continuations of each prompt. Every batch reads its prompts: pass the carry of a long
        one instead.
      stop: strings, or one, before which a continuation ends; the names of special tokens, too.
      seed: the seed of the samples.
      first: the number of the first prompt, in [0, 2**32). A continuation depends on the seed and
        on its numbers, not on the other prompts.
      batch_size: the number of continuations that are generated at the same time.
      sampling: such as valkyrie.Sampling(temperature=0.8, top_p=0.9); greedy by default.

    Raises:
      UsageError: a prompt has no tokens, or there are messages and prompts.
      DataError: the messages are wrong, or the chat template refuses them.
      Diverged, ConfigurationError: see `score`.
    """
    if messages is not None:
      if len(prompts):
        raise UsageError('There are prompts and messages. Pass one of the two.')
      template = ChatTemplate(self.tokenizer)
      prompts = template.prompt(messages, 'messages')
      stop = template.stops(stop)
    return continuing.generate(
      *(self.text_rows, self.params, prompts, carry),
      samples=samples,
      stop=stop,
      first=first,
      batch_size=batch_size,
      max_tokens=max_tokens,
      seed=seed,
      sampling=sampling,
    )

  def stream(
    self,
    prompt: Text = '',
    carry: AnyCarry | None = None,
    *,
    max_tokens: int = 256,
    stop: str | Sequence[str] = (),
    seed: int = 0,
    sampling: Sampling = GREEDY,
  ) -> Iterator[str]:
    """Yields the first sample of `generate` piece by piece while it is generated."""
    return continuing.stream(
      *(self.text_rows, self.params, prompt, carry),
      stop=stop,
      max_tokens=max_tokens,
      seed=seed,
      sampling=sampling,
    )

  def _params_or(self, params: Params | None) -> Params:
    return self.params if params is None else params
