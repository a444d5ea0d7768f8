"""Errors of hidden activations and of attention patterns under masks."""

import jax.numpy as jnp

from valkyrie.models.declarations import Parameters
from valkyrie.models.features import Features
from valkyrie.types import Array
from valkyrie.weights.named_tensors import declared_leaves


def hidden_sums(clean: Features, masked: Features, real: Array) -> dict[str, tuple[Array, Array]]:
  """{kind: the squared error and the square [layers]} of the activations [layers, B, T, D].

  Sums over the tokens that are `real` [B, T], in float32.
  """
  where = real[None, :, :, None]
  of_clean = clean.activations or {}
  sums = {}
  for kind, of_masked in (masked.activations or {}).items():
    wide = of_clean[kind].astype(jnp.float32)
    error = of_masked.astype(jnp.float32) - wide
    squares = [jnp.sum(jnp.square(x), axis=(1, 2, 3), where=where) for x in (error, wide)]
    sums[kind] = (squares[0], squares[1])
  return sums


def pattern_sums(clean: Features, masked: Features, real: Array) -> dict[str, Array]:
  """{path of a mixer: KL(model || masked) [L, H] of its attention patterns, in nats}.

  Sums over the queries that are `real` [B, S].
  """
  of_clean = clean.patterns or {}
  sums = {}
  for path, of_masked in (masked.patterns or {}).items():
    divergence = jnp.zeros(())
    for log_p, log_q in zip(of_clean[path], of_masked, strict=True):
      divergence += jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
    sums[path] = jnp.sum(divergence, axis=(1, 2), where=real[None, :, :, None])
  return sums


def layers_of(parameters: Parameters) -> dict[str, list[str]]:
  """{path of a module: its name in each layer, such as 'layers.0.attention'}."""
  names = {}
  for leaf in declared_leaves(parameters):
    names[leaf.module] = [name.removesuffix(f'.{leaf.name}') for name in leaf.tensors]
  return names
