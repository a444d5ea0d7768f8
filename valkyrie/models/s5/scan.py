"""The diagonal linear recurrence, the only loop of a state-space layer.

    x_t = keep_t · Λ̄ · x_{t-1} + b_t        keep_t = 0 where a document starts, else 1

The complex state is a pair (re, im) of float32 arrays: on a CPU, pairs run at twice the speed of
complex64 and give the same bits. The forms compute one function in different orders of arithmetic:

  sequential    one step after the other; the most accurate, and the fastest on a CPU
  associative   a parallel prefix of depth O(log T); for TPUs and GPUs
"""

from collections.abc import Callable
import functools
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from valkyrie.sharding.target import platform
from valkyrie.types import Array


class Complex(NamedTuple):
  """A complex array as its real and imaginary parts, of one shape and dtype."""

  re: Array
  im: Array

  def __mul__(self, other: 'Complex') -> 'Complex':
    return Complex(self.re * other.re - self.im * other.im, self.re * other.im + self.im * other.re)

  def __add__(self, other: 'Complex') -> 'Complex':
    return Complex(self.re + other.re, self.im + other.im)

  def conj(self) -> 'Complex':
    return Complex(self.re, -self.im)

  def map(self, f: Callable[[Array], Array]) -> 'Complex':
    """f applied to each part."""
    return Complex(f(self.re), f(self.im))


def _sequential(decay: Complex, keep: Array, inputs: Complex, *, reverse: bool) -> Complex:
  def step(state, now):
    keep_t, input_t = now
    state = (decay * state).map(lambda part: keep_t * part) + input_t
    return state, state

  zero = inputs.map(lambda part: jnp.zeros_like(part[0]))
  return lax.scan(step, zero, (keep, inputs), reverse=reverse)[1]


def _associative(decay: Complex, keep: Array, inputs: Complex, *, reverse: bool) -> Complex:
  def then(first, second):
    return second[0] * first[0], second[0] * first[1] + second[1]

  decays = decay.map(lambda part: keep * part[None])
  return lax.associative_scan(then, (decays, inputs), reverse=reverse)[1]


FORMS = {'sequential': _sequential, 'associative': _associative}


def default_form() -> str:
  """The fastest form on the platform of the target devices."""
  return 'sequential' if platform() == 'cpu' else 'associative'


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _recurrence(form: str, decay: Complex, keep: Array, inputs: Complex) -> Complex:
  return FORMS[form](decay, keep, inputs, reverse=False)


def _recurrence_forward(form, decay, keep, inputs):
  states = _recurrence(form, decay, keep, inputs)
  return states, (decay, keep, states)


def _recurrence_backward(form, residuals, cotangent):
  """The adjoint of a linear recurrence: the same recurrence, backwards in time.

  With g the cotangent of the states and h_t = g_t + keep_{t+1} conj(Λ̄) h_{t+1}, the cotangent of
  b_t is h_t, and that of Λ̄ is the sum over t of keep_t conj(x_{t-1}) h_t. Only the states are kept.
  """
  decay, keep, states = residuals
  later = jnp.concatenate([keep[1:], jnp.zeros_like(keep[:1])])
  adjoint = FORMS[form](decay.conj(), later, cotangent, reverse=True)
  products = states.map(lambda part: keep[1:] * part[:-1]).conj() * adjoint.map(lambda h: h[1:])
  d_decay = products.map(lambda part: jnp.sum(part, axis=(0, 1))[None])
  return d_decay, jnp.zeros_like(keep), adjoint


_recurrence.defvjp(_recurrence_forward, _recurrence_backward)


def diagonal_scan(
  decay: Complex, inputs: Complex, initial: Complex, reset: Array, *, form: str
) -> Complex:
  """Computes x_t = keep_t Λ̄ x_{t-1} + b_t from a given state.

  Args:
    decay: Λ̄ [P], the same at every step.
    inputs: b [T, B, P], time first.
    initial: x_0 [B, P], the state before the first step.
    reset: bool [T, B], true where the state before the step is replaced by zero.
    form: a key of `FORMS`.

  Returns:
    The states [T, B, P], x_1 to x_T.
  """
  keep = jnp.where(reset, 0.0, 1.0).astype(inputs.re.dtype)[..., None]
  decay = decay.map(lambda part: part[None])
  # x_0 enters through the first input: every form continues a chunk by this line.
  carried = (decay * initial).map(lambda part: keep[0] * part)
  inputs = Complex(inputs.re.at[0].add(carried.re), inputs.im.at[0].add(carried.im))
  return _recurrence(form, decay, keep, inputs)


def state_after(states: Complex, initial: Complex, length: Array) -> Complex:
  """The state [B, P] after `length` [B] of the states [T, B, P]; `initial` after none."""

  def pick(part, first):
    last = jnp.take_along_axis(part, jnp.maximum(length - 1, 0)[None, :, None], axis=0)[0]
    return jnp.where(length[:, None] > 0, last, first)

  return Complex(pick(states.re, initial.re), pick(states.im, initial.im))
