"""Weights of layers that are split over devices; each layer gathers its own where it runs.

Where `Ambient.weights` names mesh axes, in the body of a `jax.shard_map`, a device holds one part
of each weight of a layer. The layer gathers the whole weight in the dtype in which it computes.
Backwards, the gradient is summed over the devices in float32, and each keeps its part. `hk.remat`
gathers again in the backward pass, so that no device holds two layers whole.

The bytes that a device sends for each layer of P parameters, in bfloat16: 2 P in each forward pass,
recomputation included, and 4 P for the gradient.
"""

from collections.abc import Callable, Sequence
import functools

import haiku as hk
import jax
import jax.numpy as jnp

from valkyrie.sharding import ambient, messages
from valkyrie.types import Array, DType


def getter(following: Callable, part: Array, context: hk.GetterContext) -> Array:
  """A Haiku getter of the whole weight."""
  cast = getattr(context.original_init, 'cast', None) or part.dtype
  return following(whole(part, context.original_shape, cast))


def whole(part: Array, shape: Sequence[int], cast: DType) -> Array:
  """The whole weight of this shape, gathered from the parts on the devices."""
  dimension = split_dimension(part, shape)
  if dimension is None:
    return part
  return gather(part, ambient.current().weights, dimension, cast)


def split_dimension(part: Array, shape: Sequence[int]) -> int | None:
  """The one dimension along which a device holds a part of a weight; None if it holds all of it."""
  sizes = zip(part.shape, shape, strict=True)
  for dimension, (held, size) in enumerate(sizes):
    if held < size:
      return dimension
  return None


def gather(
  part: Array,
  over: Sequence[str],
  dimension: int,
  cast: DType,
  sent: DType | None = None,
) -> Array:
  """The parts that devices along these mesh axes hold, cast and joined along a dimension.

  Gradients are sent in the dtype `sent`; None is float32, or their own if that is wider.
  """
  return _gather(part, tuple(over), dimension, part.dtype, cast, sent)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4, 5))
def _gather(
  part,
  over,
  dimension,
  own,
  cast,
  sent,
):
  return messages.all_gather(part.astype(cast), over, dimension)


def _gather_backward(
  over,
  dimension,
  own,
  cast,
  sent,
  residuals,
  gradient,
):
  wide = jnp.promote_types(gradient.dtype, jnp.float32)
  gradient = gradient.astype(sent or wide)
  gradient_of_part = messages.reduce_scatter(gradient, over, dimension)
  return (gradient_of_part.astype(own),)


def _gather_forward(*arguments):
  residuals = None
  return _gather(*arguments), residuals


_gather.defvjp(_gather_forward, _gather_backward)
