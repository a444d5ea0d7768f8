"""The run mode `infer`: continuation of a prompt, read in chunks and continued token by token."""

from collections.abc import Callable, Iterator

import gin
import jax
import jax.numpy as jnp
import numpy as np

from valkyrie.checkpoint.manager import Checkpoints
from valkyrie.config.computation import may_change_on_resume
from valkyrie.data import vocabularies
from valkyrie.errors import ConfigurationError, UsageError
from valkyrie.models import language_model
from valkyrie.models.features import Features
from valkyrie.models.language_model import LanguageModel, Model
from valkyrie.run.evaluate import restored_params
from valkyrie.sharding.partitioner import Partitioner
from valkyrie.training.losses import logits
from valkyrie.types import Array, Params


def continuation(
  model: Model,
  params: Params,
  prompt: np.ndarray,
  *,
  chunk_size: int,
  temperature: float,
  seed: int,
) -> Iterator[int]:
  """Yields the tokens after a prompt, without end.

  The prompt is one document. Its last chunk is padded, which does not change the carry; a token is
  a chunk of length 1.

  Args:
    model: the pure functions of the model.
    params: its parameters.
    prompt: token ids [T], at least one.
    chunk_size: tokens of the prompt that one call reads.
    temperature: 0 takes the token with the largest logit; else logits are divided by it and
      sampled.
    seed: of the sampling; token number n depends on it, on n, and on the tokens before.
  """

  def choose(features: Features, last: Array, position: Array) -> Array:
    hidden = jnp.take_along_axis(features.hidden, last[None, None, None], axis=1)
    scores = logits(Features(hidden, features.unembedding), model.about.vocabulary_size)[0, 0]
    if temperature == 0:
      return jnp.argmax(scores).astype(jnp.int32)
    key = jax.random.fold_in(jax.random.key(seed), position)
    return jax.random.categorical(key, scores / temperature).astype(jnp.int32)

  @jax.jit
  def read(params, carry, tokens, start, length):
    """Reads `length` of the tokens [T] -> (the token that follows them, the carry)."""
    index = jnp.arange(tokens.shape[0])
    real = index < length
    features, carry = model.apply(
      params,
      carry,
      tokens[None],
      jnp.where(real, start + index, 0)[None],
      real.astype(jnp.int32)[None],
    )
    return choose(features, length - 1, start + length), carry

  carry = model.initial_carry(1)
  token = jnp.zeros((), jnp.int32)
  for start in range(0, len(prompt), chunk_size):
    piece = prompt[start : start + chunk_size]
    padded = np.zeros(chunk_size, np.int32)
    padded[: len(piece)] = piece
    token, carry = read(params, carry, padded, np.int32(start), np.int32(len(piece)))
  position = len(prompt)
  while True:
    yield int(token)
    token, carry = read(params, carry, token[None], np.int32(position), np.int32(1))
    position += 1


@may_change_on_resume()
@gin.configurable
def infer(
  model_dir: str,
  prompt: str,
  *,
  model: Callable[..., LanguageModel],
  partitioner: Callable[[], Partitioner],
  checkpoints: Checkpoints,
  vocabulary: str,
  chunk_size: int,
  seed: int,
  max_tokens: int = 256,
  temperature: float = 0.0,
) -> None:
  """Prints the prompt and its continuation by a run's newest checkpoint, token by token.

  Args:
    model_dir: the directory of the run.
    prompt: the text to continue; at least one token.
    model: the class of the model.
    partitioner: the class of the partitioner, of one device.
    checkpoints: the checkpoints that the run keeps.
    vocabulary: 'bytes', or the path of a SentencePiece .model or a tokenizer.json.
    chunk_size: tokens of the prompt that one call reads.
    seed: of the sampling.
    max_tokens: the most tokens, if the document does not end before.
    temperature: 0 is greedy.

  Raises:
    UsageError: the prompt is empty.
    ConfigurationError: the prompt is longer than the model can read, or the vocabulary is not that
      of the run.
  """
  codec = vocabularies.load(vocabulary)
  functions = language_model.transform(model)
  tokens = np.asarray(codec.encode(prompt), np.int32)
  if not len(tokens):
    raise UsageError('The prompt is empty. Pass --prompt=TEXT, or a text on standard input.')
  if not functions.about.carried:
    raise ConfigurationError(
      'FullAttention.carried is False: the model reads each chunk alone, and cannot continue a '
      'text. Bind FullAttention.carried = True; the parameters stay the same.'
    )
  longest = functions.about.max_context
  if longest is not None and len(tokens) + max_tokens > longest:
    raise ConfigurationError(
      f'The prompt of {len(tokens)} tokens and infer.max_tokens={max_tokens} together exceed the '
      f'{longest} tokens that this model can read (FullAttention.max_context). Shorten either.'
    )
  params, _ = restored_params(functions, partitioner(), checkpoints, model_dir, codec)

  print(prompt, end='', flush=True)
  made: list[int] = []
  printed = ''
  for token in continuation(
    functions, params, tokens, chunk_size=chunk_size, temperature=temperature, seed=seed
  ):
    if token == codec.eos_id or len(made) == max_tokens:
      break
    made.append(token)
    # A character may need several tokens: an unfinished one is printed once it is complete.
    text = codec.decode(made)
    if not text.endswith('\N{REPLACEMENT CHARACTER}'):
      print(text[len(printed) :], end='', flush=True)
      printed = text
  print()
