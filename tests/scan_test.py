"""Every form of the recurrence against the equation, in float64 on the host."""

import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from valkyrie.models.s5 import scan
from valkyrie.models.s5.scan import Complex


def reference(decay, inputs, initial, reset):
  """x_t = keep_t Λ̄ x_{t-1} + b_t, one step after the other in complex128."""
  state, states = initial.astype(np.complex128), []
  for b, r in zip(inputs, reset, strict=True):
    state = np.where(r[:, None], 0, decay * state) + b
    states.append(state)
  return np.stack(states)


def problem(time, rows=2, size=3, seed=0):
  random = np.random.default_rng(seed)

  def normal(*shape):
    return random.normal(size=shape) + 1j * random.normal(size=shape)

  decay = np.exp(-random.uniform(0.001, 0.1, size) + 1j * random.uniform(-3, 3, size))
  return decay, normal(time, rows, size), normal(rows, size), random.random((time, rows)) < 0.1


def pair(x, dtype):
  return Complex(jnp.asarray(x.real, dtype), jnp.asarray(x.imag, dtype))


def run(form, decay, inputs, initial, reset, dtype):
  out = scan.diagonal_scan(
    pair(decay, dtype), pair(inputs, dtype), pair(initial, dtype), jnp.asarray(reset), form=form
  )
  return np.asarray(out.re, np.float64) + 1j * np.asarray(out.im, np.float64)


# Relative 2-norm over 16k steps in float32: the sequential form, and the others.
TOLERANCE = {'sequential': 1e-5, 'associative': 5e-5}


@pytest.mark.parametrize('form', scan.FORMS)
def test_16k_steps_in_float32_against_float64(form):
  decay, inputs, initial, _ = problem(16384)
  decay = np.exp(np.log(decay).real / 100 + 1j * np.log(decay).imag)  # remembers for ~2000 steps
  decay32 = decay.astype(np.complex64)
  reset = np.zeros(inputs.shape[:2], bool)
  exact = reference(decay32.astype(np.complex128), inputs.astype(np.complex64), initial, reset)
  out = run(form, decay32, inputs, initial.astype(np.complex64), reset, np.float32)
  assert np.linalg.norm(out - exact) < TOLERANCE[form] * np.linalg.norm(exact)


@pytest.mark.parametrize('form', scan.FORMS)
@hypothesis.given(time=st.sampled_from((1, 2, 9, 40)), seed=st.integers(0, 99))
@hypothesis.settings(max_examples=15, deadline=None, derandomize=True)
def test_resets_and_initial_state_in_float64(form, time, seed):
  with jax.enable_x64(True):
    arguments = problem(time, seed=seed)
    np.testing.assert_allclose(
      run(form, *arguments, np.float64), reference(*arguments), rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize('form', scan.FORMS)
def test_gradient_is_that_of_the_equation(form):
  """The hand-written adjoint against automatic differentiation of the unrolled equation."""
  with jax.enable_x64(True):
    decay, inputs, initial, reset = problem(23)
    weights = np.random.default_rng(1).normal(size=(2, *inputs.shape))

    def loss_of(states):
      return jnp.sum(weights[0] * states.re + weights[1] * jnp.sin(states.im))

    def scanned(decay, inputs, initial):
      return loss_of(scan.diagonal_scan(decay, inputs, initial, jnp.asarray(reset), form=form))

    def unrolled(decay, inputs, initial):
      state, states = initial, []
      for t in range(inputs.re.shape[0]):
        keep = jnp.where(jnp.asarray(reset)[t], 0.0, 1.0)[:, None]
        decayed = Complex(decay.re[None], decay.im[None]) * state
        state = Complex(keep * decayed.re + inputs.re[t], keep * decayed.im + inputs.im[t])
        states.append(state)
      return loss_of(Complex(*map(jnp.stack, zip(*states, strict=True))))

    arguments = [pair(x, np.float64) for x in (decay, inputs, initial)]
    got = jax.grad(scanned, argnums=(0, 1, 2))(*arguments)
    expected = jax.grad(unrolled, argnums=(0, 1, 2))(*arguments)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
