"""The diagonal linear recurrence, the only loop of a state-space layer.

    x_t = keep_t (1 + g_t) x_{t-1} + b_t        keep_t = 0 where a document starts, else 1

A decay of 1 + g is given by its growth g, which is -1e-7 for a time constant of 10^7 tokens: the
decay itself, rounded to float32, would be wrong by up to 60%. No form ever rounds 1 + g.

A document start selects: the state before it is dropped, and never multiplied by zero or subtracted
from itself. A product rounds the next document by the size of this one, and 0 x inf is NaN.

The state is an array, or complex as a pair of float32 arrays: on a CPU, pairs run at twice the
speed of complex64 and give the same bits. The forms differ in their order of arithmetic:

  sequential    one step after the other, in compensated sums (Kahan 1965); the most accurate, and
                the fastest on a CPU
  associative   a parallel prefix of depth O(log T), for TPUs and GPUs: the effects of blocks of a
                few steps are scanned alike, then the steps of all blocks at once
"""

from collections.abc import Callable
import functools
import itertools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from valkyrie.sharding.mesh import platform
from valkyrie.types import Array


class Complex(NamedTuple):
  """A complex array as its real and imaginary parts, of one shape and dtype."""

  re: Array
  im: Array

  def __mul__(self, other: 'Complex') -> 'Complex':
    return Complex(self.re * other.re - self.im * other.im, self.re * other.im + self.im * other.re)

  def __add__(self, other: 'Complex') -> 'Complex':
    return Complex(self.re + other.re, self.im + other.im)

  def __sub__(self, other: 'Complex') -> 'Complex':
    return Complex(self.re - other.re, self.im - other.im)

  def conj(self) -> 'Complex':
    return Complex(self.re, -self.im)

  def map(self, f: Callable[[Array], Array]) -> 'Complex':
    """f applied to each part."""
    return Complex(f(self.re), f(self.im))


_BLOCK = 8  # steps, of the associative form
Number = Any  # a real array, or a `Complex`: `*`, `+`, `-` and `conj()` act on both


def _unless(reset: Array, x: Number) -> Number:
  """x, or zero where `reset`."""
  return jax.tree.map(lambda part: jnp.where(reset, 0, part), x)


def _sequential(growth: Number, reset: Array, inputs: Number, *, reverse: bool) -> Number:
  varies = _length(growth) > 1

  def step(carry, now):
    state, lost = _unless(now['reset'], carry)
    # Kahan: what the addition below loses is added to the next change.
    change = now.get('growth', constant) * state + now['input'] + lost
    after = state + change
    return (after, change - (after - state)), after

  constant = jax.tree.map(lambda part: part[0], growth)
  over_time = {'reset': reset, 'input': inputs, **({'growth': growth} if varies else {})}
  zero = jax.tree.map(lambda part: jnp.zeros_like(part[0]), inputs)
  return lax.scan(step, (zero, zero), over_time, reverse=reverse)[1]


def _associative(growth: Number, reset: Array, inputs: Number, *, reverse: bool) -> Number:
  time = _length(inputs)
  count = -(-_length(inputs) // _BLOCK)
  if time == 1:
    return inputs

  def cut(part):
    """Step s of every block, for each s: [T, B, P] -> a list of [T / _BLOCK, B, P]."""
    if part.shape[0] == 1:
      return [part] * _BLOCK
    padding = [(0, count * _BLOCK - time), *[(0, 0)] * (part.ndim - 1)]
    padded = jnp.pad(part, padding)
    return [lax.slice_in_dim(padded, s, None, _BLOCK) for s in range(_BLOCK)]

  def after(state, now):
    r, g, x = now
    return jax.tree.map(functools.partial(jnp.where, r), x, state + (x + g * state))

  def then(first, second):
    (r1, g1, x1), (r2, g2, _) = first, second
    # (1 + g2)(1 + g1) = 1 + (g1 + g2 + g2 g1). The two smaller terms of a long memory are added
    # first, and no growth across a reset is read: a growth that is constant stays one number.
    return r1 | r2, g1 + g2 + g2 * g1, after(x1, second)

  leaves, structure = jax.tree.flatten((reset, growth, inputs))
  steps = [structure.unflatten(now) for now in zip(*map(cut, leaves), strict=True)]
  steps = steps[::-1] if reverse else steps
  r, g, x = functools.reduce(then, steps)
  ends = _associative(g, r, x, reverse=reverse)

  def begin(part):
    zero = jnp.zeros_like(part[:1])
    return jnp.concatenate([part[1:], zero] if reverse else [zero, part[:-1]])

  states = list(itertools.accumulate(steps, after, initial=jax.tree.map(begin, ends)))[1:]
  states = states[::-1] if reverse else states
  return jax.tree.map(
    lambda *parts: jnp.stack(parts, axis=1).reshape(-1, *parts[0].shape[1:])[:time], *states
  )


FORMS = {'sequential': _sequential, 'associative': _associative}


def _length(x: Number) -> int:
  return jax.tree.leaves(x)[0].shape[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _recurrence(form: str, reverse: bool, growth: Number, reset: Array, inputs: Number) -> Number:
  return FORMS[form](growth, reset, inputs, reverse=reverse)


def _recurrence_forward(form, reverse, growth, reset, inputs):
  states = _recurrence(form, reverse, growth, reset, inputs)
  return states, (growth, reset, states)


def _recurrence_backward(form, reverse, residuals, cotangent):
  """The adjoint of a linear recurrence: the same recurrence, in the other direction of time.

  With c the cotangent of the states and h_t = c_t + keep_{t+1} conj(1 + g_{t+1}) h_{t+1}, the
  cotangent of b_t is h_t, of g_t keep_t conj(x_{t-1}) h_t. Only the states are kept. The rule
  applies to its own recurrence, too: derivatives of every order are computed in this form.
  """
  growth, reset, states = residuals
  first = slice(None, 1)
  rest = slice(1, None)
  but_last = slice(None, -1)
  if reverse:
    first = slice(-1, None)
    rest = slice(None, -1)
    but_last = slice(1, None)

  def join(sooner, later):
    return jnp.concatenate([later, sooner] if reverse else [sooner, later])

  next_reset = join(reset[rest], jnp.ones_like(reset[first]))
  later = growth.conj()
  if _length(growth) > 1:
    later = jax.tree.map(lambda part: join(part[rest], part[first]), later)
  adjoint = _recurrence(form, not reverse, later, next_reset, cotangent)
  before = _unless(reset[rest], jax.tree.map(lambda part: part[but_last], states))
  products = before.conj() * jax.tree.map(lambda part: part[rest], adjoint)

  def of_growth(g, part):
    if g.shape[0] > 1:
      part = join(jnp.zeros_like(part[first]), part)  # the first input holds x_0
    summed = [axis for axis in range(part.ndim) if g.shape[axis] == 1 != part.shape[axis]]
    return jnp.sum(part, axis=summed, keepdims=True)

  d_growth = jax.tree.map(of_growth, growth, products)
  return d_growth, None, adjoint


_recurrence.defvjp(_recurrence_forward, _recurrence_backward)


@jax.named_scope('scan')
def diagonal_scan(
  growth: Number, inputs: Number, initial: Number, reset: Array, *, form: str | None
) -> Number:
  """The states x_1 to x_T, [T, B, P], from x_0 = `initial` [B, P] and the inputs b [T, B, P].

  The growth g is [T, B, P], or [P], the same at every step. Where `reset`, bool [T, B], the state
  before the step is replaced by zero. `form` is a key of `FORMS`; None takes the fastest.
  """
  reset = reset[..., None]
  growth = jax.tree.map(lambda part: part if part.ndim == 3 else part[None, None], growth)
  first = jax.tree.map(lambda part: part[0], growth)
  # x_0 enters through the first input: every form continues a chunk by this line.
  carried = _unless(reset[0], first * initial + initial)
  inputs = jax.tree.map(lambda part, x: part.at[0].add(x), inputs, carried)
  fastest = 'sequential' if platform() == 'cpu' else 'associative'
  return _recurrence(form or fastest, False, growth, reset, inputs)


def begun(growth: Number, inputs: Number, first: Number | None, reset: Array) -> Number:
  """The inputs [T, B, P] where documents begin with the state `first` [P] instead of zero."""
  if first is None:
    return inputs
  pair = (growth, first)
  growth, first = jax.tree.map(lambda part: part if part.ndim == 3 else part[None, None], pair)
  entering = growth * first + first
  return jax.tree.map(lambda b, x: jnp.where(reset[..., None], b + x, b), inputs, entering)


def state_after(states: Number, initial: Number, length: Array) -> Number:
  """The state [B, P] after `length` [B] of the states [T, B, P]; `initial` after none."""

  def pick(part, first):
    last = jnp.take_along_axis(part, jnp.maximum(length - 1, 0)[None, :, None], axis=0)[0]
    return jnp.where(length[:, None] > 0, last, first)

  return jax.tree.map(pick, states, initial)
