"""The kernels of the recurrence, in Pallas's interpreter, against the equation in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scan_test

from valkyrie.models.recurrence import scan, scan_kernel
from valkyrie.models.recurrence.scan import Complex

by_kernel = functools.partial(scan_kernel.scan, interpret=True)


# 64 steps are 16 blocks, whose ends are 4 blocks; 6 steps are 3, and 9 and 1 are one.
@pytest.mark.parametrize(
  ('time', 'varies'), [(64, False), (64, True), (6, True), (9, False), (1, True)]
)
def test_values_and_gradients_are_those_of_the_equation(time, varies):
  with jax.enable_x64(True):
    *numbers, reset = scan_test.problem(time, varies=varies)
    arguments = [scan_test.pair(x, np.float64) for x in numbers]
    weights = np.random.default_rng(1).normal(size=(2, *arguments[1].re.shape))

    def loss(growth, inputs, initial, form):
      states = scan.diagonal_scan(growth, inputs, initial, jnp.asarray(reset), form=form)
      return jnp.sum(weights[0] * states.re + weights[1] * jnp.sin(states.im)), states

    def read(form):
      of_form = functools.partial(loss, form=form)
      return jax.jit(jax.value_and_grad(of_form, (0, 1, 2), has_aux=True))(*arguments)

    (_, states), found = read(functools.partial(by_kernel, block=4))
    _, expected = read('sequential')  # tests/models/scan_test.py holds its gradient
  exact = scan_test.reference(*numbers, reset)
  found_states = np.asarray(states.re) + 1j * np.asarray(states.im)
  np.testing.assert_allclose(found_states, exact, rtol=1e-10, atol=1e-12)
  for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize('varies', [False, True])
def test_states_for_products_are_rounded_and_the_state_after_is_exact(varies):
  """Rows that are full, that end early, before a block's last step or with it, and that are empty.

  The gradient reads the exact states, and so does a chunk that goes on.
  """
  *numbers, reset = scan_test.problem(32, rows=5, varies=varies)
  length = jnp.array([32, 27, 16, 1, 0])
  growth, inputs, initial = (scan_test.pair(x, np.float32) for x in numbers)
  is_token = jnp.arange(32)[:, None] < length[None]
  random = np.random.default_rng(1)
  weights = jnp.asarray(random.normal(size=(2, *inputs.re.shape)), jnp.bfloat16)
  weights = jnp.where(is_token[..., None], weights, 0)
  after_weights = random.normal(size=(2, *initial.re.shape)).astype(np.float32)

  def read(growth, inputs, initial, form):
    arguments = (growth, inputs, initial, jnp.asarray(reset), length, jnp.bfloat16)
    return scan.read(*arguments, form=form)

  def results(form):
    read_by_form = jax.jit(functools.partial(read, form=form))
    found, pull_back = jax.vjp(read_by_form, growth, inputs, initial)
    return found, pull_back((Complex(*weights), Complex(*after_weights)))

  (states, after), found = results(functools.partial(by_kernel, block=4))
  (plain_states, plain_after), expected = results('sequential')
  rounding = 2**-8
  for part, plain in zip(states, plain_states, strict=True):
    assert part.dtype == plain.dtype == jnp.bfloat16
    difference = np.where(is_token[..., None], np.float32(part) - np.float32(plain), 0)
    assert np.all(np.abs(difference) <= rounding * np.abs(np.float32(plain)))
  for part, plain in zip(after, plain_after, strict=True):
    assert part.dtype == jnp.float32
    np.testing.assert_allclose(part, plain, rtol=1e-5, atol=1e-5)
  for part, plain in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    scale = np.abs(plain).max()
    np.testing.assert_allclose(part, plain, atol=1e-6 * scale)


def test_long_memories_in_float32_against_float64():
  """Time constants up to 10^7 steps: 1 + g, rounded to float32, would be wrong by half."""
  random = np.random.default_rng(0)
  _, inputs, initial, _ = scan_test.problem(16384)
  growth = np.expm1(-(10 ** random.uniform(-7, -4, 3)) + 1e-3j * random.uniform(-1, 1, 3))
  growth, inputs = growth.astype(np.complex64), inputs.astype(np.complex64)
  reset = np.zeros(inputs.shape[:2], bool)
  exact = scan_test.reference(growth, inputs, initial, reset)
  out = scan_test.run(by_kernel, growth, inputs, initial.astype(np.complex64), reset, np.float32)
  assert np.linalg.norm(out - exact) < 1e-6 * np.linalg.norm(exact)


def test_a_document_is_not_rounded_by_the_one_before():
  """Which is infinite: a product with a decay of zero would be NaN, in the gradient as well."""
  growth, inputs, initial, _ = scan_test.problem(32)
  inputs = inputs.astype(np.complex64)
  reset = np.zeros((32, 2), bool)
  reset[[9, 16]] = True
  large = inputs.copy()
  large[:9] = np.inf

  @jax.jit
  def read(inputs):
    arguments = [scan_test.pair(x, np.float32) for x in (growth, initial)]

    def last(inputs):
      states = scan.diagonal_scan(
        arguments[0],
        inputs,
        arguments[1],
        jnp.asarray(reset),
        form=functools.partial(by_kernel, block=4),
      )
      return jnp.sum(states.re[9:]), states.map(lambda part: part[9:])

    return jax.grad(last, has_aux=True)(inputs)

  of_inputs, states = (read(scan_test.pair(x, np.float32)) for x in (inputs, large))
  jax.tree.map(np.testing.assert_array_equal, of_inputs, states)
