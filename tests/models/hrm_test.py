"""The recurrence of HRM against its equations; its gradient against its last steps' gradient."""

import functools

import hrm
from hrm import Pace, Reasoner, State, Weights
import jax
import jax.numpy as jnp
import numpy as np
import pytest

WIDTH, HIDDEN, TOKENS, HEADS = 8, 12, 3, 2


def normed(x, np=np):
  return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6)


def reason(module, x, np=np):
  """f(x) [P, D] of one row, head by head, with any numpy."""
  heads = []
  for h in range(HEADS):
    of = slice(h * WIDTH // HEADS, (h + 1) * WIDTH // HEADS)
    q, k, v = (x @ w[:, of] for w in (module.query, module.key, module.value))
    scores = np.exp(q @ k.T / np.sqrt(WIDTH / HEADS))
    heads.append(scores / scores.sum(-1, keepdims=True) @ v)
  x = normed(x + np.concatenate(heads, -1) @ module.out, np)
  gate = x @ module.gate
  return normed(x + (gate / (1 + np.exp(-gate)) * (x @ module.hidden)) @ module.mlp_out, np)


def reference(weights, slow, fast, given, pace):
  """[(z_H, z_L) before the last step of each segment], [... after it], of one row."""
  before, after = [], []
  for _ in range(pace.segments):
    for n in range(1, pace.cycles * pace.steps):
      fast = reason(weights.fast, fast + slow + given)
      if n % pace.steps == 0:
        slow = reason(weights.slow, slow + fast)
    before.append((slow, fast))
    fast = reason(weights.fast, fast + slow + given)
    slow = reason(weights.slow, slow + fast)
    after.append((slow, fast))
  return before, after


@functools.cache
def case():
  """float64 (weights, state of two rows, x̃)."""
  random = np.random.default_rng(0)

  def normal(*shape):
    return random.normal(size=shape) * shape[0] ** -0.5

  shapes = [(WIDTH, WIDTH)] * 4 + [(WIDTH, HIDDEN)] * 2 + [(HIDDEN, WIDTH)]
  slow, fast = (Reasoner(*(normal(*shape) for shape in shapes)) for _ in range(2))
  weights = Weights(slow, fast, normal(WIDTH, 2), normal(2))
  state = State(*random.normal(size=(2, 2, TOKENS, WIDTH)))
  return weights, state, random.normal(size=(2, TOKENS, WIDTH))


PACES = [Pace(3, 2, 3, HEADS), Pace(2, 3, 1, HEADS), Pace(1, 1, 1, HEADS)]


@pytest.mark.parametrize('pace', PACES)
def test_states_and_gradient_are_those_of_the_equations(pace):
  weights, state, given = case()
  random = np.random.default_rng(1)
  into = random.normal(size=(2, pace.segments, TOKENS, WIDTH))  # any loss is linear nearby

  def loss(weights, state, given):
    states, values = hrm.deliberate(weights, state, given, pace)
    return jnp.sum(states.slow * into), (states, values)

  with jax.enable_x64(True):
    (d_weights, d_state, d_given), (states, values) = jax.jit(
      jax.grad(loss, argnums=(0, 1, 2), has_aux=True)
    )(*jax.tree.map(jnp.asarray, (weights, state, given)))

    expected = []
    for row in range(2):
      before, after = reference(weights, state.slow[row], state.fast[row], given[row], pace)
      np.testing.assert_allclose(states.slow[row], [z for z, _ in after], rtol=1e-9)
      np.testing.assert_allclose(states.fast[row], [z for _, z in after], rtol=1e-9)
      heads = [z[0] @ weights.halt + weights.halt_bias for z, _ in after]
      np.testing.assert_allclose(values[row], heads, rtol=1e-9)

      def last_steps(weights, given, row=row, before=before):
        total = 0.0
        for m, (slow, fast) in enumerate(before):
          last = reason(weights.fast, jnp.asarray(fast + slow) + given, jnp)
          total += jnp.sum(into[row, m] * reason(weights.slow, slow + last, jnp))
        return total

      wide = jax.tree.map(jnp.asarray, (weights, given[row]))
      expected.append(jax.jit(jax.grad(last_steps, argnums=(0, 1)))(*wide))

    for row, (_, of_row) in enumerate(expected):
      np.testing.assert_allclose(d_given[row], of_row, rtol=1e-8, atol=1e-12)
    whole = jax.tree.map(jnp.add, expected[0][0], expected[1][0])
    jax.tree.map(
      functools.partial(np.testing.assert_allclose, rtol=1e-8, atol=1e-12), d_weights, whole
    )
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(d_state))
    assert all(np.any(leaf) for leaf in jax.tree.leaves((d_weights.slow, d_weights.fast)))


@pytest.mark.parametrize('segments', [1, 2, 4])
def test_halting_picks_as_the_head_says_and_never_beyond_the_bound(segments):
  random = np.random.default_rng(segments)
  values = random.normal(size=(50, 3, segments, 2))
  values[0] = 1.0  # worth the same: goes on
  chosen = np.asarray(hrm.halting_segment(jnp.asarray(values)))
  for row, found in zip(values.reshape(-1, segments, 2), chosen.reshape(-1), strict=True):
    halts = [m for m, (halt, go_on) in enumerate(row[:-1]) if halt > go_on]
    assert found == (halts[0] if halts else segments - 1)
  assert set(chosen.reshape(-1)) == set(range(segments))
