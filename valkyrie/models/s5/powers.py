"""Powers of a complex decay, precise to a few roundings however high they are.

Λ̄^t by repeated products in float32 is off by up to t roundings, and exp(t log Λ̄) by as many: the
phase of 8192 steps would be good to three digits. So products are made in twice the precision, as
unevaluated sums of two floats (Dekker 1971), and only in two small tables of √T powers, of which
each power is one product.
"""

import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from valkyrie.models.s5.scan import Complex
from valkyrie.types import Array


class _Twofold(NamedTuple):
  """high + low, where low is what rounding left out of high."""

  high: Array
  low: Array

  def __mul__(self, other: '_Twofold') -> '_Twofold':
    product = self.high * other.high
    (a, a_rest), (b, b_rest) = _halves(self.high), _halves(other.high)
    lost = ((a * b - product) + a * b_rest + a_rest * b) + a_rest * b_rest
    return _Twofold(product, lost + (self.high * other.low + self.low * other.high)).settled()

  def __add__(self, other: '_Twofold') -> '_Twofold':
    total = self.high + other.high
    added = total - self.high
    lost = (self.high - (total - added)) + (other.high - added)
    return _Twofold(total, lost + (self.low + other.low)).settled()

  def __sub__(self, other: '_Twofold') -> '_Twofold':
    return self + _Twofold(-other.high, -other.low)

  def settled(self) -> '_Twofold':
    high = self.high + self.low
    return _Twofold(high, self.low - (high - self.high))


def _exactly(x: Array) -> Any:  # in a `Complex`, which knows of parts that they multiply and add
  return _Twofold(x, jnp.zeros_like(x))


def _halves(x: Array) -> tuple[Array, Array]:
  """x as a sum of two numbers with half of its bits each, whose products are exact."""
  about = jnp.finfo(x.dtype)
  first = lax.reduce_precision(x, about.nexp, (about.nmant - 1) // 2)
  return first, x - first


class Powers(NamedTuple):
  """Tables: Λ̄^r for r < q, [q, P], and Λ̄^(qk), [m, P], so that Λ̄^(qk + r) is one product."""

  fine: Complex
  coarse: Complex

  def at(self, exponents: Array) -> Complex:
    """Λ̄ to these powers, int32 [B] -> [B, P]."""
    k, r = jnp.divmod(exponents, self.fine.re.shape[0])
    return self.coarse.map(lambda part: part[k]) * self.fine.map(lambda part: part[r])

  def grown(self, x: Complex, count: int) -> Complex:
    """Λ̄^t x for t < count: [B, P] -> [count, B, P]."""
    started = self.fine.map(lambda part: part[:, None]) * x.map(lambda part: part[None])
    all_of_it = self.coarse.map(lambda part: part[:, None, None]) * started.map(
      lambda part: part[None]
    )
    return all_of_it.map(lambda part: part.reshape(-1, *part.shape[2:])[:count])


def powers(decay: Complex, highest: int) -> Powers:
  """The tables for the powers 0 to `highest` of a decay [P]; differentiable."""
  size = 1 << (highest.bit_length() + 1) // 2
  return _tables(size, highest // size + 1, decay)


def _powers_of(base: Any, count: int) -> Any:
  """1, z, .., z^(count - 1) of a twofold complex z: leaves [P] -> [count, P]."""
  zero = jnp.zeros_like(base.re.high)
  one = Complex(_exactly(zero + 1), _exactly(zero))

  def then_many(first, z):
    return jnp.concatenate([first[None], jnp.broadcast_to(z, (count - 1, *z.shape))])

  factors = jax.tree.map(then_many, one, base)
  return lax.associative_scan(lambda a, b: a * b, factors)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _tables(size: int, count: int, decay: Complex) -> Powers:
  fine = _powers_of(decay.map(_exactly), size + 1)
  coarse = _powers_of(jax.tree.map(lambda part: part[-1], fine), count)
  return Powers(fine.map(lambda part: part.high[:-1]), coarse.map(lambda part: part.high))


def _tables_forward(size, count, decay):
  tables = _tables(size, count, decay)
  return tables, tables


def _tables_backward(size, count, tables, cotangent):
  """d Λ̄^n = n Λ̄^(n - 1) dΛ̄, of which the tables have all but the last factor."""

  def pulled_back(lower, exponents, g):
    n = jnp.asarray(exponents, g.re.dtype)[:, None]
    return (lower.conj() * g).map(lambda part: jnp.sum(n * part, axis=0))

  last = tables.fine.map(lambda part: part[-1:])
  fine = pulled_back(
    tables.fine.map(lambda part: part[:-1]),
    jnp.arange(1, size),
    cotangent.fine.map(lambda part: part[1:]),
  )
  coarse = pulled_back(
    tables.coarse.map(lambda part: part[:-1]) * last,
    size * jnp.arange(1, count),
    cotangent.coarse.map(lambda part: part[1:]),
  )
  return (fine + coarse,)


_tables.defvjp(_tables_forward, _tables_backward)
