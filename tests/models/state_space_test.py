"""The state space in float64 against its equations: values, gradients, and documents both ways."""

import functools

import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import s5_reference

from valkyrie.models.matrices import Matrix
from valkyrie.models.recurrence import scan
from valkyrie.models.recurrence.scan import Complex
from valkyrie.models.s5 import state_space
from valkyrie.models.s5.state_space import StateSpace

WIDTH, STATES = 5, 4
# Read backwards, the documents end elsewhere.
POSITIONS = np.stack([np.r_[3:10, 0:1, 0:8], np.r_[0:16]]).astype(np.int32)
PAIRED = {'method': 'zoh', 'conj_sym': True, 'step_rescale': 1.0, 'clip': False}
UNPAIRED = {'method': 'bilinear', 'conj_sym': False, 'step_rescale': 2.0, 'clip': True}


def normal(random, *shape):
  return random.normal(size=shape) + 1j * random.normal(size=shape)


def problem(columns=STATES, rows=2, time=16, seed=0):
  """Parameters, inputs and a first state; one real part of Λ is above zero, for the clipping."""
  random = np.random.default_rng(seed)
  system = {
    'eigenvalues': random.uniform(-0.5, 0.1, STATES) + 1j * random.uniform(-3, 3, STATES),
    'b': normal(random, STATES, WIDTH),
    'c': normal(random, WIDTH, columns),
    'd': random.normal(size=WIDTH),
    'log_step': random.uniform(-3, -1, STATES),
  }
  system['eigenvalues'][0] += 0.5
  return system, random.normal(size=(rows, time, WIDTH)), normal(random, rows, STATES)


def pair(x):
  return Complex(jnp.asarray(x.real), jnp.asarray(x.imag))


def of_arrays(system):
  parts = {name: pair(x) if np.iscomplexobj(x) else jnp.asarray(x) for name, x in system.items()}
  return StateSpace(**parts)


def run(
  system, u, initial, positions, *, method, conj_sym, step_rescale, clip, bidirectional=False
):
  starts = jnp.asarray(positions) == 0
  # The last document is cut off: it is read backwards from zero all the same.
  ends = jnp.concatenate([starts[:, 1:], jnp.zeros_like(starts[:, :1])], axis=1)
  discrete = state_space.discretized(
    system, method=method, step_rescale=step_rescale, clip_eigenvalues=clip
  )
  return state_space.read_chunk(
    system._replace(b=Matrix(system.b), c=Matrix(system.c)),
    discrete,
    u,
    initial,
    starts,
    jnp.full(len(starts), starts.shape[1]),
    ends if bidirectional else None,
    form='sequential',
    conj_sym=conj_sym,
  )


@pytest.mark.parametrize('bidirectional', [False, True])
@pytest.mark.parametrize('options', [PAIRED, UNPAIRED], ids=['paired', 'unpaired'])
def test_values_and_gradients_in_float64(options, bidirectional):
  """The gradient along a random direction against central differences of the equations."""
  system, u, initial = problem(columns=2 * STATES if bidirectional else STATES)
  random = np.random.default_rng(1)
  weights, state_weights = random.normal(size=u.shape), normal(random, *initial.shape)

  def reference(system, u, initial):
    y, last = s5_reference.layer(
      system, u, initial, POSITIONS, bidirectional=bidirectional, **options
    )
    return y, last, np.sum(weights * y) + np.sum((state_weights * last).real)

  with jax.enable_x64(True):
    weigh_state = pair(state_weights)

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1, 2), has_aux=True)
    def loss(system, u, initial):
      y, last = run(system, u, initial, POSITIONS, bidirectional=bidirectional, **options)
      total = jnp.sum(weights * y) + jnp.sum((weigh_state * last).re)
      return total, (y, last)

    (_, (y, last)), gradient = loss(of_arrays(system), jnp.asarray(u), pair(initial))
    expected_y, expected_last, _ = reference(system, u, initial)
    np.testing.assert_allclose(y, expected_y, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(last.re + 1j * last.im, expected_last, rtol=1e-10, atol=1e-10)

  of_system, of_u, of_initial = jax.device_get(gradient)
  gradients = {**of_system._asdict(), 'u': of_u, 'initial': of_initial}
  point = {**system, 'u': u, 'initial': initial}
  for name, found in gradients.items():
    parts = ('re', 'im') if isinstance(found, Complex) else (None,)
    for part in parts:
      direction = random.normal(size=point[name].shape)
      step = 1e-5 * direction * (1j if part == 'im' else 1)

      def at(x, name=name):
        moved = {**point, name: x}
        u, initial = moved.pop('u'), moved.pop('initial')
        return reference(moved, u, initial)[2]

      slope = (at(point[name] + step) - at(point[name] - step)) / 2e-5
      along = np.sum(direction * (found if part is None else getattr(found, part)))
      np.testing.assert_allclose(along, slope, rtol=1e-6, atol=1e-7, err_msg=f'{name} {part}')


@hypothesis.given(
  lengths=st.lists(st.sampled_from((1, 3, 8)), min_size=1, max_size=5),
  starts=st.sampled_from((0.0, 0.2, 0.8)),
  seed=st.integers(0, 99),
)
@hypothesis.settings(max_examples=15, deadline=None, derandomize=True)
def test_chunked_equals_whole_in_float64(lengths, starts, seed):
  """In chunks of these lengths, with documents that start anywhere, the equations of the whole."""
  system, u, initial = problem(time=sum(lengths), seed=seed)
  # 0 starts a document; what a position is otherwise does not matter here.
  positions = np.where(np.random.default_rng(seed).random(u.shape[:2]) < starts, 0, 1)
  with jax.enable_x64(True):
    carry, out, begin = pair(initial), [], 0
    for length in lengths:
      piece = slice(begin, begin + length)
      y, carry = _compiled()(of_arrays(system), u[:, piece], carry, positions[:, piece])
      out.append(y)
      begin += length
    expected, last = s5_reference.layer(system, u, initial, positions, method='zoh')
    np.testing.assert_allclose(np.concatenate(out, axis=1), expected, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(carry.re + 1j * carry.im, last, rtol=1e-10, atol=1e-10)


@functools.cache
def _compiled():
  return jax.jit(functools.partial(run, **PAIRED))


def test_the_state_after_a_padded_chunk():
  states = Complex(*np.arange(2 * 3 * 2 * 1, dtype=np.float32).reshape(2, 3, 2, 1))
  initial = Complex(jnp.full((2, 1), -1.0), jnp.full((2, 1), -2.0))
  after = scan.state_after(states, initial, jnp.array([2, 0]))
  np.testing.assert_array_equal(after.re, [[2], [-1]])
  np.testing.assert_array_equal(after.im, [[8], [-2]])
