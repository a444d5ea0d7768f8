"""Dilated windows (Beltagy et al. 2020, §3.1): a head that sees every d-th token.

Tokens at distances that d divides share a residue modulo d. A dilated window over a row is an
undilated window over d rows; each row holds the tokens of one residue.
"""

from collections.abc import Iterator, Sequence
import itertools

import jax.numpy as jnp

from valkyrie.types import Array


def runs(dilations: Sequence[int]) -> Iterator[tuple[int, slice]]:
  """(d, the heads) for each run of neighboring heads that share a dilation."""
  first = 0
  for dilation, run in itertools.groupby(dilations):
    last = first + len(list(run))
    yield dilation, slice(first, last)
    first = last


def split_residues(x: Array, dilation: int) -> Array:
  """[B, T, ...] -> [B · d, ceil(T / d), ...]: a row for each residue, padded with zeros."""
  batch, time, *rest = x.shape
  steps = -(-time // dilation)
  padded = jnp.pad(x, ((0, 0), (0, steps * dilation - time)) + ((0, 0),) * len(rest))
  separate = jnp.swapaxes(padded.reshape(batch, steps, dilation, *rest), 1, 2)
  return separate.reshape(batch * dilation, steps, *rest)


def merge_residues(x: Array, dilation: int, time: int) -> Array:
  """[B · d, ceil(T / d), ...] -> [B, T, ...]: the inverse of `split_residues`."""
  rows, steps, *rest = x.shape
  separate = x.reshape(rows // dilation, dilation, steps, *rest)
  merged = jnp.swapaxes(separate, 1, 2).reshape(rows // dilation, steps * dilation, *rest)
  return merged[:, :time]
