"""Dilated windows (Beltagy et al. 2020, §3.1): a head that sees every d-th token, further away.

Tokens at distances that d divides are in one phase of time, and a phase is read as undilated time
is: a dilated window is a window over rows of which each holds one phase.
"""

from collections.abc import Iterator, Sequence
import itertools

import jax.numpy as jnp

from valkyrie.errors import ConfigurationError
from valkyrie.types import Array


def check_dilations(dilations: Sequence[int] | None, kv_heads: int, of: str) -> tuple[int, ...]:
  """The dilation of each key-value head, 1 where none is given.

  Raises:
    ConfigurationError: where there is not one of at least 1 for each; it names the module `of`.
  """
  each = tuple(dilations or (1,) * kv_heads)
  if len(each) != kv_heads or min(each) < 1:
    raise ConfigurationError(
      f'{of}: dilations={each} must be one integer, at least 1, for each of the '
      f'kv_heads={kv_heads}.'
    )
  return each


def runs(dilations: Sequence[int]) -> Iterator[tuple[int, slice]]:
  """(d, which heads) for each run of neighbouring heads that share a dilation."""
  first = 0
  for dilation, run in itertools.groupby(dilations):
    last = first + len(list(run))
    yield dilation, slice(first, last)
    first = last


def phases(x: Array, dilation: int) -> Array:
  """[B, T, ...] -> [B · d, ceil(T / d), ...]: a row for each phase; zeros fill the last tokens."""
  batch, time, *rest = x.shape
  steps = -(-time // dilation)
  padded = jnp.pad(x, ((0, 0), (0, steps * dilation - time)) + ((0, 0),) * len(rest))
  apart = jnp.swapaxes(padded.reshape(batch, steps, dilation, *rest), 1, 2)
  return apart.reshape(batch * dilation, steps, *rest)


def interleaved(x: Array, dilation: int, time: int) -> Array:
  """[B · d, ceil(T / d), ...] -> [B, T, ...]: the inverse of `phases`."""
  rows, steps, *rest = x.shape
  apart = x.reshape(rows // dilation, dilation, steps, *rest)
  together = jnp.swapaxes(apart, 1, 2).reshape(rows // dilation, steps * dilation, *rest)
  return together[:, :time]
