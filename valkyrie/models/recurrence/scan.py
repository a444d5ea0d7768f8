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
  associative   a parallel prefix of depth O(log T), for TPUs and GPUs: blocks of a few steps are
                scanned by the same form, then the steps of all blocks at once
"""

from collections.abc import Callable
import functools
import itertools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from valkyrie.sharding.mesh import platform
from valkyrie.types import Array, DType


class Complex(NamedTuple):
  """A complex array as its real and imaginary parts, of one shape and dtype."""

  re: Array
  im: Array

  def __mul__(self, other: 'Complex') -> 'Complex':
    a = self.re
    b = self.im
    c = other.re
    d = other.im
    re = a * c - b * d
    im = a * d + b * c
    return Complex(re, im)

  def __add__(self, other: 'Complex') -> 'Complex':
    re = self.re + other.re
    im = self.im + other.im
    return Complex(re, im)

  def __sub__(self, other: 'Complex') -> 'Complex':
    re = self.re - other.re
    im = self.im - other.im
    return Complex(re, im)

  def conj(self) -> 'Complex':
    return Complex(self.re, -self.im)

  def map(self, f: Callable[[Array], Array]) -> 'Complex':
    """f applied to each part."""
    re = f(self.re)
    im = f(self.im)
    return Complex(re, im)


_BLOCK = 8  # steps, of the associative form
Number = Any  # a real array, or a `Complex`: `*`, `+`, `-` and `conj()` act on both
# A key of `FORMS`, or a function that takes the arguments of `read`; None takes the fastest.
Form = str | Callable[..., tuple[Number, Number]] | None


def _unless(reset: Array, x: Number) -> Number:
  """x, or zero where `reset`."""
  return jax.tree.map(lambda part: jnp.where(reset, 0, part), x)


def _sequential(growth: Number, reset: Array, inputs: Number, *, reverse: bool) -> Number:
  over_time = {'reset': reset, 'input': inputs}
  constant = jax.tree.map(lambda part: part[0], growth)
  if _length(growth) > 1:
    over_time['growth'] = growth

  def step(carry, now):
    state, lost = _unless(now['reset'], carry)
    # Kahan: what the addition below loses is added to the next change.
    growth = now.get('growth', constant)
    decayed = growth * state
    change = decayed + now['input'] + lost
    after = state + change
    added = after - state
    lost = change - added
    carry = (after, lost)
    return carry, after

  zero = jax.tree.map(lambda part: jnp.zeros_like(part[0]), inputs)
  initial = (zero, zero)
  _, states = lax.scan(step, initial, over_time, reverse=reverse)
  return states


def _associative(growth: Number, reset: Array, inputs: Number, *, reverse: bool) -> Number:
  """Three passes: the effect of each block, the state at its end, then the states of its steps."""
  time = _length(inputs)
  if time == 1:
    return inputs
  steps = _steps_of_blocks((reset, growth, inputs), time)
  if reverse:
    steps.reverse()
  blocks = functools.reduce(_then, steps)
  if platform() == 'gpu':
    # Without the barrier, XLA computes the blocks again for every fusion that reads them.
    blocks = lax.optimization_barrier(blocks)
  block_reset, block_growth, block_input = blocks
  ends = _associative(block_growth, block_reset, block_input, reverse=reverse)

  def before_block(part):
    zero = jnp.zeros_like(part[:1])
    if reverse:
      later = part[1:]
      return jnp.concatenate([later, zero])
    earlier = part[:-1]
    return jnp.concatenate([zero, earlier])

  begins = jax.tree.map(before_block, ends)
  _, *states = itertools.accumulate(steps, _after, initial=begins)
  if reverse:
    states.reverse()

  def joined(*parts):
    by_block = jnp.stack(parts, axis=1)
    _, _, *rest = by_block.shape
    by_step = by_block.reshape(-1, *rest)
    return by_step[:time]

  return jax.tree.map(joined, *states)


def _steps_of_blocks(tree: Any, time: int) -> list[Any]:
  """Step s of every block, for each s: leaves [T, B, P] -> a list of leaves [T / _BLOCK, B, P]."""
  missing = -time % _BLOCK

  def cut(part):
    if part.shape[0] == 1:  # the same at every step
      return [part] * _BLOCK
    padding = [(0, 0)] * part.ndim
    padding[0] = (0, missing)
    padded = jnp.pad(part, padding)
    return [lax.slice_in_dim(padded, s, None, _BLOCK) for s in range(_BLOCK)]

  leaves, structure = jax.tree.flatten(tree)
  cut_leaves = [cut(leaf) for leaf in leaves]
  by_step = zip(*cut_leaves, strict=True)
  return [structure.unflatten(step) for step in by_step]


def _after(state: Number, step: tuple[Array, Number, Number]) -> Number:
  """The state after a step of (reset, growth, input)."""
  r, g, x = step
  select = functools.partial(jnp.where, r)
  change = x + g * state
  return jax.tree.map(select, x, state + change)


def _then(first: Any, second: Any) -> Any:
  """The step that has the effect of two steps, one after the other."""
  r1, g1, x1 = first
  r2, g2, _ = second
  # (1 + g2)(1 + g1) = 1 + (g1 + g2 + g2 g1). The two smaller terms of a long memory are added
  # first, and no growth across a reset is read: a growth that is constant stays one number.
  reset = r1 | r2
  growth = g1 + g2 + g2 * g1
  added = _after(x1, second)
  return reset, growth, added


FORMS = {'sequential': _sequential, 'associative': _associative}


def _length(x: Number) -> int:
  leaves = jax.tree.leaves(x)
  return len(leaves[0])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _recurrence(
  form: str,
  reverse: bool,
  growth: Number,
  reset: Array,
  inputs: Number,
) -> Number:
  return FORMS[form](growth, reset, inputs, reverse=reverse)


def _recurrence_forward(
  form,
  reverse,
  growth,
  reset,
  inputs,
):
  states = _recurrence(form, reverse, growth, reset, inputs)
  if _length(growth) == 1:
    # A layer that saves them needs its inputs no more, which a growth that changes would.
    states = jax.tree.map(lambda part: checkpoint_name(part, 'states'), states)
  residuals = (growth, reset, states)
  return states, residuals


def _recurrence_backward(form, reverse, residuals, cotangent):
  """The adjoint of a linear recurrence: the same recurrence, in the other direction of time.

  With c the cotangent of the states and h_t = c_t + keep_{t+1} conj(1 + g_{t+1}) h_{t+1}, the
  cotangent of b_t is h_t, the cotangent of g_t is keep_t conj(x_{t-1}) h_t. Only the states are
  saved for it. The rule applies to its own recurrence, too, so derivatives of every order exist.
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
    if reverse:
      return jnp.concatenate([later, sooner])
    return jnp.concatenate([sooner, later])

  def next_step(part):
    return join(part[rest], part[first])

  end = jnp.ones_like(reset[first])
  next_reset = join(reset[rest], end)
  later = growth.conj()
  if _length(growth) > 1:
    later = jax.tree.map(next_step, later)
  adjoint = _recurrence(form, not reverse, later, next_reset, cotangent)
  before = jax.tree.map(lambda part: part[but_last], states)
  kept = _unless(reset[rest], before)
  adjoint_after = jax.tree.map(lambda part: part[rest], adjoint)
  products = kept.conj() * adjoint_after

  def growth_cotangent(g, part):
    if g.shape[0] > 1:
      zero = jnp.zeros_like(part[first])  # the first input holds x_0
      part = join(zero, part)
    summed = _broadcast_axes(g.shape, part.shape)
    return jnp.sum(part, axis=summed, keepdims=True)

  d_growth = jax.tree.map(growth_cotangent, growth, products)
  d_reset = None
  return d_growth, d_reset, adjoint


def _broadcast_axes(shape: tuple[int, ...], wide_shape: tuple[int, ...]) -> list[int]:
  """The axes along which an array of a shape is repeated to fill the wide one."""
  axes = []
  for axis, size in enumerate(shape):
    is_repeated = size == 1 and wide_shape[axis] != 1
    if is_repeated:
      axes.append(axis)
  return axes


_recurrence.defvjp(_recurrence_forward, _recurrence_backward)


@jax.named_scope('scan')
def diagonal_scan(
  growth: Number,
  inputs: Number,
  initial: Number,
  reset: Array,
  *,
  form: Form,
) -> Number:
  """The states x_1 to x_T, [T, B, P], from x_0 = `initial` [B, P] and the inputs b [T, B, P].

  The growth g is [T, B, P], or [P], the same at every step. Where `reset`, bool [T, B], the state
  before the step is replaced by zero.
  """
  growth = _over_time(growth)
  if callable(form):
    time, rows = reset.shape
    leaves = jax.tree.leaves(inputs)
    whole = jnp.full((rows,), time)
    states, _ = form(growth, inputs, initial, reset, whole, leaves[0].dtype)
    return states
  reset = reset[..., None]
  first = jax.tree.map(lambda part: part[0], growth)
  # x_0 enters through the first input: every form continues a chunk by these lines.
  decayed = first * initial + initial
  carried = _unless(reset[0], decayed)
  inputs = jax.tree.map(lambda part, x: part.at[0].add(x), inputs, carried)
  if form is None:
    form = 'sequential' if platform() == 'cpu' else 'associative'
  return _recurrence(form, False, growth, reset, inputs)


def read(
  growth: Number,
  inputs: Number,
  initial: Number,
  reset: Array,
  length: Array,
  dtype: DType,
  *,
  form: Form,
) -> tuple[Number, Number]:
  """(the states of `diagonal_scan` in a dtype, the exact state [B, P] after `length` [B] steps)."""
  if callable(form):
    return form(_over_time(growth), inputs, initial, reset, length, dtype)
  states = diagonal_scan(growth, inputs, initial, reset, form=form)
  after = state_after(states, initial, length)
  rounded = jax.tree.map(lambda part: part.astype(dtype), states)
  return rounded, after


def begun(growth: Number, inputs: Number, first: Number | None, reset: Array) -> Number:
  """The inputs [T, B, P] where documents begin with the state `first` [P] instead of zero."""
  if first is None:
    return inputs
  first = _over_time(first)
  growth = _over_time(growth)
  entering = growth * first + first
  starts = reset[..., None]

  def begin(b, x):
    return jnp.where(starts, b + x, b)

  return jax.tree.map(begin, inputs, entering)


def _over_time(x: Number) -> Number:
  """[T, B, P] as it is, and [P] as [1, 1, P], the same at every step."""
  leaves = jax.tree.leaves(x)
  if leaves[0].ndim == 3:
    return x
  return jax.tree.map(lambda part: part[None, None], x)


def state_after(states: Any, initial: Any, length: Array) -> Any:
  """The state [B, ...] after `length` [B] of the states [T, B, ...]; `initial` after none."""

  def pick(part, first):
    of_rows = tuple(range(1, first.ndim))
    last_place = jnp.expand_dims(jnp.maximum(length - 1, 0), of_rows)
    last = jnp.take_along_axis(part, last_place[None], axis=0)
    is_read = jnp.expand_dims(length > 0, of_rows)
    return jnp.where(is_read, last[0], first)

  return jax.tree.map(pick, states, initial)
