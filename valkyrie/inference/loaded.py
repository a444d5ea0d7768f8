"""A trained model in Python: texts are scored, continued and read by it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import hashlib
import os
import pathlib
from typing import Any, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np

from valkyrie.checkpoint import manifest
from valkyrie.checkpoint.steps import steps_of
from valkyrie.config import ranges
from valkyrie.data.chat_template import ChatTemplate, Messages
from valkyrie.data.vocabularies import ANY_TEXT, Vocabulary, as_utf8, following
from valkyrie.errors import ConfigurationError, UsageError, check_choice
from valkyrie.inference import documents
from valkyrie.inference.attribution import Attribution, Attributor
from valkyrie.inference.documents import AnyCarry, Document
from valkyrie.inference.generation import GREEDY, LENGTH, Continuation, Sampling
from valkyrie.inference.reader import Reader, TextCarry, TextScore, check_finite
from valkyrie.models.features import ACTIVATIONS
from valkyrie.models.model import Model
from valkyrie.types import Array, Params

Text = str | np.ndarray  # or its tokens


class Generated(NamedTuple):
  """A continuation, with the number of its prompt, and its own among the samples of this prompt.

  ended: 'eos', 'stop' (a stop string, which is left out) or 'length'.
  """

  prompt: int
  sample: int
  text: str
  tokens: list[int]
  ended: str


def batches(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
  """The items in their order, at most `size` at once."""
  return [items[first : first + size] for first in range(0, len(items), size)]


class LoadedModel:
  """A model with its parameters.

  The texts of a call are documents, or, with the carry of an earlier call, what follows the texts
  that it has read; a carry of one row is used for all texts.

  Attributes:
    model: pure functions, such as model.apply(params, carry, inputs, positions, segment_ids).
    params: {module: {name: array}}; the moving average if the run keeps one.
    tokenizer: encode, decode, eos_id, size; bos, which begins the documents that are texts.
    model_dir, steps: the run, and the checkpoints whose mean the parameters are: usually one.
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
  ):
    """Sets the attributes; a call of the model reads at most `chunk_size` tokens of a row."""

    def apply(*args, **options):  # without the rows that pad the unembedding
      features, carry = model.apply(*args, **options)
      real = features.unembedding[: model.about.vocabulary_size]
      return features._replace(unembedding=real), carry

    self.model, self.params, self.tokenizer = model._replace(apply=apply), params, tokenizer
    self.model_dir, self.steps = model_dir, steps
    self._reader = Reader(model, chunk_size)
    self._attributor = Attributor(self._reader)

  progress = property(
    lambda self: self._reader.progress,
    lambda self, function: setattr(self._reader, 'progress', function),
  )

  @overload
  def read(
    self, texts: Text | Sequence[Text], carry: AnyCarry | None = None, *, cut: str | None = None
  ) -> TextCarry: ...

  @overload
  def read(self, texts: Text, *, keep: str | Document) -> Document: ...

  def read(self, texts: Any, carry: Any = None, *, cut: str | None = None, keep: Any = None) -> Any:
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
    rows = self._tokens(texts, carry)
    if keep is None:
      return self._reader.read(self.params, self._begun(carry, len(rows)), rows, cut)
    if not isinstance(keep, Document):
      check_choice('keep', keep, ('log',))
    if carry is not None or cut is not None or len(rows) != 1:
      raise UsageError(
        'read(..., keep) reads one text from its start. Leave out carry and cut, and pass one text.'
      )
    if like := keep if isinstance(keep, Document) else None:
      documents.check(like, self._reader)
    return documents.read(self._reader, self.params, rows[0], like)

  def rows(self, carry: AnyCarry, numbers: Sequence[int]) -> TextCarry:
    """The rows of a carry with these numbers, in this order; a number may be repeated.

    Raises an IndexError if the carry has no such row.
    """
    documents.check(carry, self._reader)
    index = np.arange(len(carry.position))[np.asarray(numbers)]
    axes = self.model.carry_axes(carry.carry)
    taken = jax.tree.map(lambda x, of: jnp.take(x, index, of.index('batch')), carry.carry, axes)
    return TextCarry(taken, carry.position[index], carry.hidden[index])

  def save_carry(self, path: str | os.PathLike, carry: AnyCarry) -> None:
    """Writes a carry or a document to a new safetensors file, or raises a StorageError."""
    documents.save(pathlib.Path(path), carry, self._origin())

  def load_carry(self, path: str | os.PathLike) -> AnyCarry:
    """Reads a carry or a document that was saved by this step of this run.

    Raises:
      ConfigurationError: another model or step saved it.
      StorageError: the file is missing or damaged.
    """
    return documents.load(pathlib.Path(path), self._reader, self._origin())

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
    return self._of_each(self._reader.score, texts, carry, params, batch_size)

  def embed(
    self, texts: Text | Sequence[Text], carry: AnyCarry | None = None, *, batch_size: int = 8
  ) -> np.ndarray:
    """A vector for each of N texts, float32 [N, D]: the mean of its tokens' features.

    Features are what the unembedding reads. Errors: see `score`, and UsageError for an empty text.
    """
    found = self._of_each(self._reader.embed, texts, carry, None, batch_size)
    return np.array(found, np.float32).reshape(-1, self.model.about.width)

  def _of_each(self, find: Callable, texts: Any, carry: Any, params: Any, size: int) -> list:
    """What a function of the reader returns for each text; `size` texts are read at once."""
    ranges.check(find.__name__, batch_size=size)
    rows, found = self._tokens(texts, carry), []
    for batch in batches(range(len(rows)), size):
      args = self._begun(carry, len(rows), batch), [rows[number] for number in batch]
      found += [*find(self.params if params is None else params, *args)]
    return found

  def logits(
    self, text: Text, carry: AnyCarry | None = None, *, params: Params | None = None
  ) -> Array:
    """The logits of the token after each token of a text, float32 [T, vocabulary size].

    A pure function of `params`, for gradients; padding of the vocabulary is left out. See `score`
    for the arguments and errors, but what is not finite is returned as it is.
    """
    rows, carry = self._tokens([text], carry), self._begun(carry, 1)
    found = [jnp.zeros((0, self.model.about.vocabulary_size))]
    for tokens, lengths in self._reader.chunks(carry, rows):
      args = self.params if params is None else params, carry, tokens, lengths
      logits, carry = self._reader.predict(*args)
      found.append(logits[0, : lengths[0]])
    return jnp.concatenate(found)

  def activations(
    self, text: Text, kinds: Sequence[str] = ('stream',), carry: AnyCarry | None = None
  ) -> dict[str, np.ndarray]:
    """Intermediate values of each token: {kind: [layers, T, D]}.

    The kinds are 'mixers' and 'mlp', which a layer adds to the residual stream, and 'stream' after
    it.

    Raises:
      ConfigurationError: a kind is unknown, or the text is longer than the model can read.
      UsageError: the text is empty.
    """
    rows, carry = self._tokens([text], carry), self._begun(carry, 1)
    if not len(rows[0]):
      raise UsageError('The text is empty, and has no activations.')
    for kind in kinds:
      check_choice('kind', kind, ACTIVATIONS)
    found: dict[str, list[np.ndarray]] = {kind: [] for kind in kinds}
    for tokens, lengths in self._reader.chunks(carry, rows):
      features, carry = self._reader.show(self.params, carry, tokens, lengths, tuple(kinds))
      for kind, parts in found.items():
        parts.append(np.asarray(features.activations[kind][:, 0, : lengths[0]]))
    return {kind: np.concatenate(parts, axis=1) for kind, parts in found.items()}

  def attribution(
    self, document: Text | Document, question: Text, answer: Text, *, since: int = 0
  ) -> Attribution:
    """How the log-odds of an answer depend on each token before it, to first order.

    The gradient passes through the whole document, in chunks, with about 2 sqrt(n) carries of n. It
    is the one that training uses: roundings to 8 bits (`LanguageModel.quantization`) pass it on.

    Args:
      document, question, answer: texts that follow one another.
      since: a token of the document; chunks before it are only read forwards, and have no effects.

    Raises:
      UsageError: the answer is empty, or `since` is not in the text.
      Diverged, ConfigurationError: see `score`; or the model has a planner.
    """
    if self.model.about.plan_interval is not None:
      raise ConfigurationError(
        'The attribution of a model with a planner would not be its gradient: a planner lets it '
        'pass through its last step only. Train a model with LanguageModel.planner = None to ask '
        'what matters.'
      )
    if isinstance(document, Document):
      document = document.tokens
    (begun,) = self._tokens([document], None)
    more = [self._tokens_of(text, begins=False) for text in (question, answer)]
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
      samples: continuations of each prompt.
      stop: strings, or one, before which a continuation ends; the names of special tokens, too.
      seed, first: of the samples, and the number of the first prompt, in [0, 2**32). A continuation
        depends on the seed and on its numbers, not on the other prompts.
      batch_size: the number of continuations that are generated at the same time.
      sampling: such as valkyrie.Sampling(temperature=0.8, top_p=0.9); greedy by default.

    Raises:
      UsageError: a prompt has no tokens, or there are messages and prompts.
      DataError: the messages are wrong, or the chat template refuses them.
      Diverged, ConfigurationError: see `score`.
    """
    ranges.check('generate', batch_size=batch_size, samples=samples, first=first)
    if messages is not None:
      if len(prompts):
        raise UsageError('There are prompts and messages. Pass one of the two.')
      template = ChatTemplate(self.tokenizer)
      prompts, stop = template.prompt(messages, 'messages'), template.stops(stop)
    numbered = dict(enumerate(self._prompts(prompts, carry), first))
    rows = [(prompt, sample) for prompt in numbered for sample in range(samples)]
    found = []
    for batch in batches(rows, batch_size):
      texts = [Continuation(self.tokenizer, stop, numbered[prompt]) for prompt, _ in batch]
      for _ in self._continue(numbered, batch, texts, carry, sampling, seed, max_tokens):
        pass
      found += [
        Generated(prompt, sample, text.text, text.tokens, str(text.ended))
        for (prompt, sample), text in zip(batch, texts, strict=True)
      ]
    return found

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
    prompts = dict(enumerate(self._prompts([prompt], carry)))
    text = Continuation(self.tokenizer, stop, prompts[0])
    for _, new in self._continue(prompts, [(0, 0)], [text], carry, sampling, seed, max_tokens):
      yield new

  def _continue(
    self,
    prompts: Mapping[int, np.ndarray],
    rows: Sequence[tuple[int, int]],
    texts: Sequence[Continuation],
    carry: AnyCarry | None,
    sampling: Sampling,
    seed: int,
    max_tokens: int,
  ) -> Iterator[tuple[int, str]]:
    """Extends the text of each row (prompt, sample); yields (row, its new text)."""
    ranges.check('generate', seed=seed, max_tokens=max_tokens, first=max(prompts))
    own = list(dict.fromkeys(prompt for prompt, _ in rows))  # to read each prompt once
    tokens = [prompts[prompt] for prompt in own]
    begun = self._begun(carry, len(prompts), [number - min(prompts) for number in own])
    self._reader.check_length(int(begun.position.max()) + max(map(len, tokens)) + max_tokens)
    begun = self._reader.read(self.params, begun, tokens)
    of_row = [own.index(prompt) for prompt, _ in rows]
    carry, before = self.rows(begun, of_row), [tokens[number] for number in of_row]
    for step in self._reader.generate(
      self.params, carry, before, sampling, seed=seed, numbers=rows, count=max_tokens
    ):
      for row, text in enumerate(texts):
        if text.ended is None:
          check_finite(step[row] >= 0)
          if new := text.add(int(step[row])):
            yield row, new
      if all(text.ended for text in texts):
        return
    for row, text in enumerate(texts):
      if text.ended is None:
        yield row, text.end(LENGTH)

  def _prompts(self, prompts: Any, carry: AnyCarry | None) -> list[np.ndarray]:
    tokens = self._tokens(prompts, carry)
    if carry is None:
      tokens = [row if len(row) else self._tokens_of('\n', begins=True) for row in tokens]
    if carry is None and not all(map(len, tokens)):
      raise UsageError('A prompt has no tokens. Write a text, or continue the carry of one.')
    return tokens

  def _tokens(self, texts: Text | Sequence[Text], carry: AnyCarry | None) -> list[np.ndarray]:
    """The tokens int32 [T] of each text, which begins a document unless the carry has read some.

    A document begins with its BOS, if the vocabulary has one; tokens are taken as they are.

    Raises:
      DataError: a text is no Unicode.
      ConfigurationError: there are tokens that the model does not have.
    """
    begins = carry is None or not np.any(carry.position)
    several = [texts] if isinstance(texts, str | np.ndarray) else texts
    return [self._tokens_of(text, begins) for text in several]

  def _tokens_of(self, text: Text, begins: bool) -> np.ndarray:
    size = self.model.about.vocabulary_size
    if isinstance(text, str):
      as_utf8(text, 'A text')
      codec = self.tokenizer
      found = codec.begun(text) if begins else following(codec.ids, ANY_TEXT, text)
    else:
      found = np.asarray(text)
    if found.ndim != 1 or (found.size and found.dtype.kind not in 'iu'):
      raise ConfigurationError(
        f'A text is an array {list(found.shape)} of {found.dtype}. Pass strings, or one row '
        'of integers for each text.'
      )
    if found.size and not 0 <= found.min() <= found.max() < size:
      wrong = found[(found < 0) | (found >= size)][0]  # jax would clamp, fill or wrap it
      raise ConfigurationError(
        f'A text has the token {wrong}, but the model has the tokens 0 to {size - 1:,}. Encode the '
        'text with the tokenizer of this run.'
      )
    return found.astype(np.int32)

  def _begun(
    self, carry: AnyCarry | None, texts: int, rows: Sequence[int] | None = None
  ) -> TextCarry:
    """The rows that so many texts begin with, by default all: copies of the rows of a carry."""
    rows = range(texts) if rows is None else rows
    if carry is None:
      return self._reader.fresh(len(rows))
    if len(carry.position) not in (1, texts):
      raise ConfigurationError(
        f'The carry has {len(carry.position)} rows, but {texts} texts follow. Use a carry of one '
        'row, or of a row for each text; `rows` chooses some.'
      )
    return self.rows(carry, rows if len(carry.position) > 1 else [0] * len(rows))

  def _origin(self) -> dict[str, str]:
    """Fingerprints of what carries depend on."""
    steps = steps_of(self.model_dir)
    manifests = [manifest.read(steps.files(step))[1] for step in self.steps]
    weights = hashlib.sha256(b''.join(manifests)).hexdigest()
    return {'weights': weights, 'tokenizer': self.tokenizer.fingerprint}
