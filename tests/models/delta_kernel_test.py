"""The gated delta rule by deltanet-tpu, beside the plain form that `gated_delta_test` holds.

Where the library is missing, a loop over tokens has its place: what its documentation says.
"""

import functools
import importlib.machinery
import importlib.util
import sys

import haiku as hk
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from valkyrie.models import kernel_choice
from valkyrie.models.layers import MixerOptions
from valkyrie.models.recurrence import delta_kernel
from valkyrie.models.recurrence.gated_delta import GatedDeltaNet, gated_delta_rule
from valkyrie.sharding import ambient

HEADS = 2
plain = functools.partial(gated_delta_rule, slice_size=16)


def by_token(q, k, v, g, b, w, *, scale, initial_state, segment_ids, **options):
  """S = exp(g) S; S += k (w v - Sᵀ b k)ᵀ; o = scale Sᵀ q; S is zero where the segment changes."""
  assert options == {'output_final_state': True, 'mask_lambda_by_doc': True}
  same = jnp.concatenate(
    [jnp.ones_like(segment_ids[:, :1]), segment_ids[:, 1:] == segment_ids[:, :-1]], axis=1
  )

  def step(state, now):
    q, k, v, g, b, w, same = now
    state = jnp.where(same[:, None, None, None], state, 0) * jnp.exp(g)[..., None, None]
    stored = jnp.einsum('bhkz,bhk->bhz', state, b[..., None] * k)
    state += k[..., None] * (w[..., None] * v - stored)[:, :, None]
    return state, scale * jnp.einsum('bhkz,bhk->bhz', state, q)

  tokens = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), (q, k, v, g, b, w, same == 1))
  state, y = lax.scan(step, initial_state, tokens)
  return jnp.swapaxes(y, 0, 1), state


@pytest.fixture
def stand_in(monkeypatch):
  """The shapes of v in the calls of the library."""
  calls = []

  def chunk_gdn2(q, k, v, *gates, **options):
    calls.append(v.shape)
    return by_token(q, k, v, *gates, **options)

  for name in ('deltanet_tpu', 'deltanet_tpu.gdn2'):
    spec = importlib.machinery.ModuleSpec(name, None)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(module, 'chunk_gdn2', chunk_gdn2, raising=False)
    monkeypatch.setitem(sys.modules, name, module)
  return calls


def problem(time, width, dtype):
  """(q, k, v, log α, β, the state before), and the starts of documents, in two rows.

  The first row begins a document; in the second, one goes on, and another begins later.
  """
  random = np.random.default_rng(0)

  def normal(*shape):
    return random.normal(size=shape)

  def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)

  vectors = 2, time, HEADS, width
  log_decay = -0.1 * np.abs(normal(2, time, HEADS))
  log_decay[:, time // 3] = -1e6
  beta = random.uniform(0, 2, size=(2, time, HEADS))
  log_decay[:, -5:] = beta[:, -5:] = 0  # padding
  arrays = unit(normal(*vectors)), unit(normal(*vectors)), normal(*vectors), log_decay, beta
  reset = np.zeros((2, time), bool)
  reset[0, [0, 3, 4, time // 2]] = reset[1, time // 4] = True
  return [jnp.asarray(x, dtype) for x in (*arrays, normal(2, HEADS, width, width))], reset


def results(rule, arrays, reset, cuts=()):
  """(y, the state after, gradients by all arrays), in chunks with these cuts."""
  random = np.random.default_rng(1)
  weights = [random.normal(size=arrays[index].shape) for index in (2, 5)]

  def loss(*arrays):
    *tokens, state = arrays
    ys = []
    for now in zip(*(jnp.split(x, cuts, axis=1) for x in (*tokens, reset)), strict=True):
      *chunk, starts = now
      y, state = rule(*chunk, state, starts)
      ys.append(y)
    y = jnp.concatenate(ys, axis=1)
    return jnp.sum(weights[0] * y) + jnp.sum(weights[1] * state), (y, state)

  (_, outputs), gradients = jax.jit(jax.value_and_grad(loss, range(6), has_aux=True))(*arrays)
  return *outputs, *gradients


@pytest.mark.invariant(1)
@pytest.mark.invariant(3)
@pytest.mark.usefixtures('stand_in')
@pytest.mark.parametrize('cuts', [(), (7, 20)])
def test_states_documents_and_gradients_are_those_of_the_plain_form(cuts):
  with jax.enable_x64(True):
    arrays, reset = problem(40, 3, jnp.float64)
    found = results(delta_kernel.gated_delta_rule, arrays, reset, cuts)
    expected = results(plain, arrays, reset)
  for one, other in zip(found, expected, strict=True):
    np.testing.assert_allclose(one, other, rtol=0, atol=1e-10)
    assert np.linalg.norm(other) > 0


def test_the_library_computes_the_plain_form(monkeypatch):
  """Its kernels for TPUs in Pallas's interpreter, with its products in float32."""
  library = pytest.importorskip(
    'deltanet_tpu.gdn2', reason='the extra deltanet-tpu is not installed'
  )
  exact = functools.partial(library.chunk_gdn2, precision='fp32')
  monkeypatch.setattr(library, 'chunk_gdn2', exact)
  arrays, reset = problem(256, 128, jnp.float32)
  with jax.numpy_rank_promotion('allow'):
    found = results(delta_kernel.gated_delta_rule, arrays, reset, (128,))
  for one, other in zip(found, results(plain, arrays, reset), strict=True):
    # A decay between two tokens is a difference of sums, which reach 50 here.
    assert np.linalg.norm(one - other) <= 2e-5 * np.linalg.norm(other)


def layer(**options):
  sizes = {'heads': 1, 'key_width': 128, 'value_width': 128}
  return GatedDeltaNet(**{**sizes, 'kernels': 'interpret', **options})


def test_the_layer_uses_the_kernel_where_it_agreed(stand_in, monkeypatch):
  monkeypatch.setattr(delta_kernel, '_WIDTH', 4)
  monkeypatch.setattr(delta_kernel, '_SLICE', 16)
  make = functools.partial(layer, key_width=4, value_width=4)
  computed = []
  for lengths in ((), {('GatedDeltaNet', 16)}):
    assert stand_in == []
    options = MixerOptions(kernel_lengths=lengths)
    compute = functools.partial(kernel_choice.results, make, (1, 16, 4), jnp.float32, options)
    computed.append(jax.jit(compute)())
  assert set(stand_in) == {(1, 16, 1, 4)}
  for one, other in zip(*computed, strict=True):
    assert np.linalg.norm(one - other) <= 1e-5 * np.linalg.norm(other)


def why_not(learned_carry=False, **options):
  """Of a chunk of 128 tokens, outside of the transform, as before a run starts."""
  made = []

  def make():
    mixer = layer(**options)
    mixer.configure(MixerOptions(learned_carry))
    made.append(mixer)

  hk.transform(make).apply({}, None)
  return kernel_choice.why_not(made[0], 128) or ''


@pytest.mark.usefixtures('stand_in')
def test_what_the_library_cannot_compute_is_named():
  assert why_not() == ''
  assert 'has 64 keys and 128 values, and needs 128' in why_not(key_width=64)
  assert 'begin documents with zero' in why_not(learned_carry=True)
  assert why_not(kernels='prefer').startswith('the kernels are for TPUs, and this program for')
  with ambient.within(time=('t',)):
    assert 'devices share each chunk' in why_not()


def test_a_missing_library_is_named(monkeypatch):
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  assert 'the package deltanet-tpu is missing' in why_not()
