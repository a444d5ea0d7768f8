"""Gathers and scatters over several mesh axes, inside a `jax.shard_map`.

A message goes over at most two axes: over three axes of a torus, libtpu 0.0.42 makes an all-reduce
of a gather or a scatter, which sends twice the bytes. A gather begins with the innermost axes, and
leaves a smaller array for the other messages. A scatter ends with them.
"""

from collections.abc import Callable, Sequence

from jax import lax

from valkyrie.types import Array

_AT_ONCE = 2


def all_gather(part: Array, axes: Sequence[str], dimension: int) -> Array:
  """The array whose parts, along a dimension, the devices of these axes hold, outermost first."""
  for first in reversed(range(0, len(axes), _AT_ONCE)):
    over = tuple(axes[first : first + _AT_ONCE])
    part = lax.all_gather(part, over, axis=dimension, tiled=True)
  return part


def reduce_scatter(x: Array, axes: Sequence[str], dimension: int) -> Array:
  """This device's shard of the sum of x over `axes`; shards are ordered as in `all_gather`."""
  for first in range(0, len(axes), _AT_ONCE):
    over = tuple(axes[first : first + _AT_ONCE])
    x = lax.psum_scatter(x, over, scatter_dimension=dimension, tiled=True)
  return x


def bit_for_bit(send: Callable[[Array], Array], x: Array) -> Array:
  """What `send` makes of x by a sum in which one device has each number, and the others have 0.

  The bits are summed in place of the numbers: a sum of floats loses the sign of -0.
  """
  bits = lax.bitcast_convert_type(x, f'uint{8 * x.dtype.itemsize}')
  sent = send(bits)
  return lax.bitcast_convert_type(sent, x.dtype)
