"""Dropout of attention weights, in both faces of the attention.

Values that are unit vectors make the outputs the weights themselves.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from valkyrie.models.attention import bidirectional_longformer, kv_cache, sliding_window
from valkyrie.models.attention.bidirectional_longformer import Projections
from valkyrie.models.attention.rotary import Rotary
from valkyrie.models.attention.softmax import Dropout
from valkyrie.models.attention.windows import windows_of

TIME, HEADS, RATE, FAR = 24, 3, 0.25, 5
segments = jnp.ones((1, TIME), jnp.int32)


def seen(width):
  return tuple(windows_of((1, 2, 1), HEADS, width, 8, Rotary()))


def causal(q, k, v, dropout):
  registers = (k[0, :1], 0 * v[0, :1])
  carry = kv_cache.empty_carry(1, 60, 2, HEADS, TIME, q.dtype)
  positions = jnp.arange(TIME, dtype=jnp.int32)[None]
  out, _ = sliding_window.sliding_window_attention(
    q,
    k,
    v,
    carry,
    positions=positions,
    segment_ids=segments,
    registers=registers,
    windows=seen(30),
    dropout=dropout,
  )
  return out


def both_ways(q, k, v, dropout):
  local, at = Projections(q, k, v), jnp.array([[FAR, TIME]], jnp.int32)
  return bidirectional_longformer.bidirectional_attention(
    local,
    local._replace(q=bidirectional_longformer.take(q, at)),
    segment_ids=segments,
    global_tokens=at,
    windows=seen(30),
    dropout=dropout,
  )


@pytest.mark.parametrize('face', [causal, both_ways])
def test_dropout_leaves_out_weights_and_their_gradients(face):
  random = np.random.default_rng(0)
  q, k, cotangent = random.normal(size=(3, 1, TIME, HEADS, TIME))
  v = np.tile(np.eye(TIME)[None, :, None], (1, 1, HEADS, 1))

  @jax.jit
  def pull(key, cotangent):
    dropout = None if key is None else Dropout(key, RATE)
    out, pull = jax.vjp(lambda *qkv: face(*qkv, dropout), q, k, v)
    return out, *pull(cotangent)

  with jax.enable_x64(True):
    key = jax.random.key(0)
    dropped, *gradients = map(np.asarray, pull(key, cotangent))
    kept = dropped != 0
    # Without a key, the gradient of the weights that were kept.
    whole, d_q, d_k, _ = map(np.asarray, pull(None, np.where(kept, cotangent / (1 - RATE), 0)))
    other = np.asarray(pull(jax.random.key(1), cotangent)[0])
  np.testing.assert_allclose(dropped, np.where(kept, whole / (1 - RATE), 0), rtol=1e-9)
  np.testing.assert_allclose(gradients[0], d_q, rtol=1e-7, atol=1e-9)
  np.testing.assert_allclose(gradients[1], d_k, rtol=1e-7, atol=1e-9)
  np.testing.assert_allclose(
    gradients[2], np.einsum('bths,bthk->bshk', dropped, cotangent), rtol=1e-7, atol=1e-9
  )
  assert abs(kept[whole != 0].mean() - (1 - RATE)) < 0.04

  # Every key, head and slice has draws of its own.
  assert np.any((other != 0) != kept)
  assert np.any(kept[0, :, 0] != kept[0, :, 2])
  before = np.stack([kept[0, t, 0, t - 8 : t + 1] for t in range(8, TIME)])
  assert np.any(before[:8] != before[8:])
  if face is both_ways:
    assert np.any(kept[0, FAR, 0, :8] != kept[0, FAR, 0, 8:16])
