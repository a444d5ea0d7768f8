"""Every form of the recurrence against the equation, in float64 on the host."""

import functools

import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from valkyrie.models.recurrence import scan
from valkyrie.models.recurrence.scan import Complex


def reference(growth, inputs, initial, reset):
  """x_t = keep_t (1 + g_t) x_{t-1} + b_t, one step after the other in complex128."""
  state, states = initial.astype(np.complex128), []
  growths = np.broadcast_to(growth.astype(np.complex128), inputs.shape)
  for g, b, r in zip(growths, inputs, reset, strict=True):
    state = np.where(r[:, None], 0, state + g * state) + b
    states.append(state)
  return np.stack(states)


def problem(time, rows=2, size=3, seed=0, varies=False):
  random = np.random.default_rng(seed)

  def normal(*shape):
    return random.normal(size=shape) + 1j * random.normal(size=shape)

  shape = (time, rows, size) if varies else size
  growth = np.expm1(-random.uniform(0.001, 0.1, shape) + 1j * random.uniform(-3, 3, shape))
  return growth, normal(time, rows, size), normal(rows, size), random.random((time, rows)) < 0.1


def pair(x, dtype):
  return Complex(jnp.asarray(x.real, dtype), jnp.asarray(x.imag, dtype))


def run(form, growth, inputs, initial, reset, dtype):
  out = scan.diagonal_scan(
    pair(growth, dtype), pair(inputs, dtype), pair(initial, dtype), jnp.asarray(reset), form=form
  )
  return np.asarray(out.re, np.float64) + 1j * np.asarray(out.im, np.float64)


# Relative 2-norm over 16k steps in float32. A state that turns by 3 radians a step has a growth
# near -2, whose products have three roundings where those of the decays themselves would have one.
TOLERANCE = {
  ('sequential', 0.1): 1e-5,
  ('sequential', 3.0): 1e-5,
  ('associative', 0.1): 5e-5,
  ('associative', 3.0): 5e-4,
}


@pytest.mark.parametrize(('form', 'angle'), TOLERANCE)
def test_16k_steps_in_float32_against_float64(form, angle):
  growth, inputs, initial, _ = problem(16384)
  decay = np.log(1 + growth)
  growth = np.expm1(decay.real / 100 + 1j * decay.imag * angle / 3)  # remembers ~2000 steps
  growth = growth.astype(np.complex64)
  reset = np.zeros(inputs.shape[:2], bool)
  exact = reference(growth, inputs.astype(np.complex64), initial, reset)
  out = run(form, growth, inputs, initial.astype(np.complex64), reset, np.float32)
  assert np.linalg.norm(out - exact) < TOLERANCE[form, angle] * np.linalg.norm(exact)


@pytest.mark.parametrize('form', scan.FORMS)
def test_long_memories_in_float32_against_float64(form):
  """Time constants up to 10^7 steps: 1 + g, rounded to float32, would be wrong by half."""
  random = np.random.default_rng(0)
  _, inputs, initial, _ = problem(16384)
  growth = np.expm1(-(10 ** random.uniform(-7, -4, 3)) + 1e-3j * random.uniform(-1, 1, 3))
  growth, inputs = growth.astype(np.complex64), inputs.astype(np.complex64)
  reset = np.zeros(inputs.shape[:2], bool)
  exact = reference(growth, inputs, initial, reset)
  out = run(form, growth, inputs, initial.astype(np.complex64), reset, np.float32)
  assert np.linalg.norm(out - exact) < 1e-6 * np.linalg.norm(exact)


@pytest.mark.parametrize('varies', [False, True])
@pytest.mark.parametrize('form', scan.FORMS)
@hypothesis.given(time=st.sampled_from((1, 2, 9, 40)), seed=st.integers(0, 99))
@hypothesis.settings(max_examples=15, deadline=None, derandomize=True)
def test_resets_and_initial_state_in_float64(form, varies, time, seed):
  with jax.enable_x64(True):
    arguments = problem(time, seed=seed, varies=varies)
    np.testing.assert_allclose(
      run(form, *arguments, np.float64), reference(*arguments), rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize('varies', [False, True])
@pytest.mark.parametrize('form', scan.FORMS)
def test_a_real_state_is_a_complex_one_without_imaginary_part(form, varies):
  with jax.enable_x64(True):
    growth, inputs, initial, reset = problem(23, varies=varies)
    growth, inputs, initial = np.expm1(-np.abs(growth)), inputs.real, initial.real
    out = scan.diagonal_scan(*map(jnp.asarray, (growth, inputs, initial, reset)), form=form)
    np.testing.assert_allclose(
      out, reference(growth, inputs, initial, reset).real, rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize('varies', [False, True])
@pytest.mark.parametrize('form', scan.FORMS)
def test_gradient_is_that_of_the_equation(form, varies):
  """The hand-written adjoint against automatic differentiation of the unrolled equation."""
  with jax.enable_x64(True):
    growth, inputs, initial, reset = problem(23, varies=varies)
    weights = np.random.default_rng(1).normal(size=(2, *inputs.shape))

    def loss_of(states):
      return jnp.sum(weights[0] * states.re + weights[1] * jnp.sin(states.im))

    def scanned(growth, inputs, initial):
      return loss_of(scan.diagonal_scan(growth, inputs, initial, jnp.asarray(reset), form=form))

    def unrolled(growth, inputs, initial):
      state, states = initial, []
      decays = Complex(1 + growth.re, growth.im).map(
        lambda part: jnp.broadcast_to(part if varies else part[None, None], inputs.re.shape)
      )
      for t in range(inputs.re.shape[0]):
        keep = jnp.where(jnp.asarray(reset)[t], 0.0, 1.0)[:, None]
        decayed = decays.map(lambda part, t=t: part[t]) * state
        state = Complex(keep * decayed.re + inputs.re[t], keep * decayed.im + inputs.im[t])
        states.append(state)
      return loss_of(Complex(*map(jnp.stack, zip(*states, strict=True))))

    def twice(of):
      """The gradient of a function of the gradient."""
      once = jax.grad(of, argnums=(0, 1, 2))
      return jax.grad(
        lambda *x: sum(jnp.sum(jnp.sin(g)) for g in jax.tree.leaves(once(*x))), (0, 1, 2)
      )

    arguments = [pair(x, np.float64) for x in (growth, inputs, initial)]
    for derivative in functools.partial(jax.grad, argnums=(0, 1, 2)), twice:
      got, expected = (derivative(of)(*arguments) for of in (scanned, unrolled))
      for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize('form', scan.FORMS)
def test_derivatives_in_both_directions_keep_long_memories(form):
  """Through the transpose of the transpose, too: plain float32 sums would not decay at all."""
  steps, rate = 16384, 4e-8
  growth, zero, one = jnp.full(1, -rate), jnp.zeros((steps, 1, 1)), jnp.ones((1, 1))

  def last(initial):
    return scan.diagonal_scan(growth, zero, initial, jnp.zeros((steps, 1), bool), form=form)[-1]

  state, backwards = jax.vjp(last, one)
  forwards = jax.vjp(lambda g: backwards(g)[0], one)[1](one)[0]
  for found in (state, backwards(one)[0], forwards):
    np.testing.assert_allclose(found, np.exp(-rate * steps), rtol=2e-7)
