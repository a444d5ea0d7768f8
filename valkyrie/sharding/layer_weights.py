"""Weights of layers that are split over devices; each layer gathers its own where it runs.

Inside `split_over(axes)`, in the body of a `jax.shard_map`, a device holds one part of each weight
of a layer. The layer gathers the whole weight in the dtype in which it computes. Backwards, the
gradient is summed over the devices in float32, and each keeps its part. `hk.remat` gathers again in
the backward pass, so that no device holds two layers whole.

The bytes that a device sends for each layer of P parameters, in bfloat16: 2 P in each forward pass,
recomputation included, and 4 P for the gradient.
"""

from collections.abc import Sequence
import contextlib
import contextvars
import functools

import jax
import jax.numpy as jnp

from valkyrie.sharding import messages, scopes
from valkyrie.types import Array, DType

_axes: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar('weight_axes', default=())


def split_over(axes: Sequence[str]) -> contextlib.AbstractContextManager[None]:
  """While tracing: weights of layers are split over these mesh axes; over none, they are whole."""
  return scopes.within(_axes, tuple(axes))


def axes() -> tuple[str, ...]:
  """The mesh axes over which the weights of layers are split; empty where they are whole."""
  return _axes.get()


def gathered(part: Array, shape: Sequence[int], cast: DType | None) -> Array:
  """The whole weight; this device holds a part of it along at most one dimension.

  Args:
    part: what the device holds; a weight of this shape is returned as it is.
    shape: of the whole.
    cast: the dtype to which every use casts it; None for its own.
  """
  for dimension, (held, size) in enumerate(zip(part.shape, shape, strict=True)):
    if held < size:
      return gather(part, axes(), dimension, cast or part.dtype)
  return part


def gather(part: Array, over: Sequence[str], dimension: int, cast: DType) -> Array:
  """The parts of the devices along these mesh axes, joined and cast."""
  return _gather(part, tuple(over), dimension, part.dtype, cast)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _gather(part: Array, over: tuple[str, ...], dimension: int, own: DType, cast: DType) -> Array:
  del own
  return messages.all_gather(part.astype(cast), over, dimension)


def _gather_forward(part, over, dimension, own, cast):
  return _gather(part, over, dimension, own, cast), None


def _gather_backward(over, dimension, own, cast, residuals, gradient):
  del cast, residuals
  wide = gradient.astype(jnp.promote_types(gradient.dtype, jnp.float32))
  return (messages.reduce_scatter(wide, over, dimension).astype(own),)


_gather.defvjp(_gather_forward, _gather_backward)
