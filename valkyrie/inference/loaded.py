"""A trained model in Python: texts are scored, continued and read by it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import hashlib
import os
import pathlib
from typing import NamedTuple

import gin
import jax
import jax.numpy as jnp
import numpy as np

from valkyrie.checkpoint.manager import LATEST
from valkyrie.config.apart import Configuration
from valkyrie.config.computation import may_change_on_resume
from valkyrie.config.load import check_call, load_gin
from valkyrie.data import vocabularies
from valkyrie.data.vocabularies import Vocabulary
from valkyrie.errors import UsageError
from valkyrie.inference import carry_files
from valkyrie.inference.continuation import LENGTH, Continuation
from valkyrie.inference.generation import Generator
from valkyrie.inference.reader import Reader, TextCarry
from valkyrie.inference.sampling import GREEDY, Sampling
from valkyrie.main import CONFIGURABLE_MODULES
from valkyrie.models import language_model
from valkyrie.models.language_model import LanguageModel, Model
from valkyrie.sharding.partitioner import Partitioner
from valkyrie.types import Params
from valkyrie.weights.restored import restored_params


class TextScore(NamedTuple):
  """How well a model predicts a text.

  text: the text; tokens: its ids, int32 [T].
  log_probs: log p(token | those before it) in nats, float32 [T]; NaN for the first token of a
    document, which nothing predicts.
  greedy: bool [T], whether the token is the most likely one.
  """

  text: str
  tokens: np.ndarray
  log_probs: np.ndarray
  greedy: np.ndarray

  @property
  def log_prob(self) -> float:
    """Of all tokens but a document's first, in nats."""
    return float(np.nansum(self.log_probs, dtype=np.float64))


class Generated(NamedTuple):
  """A continuation.

  prompt, sample: the numbers of its prompt, and among those of the same prompt.
  text: the continuation; tokens: its ids.
  ended: 'eos', 'stop' (a stop string, which is left out) or 'length'.
  """

  prompt: int
  sample: int
  text: str
  tokens: list[int]
  ended: str


class LoadedModel:
  """A model with its parameters.

  Attributes:
    model: pure functions, such as model.apply(params, carry, inputs, positions, segment_ids).
    params: {module: {name: array}}, the average where the run has one.
    tokenizer: encode, decode, eos_id, size.
    model_dir, step: the run, and the step of its checkpoint.
  """

  def __init__(
    self,
    model: Model,
    params: Params,
    tokenizer: Vocabulary,
    *,
    model_dir: str,
    step: int,
    chunk_size: int,
  ):
    """Takes the attributes, and the most tokens of a row that are read at once."""
    self.model, self.params, self.tokenizer = model, params, tokenizer
    self.model_dir, self.step = model_dir, step
    self._reader = Reader(model, chunk_size)
    self._generator = Generator(self._reader)

  def read(self, text: str, carry: TextCarry | None = None) -> TextCarry:
    """Reads a text, after the one of `carry` if it is given -> the carry after it.

    Its size does not depend on the length of the text, unless the model has full attention.
    """
    return self._reader.read(self.params, self._begun(carry, 1), [self.tokenizer.ids(text)])

  def save_carry(self, path: str | os.PathLike, carry: TextCarry) -> None:
    """Writes a carry to a new file; raises a StorageError if it cannot."""
    carry_files.save(path, carry, self._weights())

  def load_carry(self, path: str | os.PathLike) -> TextCarry:
    """Reads a carry that this step of this run has made.

    Raises:
      ConfigurationError: another model or step made it.
      StorageError: the file is missing or damaged.
    """
    return carry_files.load(path, self._reader.fresh(1), self._weights())

  def score(
    self,
    texts: str | Sequence[str],
    carry: TextCarry | None = None,
    *,
    params: Params | None = None,
    batch_size: int = 8,
  ) -> list[TextScore]:
    """The log-probabilities of each token of some texts.

    Args:
      texts: documents, or, with a carry, what follows the text that it has read.
      carry: of `read`.
      params: other parameters of the same model.
      batch_size: texts that are read at the same time.
    """
    texts = [texts] if isinstance(texts, str) else list(texts)
    params = self.params if params is None else params
    found = []
    for first in range(0, len(texts), batch_size):
      rows = [self.tokenizer.ids(text) for text in texts[first : first + batch_size]]
      begun = self._begun(carry, len(rows))
      scores = self._reader.score(params, begun, rows)
      found += [
        TextScore(text, row, *score)
        for text, row, score in zip(texts[first:], rows, scores, strict=False)
      ]
    return found

  def activations(
    self,
    text: str,
    kinds: Sequence[str] = ('stream',),
    carry: TextCarry | None = None,
    *,
    params: Params | None = None,
  ) -> dict[str, np.ndarray]:
    """Intermediate values of each token: {kind: [layers, T, D]}.

    Args:
      text: a document, or, with a carry, what follows the text that it has read.
      kinds: 'mixers' and 'mlp', which a layer adds to the residual stream, and 'stream' after it.
      carry: of `read`.
      params: other parameters of the same model.
    """
    return self._reader.activations(
      self.params if params is None else params,
      self._begun(carry, 1),
      self.tokenizer.ids(text),
      kinds,
    )

  def generate(
    self,
    prompts: str | Sequence[str],
    carry: TextCarry | None = None,
    *,
    max_tokens: int = 256,
    samples: int = 1,
    stop: Sequence[str] = (),
    seed: int = 0,
    first: int = 0,
    batch_size: int = 8,
    sampling: Sampling = GREEDY,
  ) -> list[Generated]:
    """Continues prompts.

    Args:
      prompts: texts; with a carry they follow what it has read, and may be empty.
      carry: of `read`.
      max_tokens: the most tokens of a continuation, if the document does not end before.
      samples: continuations of each prompt.
      stop: strings before which a continuation ends.
      seed: of the samples. A continuation depends on its number, not on the other prompts.
      first: the number of the first prompt.
      batch_size: continuations that are made at the same time.
      sampling: such as valkyrie.Sampling(temperature=0.8, top_p=0.9); greedy by default.

    Raises:
      UsageError: a prompt is empty.
      ConfigurationError: a text is longer than the model can read, or a number out of its range.
    """
    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    numbered = dict(enumerate(prompts, first))
    rows = [(prompt, sample) for prompt in numbered for sample in range(samples)]
    found = []
    for start in range(0, len(rows), batch_size):
      batch = rows[start : start + batch_size]
      texts = [Continuation(self.tokenizer, stop) for _ in batch]
      for _ in self._continue(numbered, batch, texts, carry, sampling, seed, max_tokens):
        pass
      found += [
        Generated(prompt, sample, text.text, text.tokens, str(text.ended))
        for (prompt, sample), text in zip(batch, texts, strict=True)
      ]
    return found

  def stream(
    self,
    prompt: str,
    carry: TextCarry | None = None,
    *,
    max_tokens: int = 256,
    stop: Sequence[str] = (),
    seed: int = 0,
    sampling: Sampling = GREEDY,
  ) -> Iterator[str]:
    """Yields the first sample of `generate` piece by piece, as it comes."""
    text = Continuation(self.tokenizer, stop)
    for _, new in self._continue({0: prompt}, [(0, 0)], [text], carry, sampling, seed, max_tokens):
      yield new

  def _continue(
    self,
    prompts: Mapping[int, str],
    rows: Sequence[tuple[int, int]],
    texts: Sequence[Continuation],
    carry: TextCarry | None,
    sampling: Sampling,
    seed: int,
    max_tokens: int,
  ) -> Iterator[tuple[int, str]]:
    """Grows the texts of rows (prompt, sample); yields (row, its new text)."""
    own = list(dict.fromkeys(prompt for prompt, _ in rows))  # each is read once
    tokens = [self.tokenizer.ids(prompts[prompt]) for prompt in own]
    if carry is None and not all(map(len, tokens)):
      raise UsageError('The prompt is empty. Pass --prompt=TEXT, or a text on standard input.')
    begun = self._begun(carry, len(own))
    self._reader.check_length(int(begun.position.max()) + max(map(len, tokens)) + max_tokens)
    begun = self._reader.read(self.params, begun, tokens)
    of_row = [own.index(prompt) for prompt, _ in rows]
    steps = self._generator.tokens(
      self.params,
      self._rows(begun, of_row),
      [tokens[number] for number in of_row],
      sampling,
      seed=seed,
      numbers=[_number(prompt, sample) for prompt, sample in rows],
      count=max_tokens,
    )
    for step in steps:
      for row, text in enumerate(texts):
        if text.ended is None and (new := text.add(int(step[row]))):
          yield row, new
      if all(text.ended for text in texts):
        return
    for row, text in enumerate(texts):
      if text.ended is None:
        yield row, text.end(LENGTH)

  def _begun(self, carry: TextCarry | None, rows: int) -> TextCarry:
    return self._reader.fresh(rows) if carry is None else self._rows(carry, [0] * rows)

  def _rows(self, carry: TextCarry, rows: Sequence[int]) -> TextCarry:
    """Some rows of a carry."""
    index = np.asarray(rows)
    inside = jax.tree.map(
      lambda leaf, axes: jnp.take(leaf, index, axis=axes.index('batch')),
      carry.carry,
      self.model.carry_axes(carry.carry),
    )
    return TextCarry(inside, carry.position[index], carry.hidden[index])

  def _weights(self) -> str:
    """The fingerprint of the step."""
    manifest = pathlib.Path(self.model_dir, 'checkpoints', str(self.step), 'manifest.sha256')
    return hashlib.sha256(manifest.read_bytes()).hexdigest()


def _number(prompt: int, sample: int) -> int:
  return (sample << 20 | prompt) % 2**32


@may_change_on_resume()
@gin.configurable
def open_run(
  model_dir: str,
  step: str = LATEST,
  configuration: Configuration | None = None,
  *,
  model: Callable[..., LanguageModel],
  vocabulary: str,
  chunk_size: int,
) -> LoadedModel:
  """The model of a run, on one device.

  Args:
    model_dir: the directory of the run.
    step: a number, 'latest' or 'best', see `checkpoint.manager.open_to_read`.
    configuration: under which the model is traced; None for that of the process.
    model: the class of the model.
    vocabulary: 'bytes', or the path of a SentencePiece .model or a tokenizer.json.
    chunk_size: the most tokens of a row that are read at once.

  Raises:
    ConfigurationError: the run has no such step, or is of another model or vocabulary.
  """
  functions = language_model.transform(model)
  if configuration is not None:
    functions = _traced_in(configuration, functions)
  tokenizer = vocabularies.load(vocabulary)
  one_device = Partitioner((('data', 1),), (), (), manual=True)
  params, number = restored_params(functions, one_device, model_dir, tokenizer, step)
  return LoadedModel(
    functions, params, tokenizer, model_dir=model_dir, step=number, chunk_size=chunk_size
  )


def load(
  model_dir: str | os.PathLike,
  step: str | int = LATEST,
  *,
  bindings: Sequence[str] = (),
  allow_import: Sequence[str] = (),
) -> LoadedModel:
  """Opens a run by its own configuration, on one device. Any number of runs can be open.

  Args:
    model_dir: the directory of the run.
    step: the number of a step, 'latest' or 'best', the one with the lowest validation loss.
    bindings: over those of the run, as on the command line: 'open_run.chunk_size=512'.
    allow_import: packages of yours that the configuration may import, and thereby execute.

  Raises:
    ConfigurationError: there is no such run or step, or its configuration cannot be loaded.
    StorageError: the files cannot be read.
  """
  flags = [f'--gin.{binding}' for binding in bindings]
  configuration = Configuration(
    lambda: load_gin(
      [], flags, run=model_dir, allowed_imports=allow_import, modules=CONFIGURABLE_MODULES
    )
  )
  with configuration.installed():
    check_call(open_run, 'model_dir', 'step', 'configuration')
    opened: Callable[..., LoadedModel] = open_run  # gin gives the other arguments
    return opened(os.fspath(model_dir), str(step), configuration)


def _traced_in(configuration: Configuration, model: Model) -> Model:
  """The functions, which read gin when they are traced, under one configuration."""

  def inside(function: Callable) -> Callable:
    def call(*args, **kwargs):
      with configuration.installed():
        return function(*args, **kwargs)

    return call

  return model._replace(
    init=inside(model.init),
    initial_carry=inside(model.initial_carry),
    apply=inside(model.apply),
    parameters=inside(model.parameters),
  )
