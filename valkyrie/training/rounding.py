"""Updates of parameters that are stored in bfloat16."""

from collections.abc import Callable

import jax
from jax import lax
import jax.numpy as jnp

from valkyrie.types import Array, Params


def wide(params: Params) -> Params:
  """The parameters in float32, or wider."""

  def widened(leaf):
    dtype = jnp.promote_types(leaf.dtype, jnp.float32)
    return leaf.astype(dtype)

  return jax.tree.map(widened, params)


def stored(updated: Params, params: Params, make_key: Callable[[], Array]) -> Params:
  """Updated parameters in the dtypes of `params`; rounding to bfloat16 is stochastic.

  They are rounded up or down at random, with the nearer neighbor more likely, so that the expected
  value is exact: most updates are smaller than half of a bfloat16's last digit, and rounding to the
  nearest would lose them (Gupta et al. 2015, arXiv 1502.02551).
  """
  dtypes = [leaf.dtype for leaf in jax.tree.leaves(params)]
  if jnp.bfloat16 not in dtypes:
    return updated
  leaves, structure = jax.tree.flatten(updated)
  key = make_key()
  rounded = [
    _at_random(leaf, jax.random.fold_in(key, number)) if dtype == jnp.bfloat16 else leaf
    for number, (leaf, dtype) in enumerate(zip(leaves, dtypes, strict=True))
  ]
  return structure.unflatten(rounded)


def _at_random(x: Array, key: Array) -> Array:
  """float32 -> bfloat16, rounded at random."""
  # bfloat16 is the upper half of the bits: a uniform number added below them carries over with the
  # probability of the lost part.
  bits = lax.bitcast_convert_type(x, jnp.uint32)
  noise = jax.random.bits(key, x.shape, jnp.uint16)
  bits += noise.astype(jnp.uint32)
  upper_bits = bits & jnp.uint32(0xFFFF0000)
  upper = lax.bitcast_convert_type(upper_bits, jnp.float32)
  return upper.astype(jnp.bfloat16)
