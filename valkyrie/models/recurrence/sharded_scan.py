"""The recurrence over a chunk, on one device, or in pieces on several.

Each device scans its piece from zero. The effect of a piece on the state x before it is
x -> p x + s, with p the product of its decays and s its last state: two small arrays for each
device, gathered and composed by all. The state that enters a piece then grows through it by the
products of its decays, up to the first document that starts there.

Where decays differ from step to step, their product is the running product of a scan. Where all are
Λ̄, tables of powers are more exact: repeated products would accumulate up to t roundings in Λ̄^t, and
so would exp(t log Λ̄). Products in twofold precision, whose numbers are sums of two floats (Dekker
1971), fill two small tables of √T powers. Each power is then one product of two entries, accurate
to a few roundings at any t (`scripts/experiment power_errors`).
"""

import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from valkyrie.models.recurrence.scan import (
  Complex,
  Form,
  Number,
  diagonal_scan,
  read,
  state_after,
)
from valkyrie.sharding import sequence_parallel
from valkyrie.types import Array, DType


class Piece(NamedTuple):
  """The effect of a piece of time on the state x before it, decay · x + state."""

  decay: Number
  state: Number


def then(first: Piece, second: Piece) -> Piece:
  """The effect of the first piece, then of the second."""
  decay = second.decay * first.decay
  kept = second.decay * first.state
  state = kept + second.state
  return Piece(decay, state)


@jax.named_scope('scan')
def scan_chunk(
  growth: Number,
  inputs: Number,
  carry: Number,
  reset: Array,
  length: Array,
  dtype: DType,
  *,
  form: Form,
) -> tuple[Number, Number]:
  """(the states [T, B, P] of a chunk, or of this device's piece, the state [B, P] after the chunk).

  The arguments are those of `scan.read`. With pieces, `carry` is correct only on device 0, and so
  is the state after the chunk. A growth [P], the same at every step, must then be complex.
  """
  if not sequence_parallel.axes():
    return read(growth, inputs, carry, reset, length, dtype, form=form)
  zero = jax.tree.map(jnp.zeros_like, carry)
  known = sequence_parallel.select_first(carry, zero)
  states = diagonal_scan(growth, inputs, known, reset, form=form)
  real_growth = jax.tree.leaves(growth)[0]
  is_constant = real_growth.ndim == 1
  decays = _powers if is_constant else _running_product
  decay, grow = decays(growth, known, reset, length, form)
  last_state = state_after(states, known, length)
  piece = Piece(decay, last_state)
  without_state = piece._replace(state=zero)
  before, after = sequence_parallel.device_prefix_scan(piece, then, without_state)
  grown = grow(before.state)
  exact = states + grown
  rounded = jax.tree.map(lambda part: part.astype(dtype), exact)
  return rounded, after.state


def _running_product(
  growth,
  state,
  reset,
  length,
  form,
):
  """(the product of the decays up to `length`, a function that multiplies x by all up to each)."""
  zero = jax.tree.map(jnp.zeros_like, growth)
  one = jax.tree.map(jnp.ones_like, state)
  if isinstance(one, Complex):
    one = Complex(one.re, jnp.zeros_like(one.im))
  products = diagonal_scan(growth, zero, one, reset, form=form)

  def grow(x):
    x_of_steps = jax.tree.map(_over_steps, x)
    return products * x_of_steps

  decay = state_after(products, one, length)
  return decay, grow


def _over_steps(x: Array) -> Array:
  """[...] -> [1, ...]."""
  return x[None]


def _powers(
  growth,
  state,
  reset,
  length,
  form,
):
  """The same where every decay is 1 + growth, by tables."""
  time = reset.shape[0]
  steps = np.arange(time)[:, None]
  table = powers(growth, time)
  reset_steps = jnp.where(reset, steps, time)
  survives = jnp.min(reset_steps, axis=0)  # steps before the first reset
  passes = survives >= length
  passes_states = passes[:, None]
  lives = steps < survives[None]
  lives_states = lives[..., None]

  def grow(x):
    once = growth.map(_over_steps) * x + x
    grown = table.times(once, time)
    return grown.map(lambda part: jnp.where(lives_states, part, 0))

  whole_decay = table.at(length)
  decay = whole_decay.map(lambda part: jnp.where(passes_states, part, 0))
  return decay, grow


class Powers(NamedTuple):
  """Tables: Λ̄^r for r < q, [q, P], and Λ̄^(qk), [m, P]; Λ̄^(qk + r) is one product."""

  fine: Complex
  coarse: Complex

  def at(self, exponents: Array) -> Complex:
    """Λ̄ to these powers, int32 [B] -> [B, P]."""
    q = len(self.fine.re)
    k, r = jnp.divmod(exponents, q)
    coarse = self.coarse.map(lambda part: part[k])
    fine = self.fine.map(lambda part: part[r])
    return coarse * fine

  def times(self, x: Complex, count: int) -> Complex:
    """Λ̄^t x for t < count: [B, P] -> [count, B, P]."""
    fine = self.fine.map(lambda part: part[:, None])
    x_of_steps = x.map(_over_steps)
    fine_times_x = fine * x_of_steps  # [q, B, P]
    coarse = self.coarse.map(lambda part: part[:, None, None])
    fine_of_steps = fine_times_x.map(_over_steps)
    grown = coarse * fine_of_steps  # [m, q, B, P]

    def joined(part):
      _, _, *rest = part.shape
      powers_of_x = part.reshape(-1, *rest)
      return powers_of_x[:count]

    return grown.map(joined)


def powers(growth: Complex, highest: int) -> Powers:
  """The tables for the powers 0 to `highest` of the decay 1 + growth [P]; differentiable."""
  half_bits = (highest.bit_length() + 1) // 2
  size = 1 << half_bits  # q, about the root of `highest`
  count = highest // size + 1
  return _tables(size, count, growth)


class _Twofold(NamedTuple):
  """high + low, where low is the rounding error of high."""

  high: Array
  low: Array

  def __mul__(self, other: '_Twofold') -> '_Twofold':
    # Dekker's product: the halves of both factors have exact products, whose sum gives the error.
    product = self.high * other.high
    a, a_rest = _halves(self.high)
    b, b_rest = _halves(other.high)
    lost = a * b - product
    lost += a * b_rest
    lost += a_rest * b
    lost += a_rest * b_rest
    low_products = self.high * other.low + self.low * other.high
    low = lost + low_products
    return _Twofold(product, low).normalized()

  def __add__(self, other: '_Twofold') -> '_Twofold':
    # Knuth's sum: what the addition of the high parts loses is exact.
    total = self.high + other.high
    added = total - self.high
    kept = total - added
    lost = self.high - kept
    lost_of_other = other.high - added
    low = (lost + lost_of_other) + (self.low + other.low)
    return _Twofold(total, low).normalized()

  def __sub__(self, other: '_Twofold') -> '_Twofold':
    negative = _Twofold(-other.high, -other.low)
    return self + negative

  def normalized(self) -> '_Twofold':
    # Exact where |low| <= |high|: high + low stays as it is, and low becomes the error of rounding.
    high = self.high + self.low
    added = high - self.high
    low = self.low - added
    return _Twofold(high, low)


def _exactly(x: Array) -> Any:
  """x as a twofold number. A `Complex` may have such parts: it only multiplies and adds them."""
  return _Twofold(x, jnp.zeros_like(x))


def _halves(x: Array) -> tuple[Array, Array]:
  """x as a sum of two numbers of half its bits each, whose products are exact."""
  info = jnp.finfo(x.dtype)
  half_mantissa = (info.nmant - 1) // 2
  first = lax.reduce_precision(x, info.nexp, half_mantissa)
  return first, x - first


def _powers_of(base: Any, count: int) -> Any:
  """1, z, .., z^(count - 1) of a twofold complex z: leaves [P] -> [count, P]."""
  zero = jnp.zeros_like(base.re.high)
  one = Complex(_exactly(zero + 1), _exactly(zero))

  def repeat(first, z):
    repeated = jnp.broadcast_to(z, (count - 1, *z.shape))
    first = _over_steps(first)
    return jnp.concatenate([first, repeated])

  factors = jax.tree.map(repeat, one, base)
  return lax.associative_scan(lambda a, b: a * b, factors)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _tables(size: int, count: int, growth: Complex) -> Powers:
  # Behind a barrier, since XLA would fold (1 + g) - 1 to g.
  ones = jnp.ones_like(growth.re)
  one = _exactly(lax.optimization_barrier(ones))
  real = one + _exactly(growth.re)
  imaginary = _exactly(growth.im)
  decay = Complex(real, imaginary)
  powers_to_q = _powers_of(decay, size + 1)
  last = jax.tree.map(lambda part: part[-1], powers_to_q)  # Λ̄^q
  powers_of_last = _powers_of(last, count)

  def rounded(part):
    return part.high

  below_q = powers_to_q.map(rounded)
  fine = below_q.map(lambda part: part[:-1])
  coarse = powers_of_last.map(rounded)
  return Powers(fine, coarse)


def _tables_forward(size, count, growth):
  tables = _tables(size, count, growth)
  return tables, tables


def _tables_backward(size, count, tables, cotangent):
  """d Λ̄^n = n Λ̄^(n - 1) dΛ̄; the tables hold all factors but the last."""

  def pull_back(lower, exponents, g):
    n = jnp.asarray(exponents, g.re.dtype)
    n_of_states = n[:, None]
    products = lower.conj() * g
    return products.map(lambda part: jnp.sum(n_of_states * part, axis=0))

  last_fine = tables.fine.map(lambda part: part[-1:])
  lower = jax.tree.map(lambda part: part[:-1], tables)
  above = jax.tree.map(lambda part: part[1:], cotangent)
  fine_exponents = jnp.arange(1, size)
  coarse_numbers = jnp.arange(1, count)
  coarse_exponents = size * coarse_numbers
  d_fine = pull_back(lower.fine, fine_exponents, above.fine)
  coarse_lower = lower.coarse * last_fine
  d_coarse = pull_back(coarse_lower, coarse_exponents, above.coarse)
  d_growth = d_fine + d_coarse
  return (d_growth,)


_tables.defvjp(_tables_forward, _tables_backward)
