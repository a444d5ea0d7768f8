"""Tokens after a text, one at a time: each is chosen, then read like a chunk of one token."""

from collections.abc import Iterator, Sequence
import functools

import jax
import jax.numpy as jnp
import numpy as np

from valkyrie.inference.reader import Reader, TextCarry
from valkyrie.inference.sampling import Sampling
from valkyrie.types import Array, Params


class Generator:
  """Continues rows of text."""

  def __init__(self, reader: Reader):
    self._reader = reader
    self._step = jax.jit(self._next, static_argnums=0, donate_argnums=(2, 3))

  def tokens(
    self,
    params: Params,
    carry: TextCarry,
    texts: Sequence[np.ndarray],
    sampling: Sampling,
    *,
    seed: int,
    numbers: Sequence[int],
    count: int,
  ) -> Iterator[np.ndarray]:
    """Yields the next tokens int32 [B], `count` times.

    Args:
      params: of the model.
      carry: of the rows; deleted by the first step.
      texts: the tokens of each row so far, for a repetition penalty.
      sampling: the rules of the choice.
      seed: of the choices.
      numbers: of the rows. A choice depends on the seed, the number of its row, its position, and
        the text before, not on the other rows.
      count: the number of steps.
    """
    seen = jnp.zeros((), bool)
    if sampling.repetition_penalty != 1:
      vocabulary = self._reader.next_logits(params, carry).shape[-1]
      marked = np.zeros((len(texts), vocabulary), bool)
      for row, text in enumerate(texts):
        marked[row, text] = True
      seen = jnp.asarray(marked)
    fold = jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(seed)))
    keys = fold(jnp.asarray(numbers, jnp.uint32))
    ahead = None
    for _ in range(count):
      tokens, carry, seen = self._step(sampling, params, carry, seen, keys)
      if ahead is not None:
        yield np.asarray(ahead)  # while the device computes the next one
      ahead = tokens
    if ahead is not None:
      yield np.asarray(ahead)

  def _next(
    self, sampling: Sampling, params: Params, carry: TextCarry, seen: Array, keys: Array
  ) -> tuple[Array, TextCarry, Array]:
    logits = self._reader.next_logits(params, carry)
    tokens = sampling.choose(logits, seen, jax.vmap(jax.random.fold_in)(keys, carry.position))
    if seen.ndim:
      seen = seen.at[jnp.arange(len(tokens)), tokens].set(True)
    carry = self._reader.advance(params, carry, tokens[:, None], jnp.ones_like(tokens))
    return tokens, carry, seen
