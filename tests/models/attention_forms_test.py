"""Rotary positions of a share of the channels, the norm of whole queries and keys, and the gate."""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from valkyrie.errors import ConfigurationError
from valkyrie.models.attention.full import FullAttention
from valkyrie.models.attention.longformer import LongformerAttention
from valkyrie.models.attention.rotary import Rotary

HEADS, KV_HEADS, HEAD_WIDTH, WINDOW, CONTEXT, WIDTH = 4, 2, 12, 3, 16, 10
BASE = 7.0
HEADS_OF = {'heads': HEADS, 'kv_heads': KV_HEADS, 'head_width': HEAD_WIDTH, 'slice_size': 2}
windowed = functools.partial(LongformerAttention, window=WINDOW, **HEADS_OF)
full = functools.partial(FullAttention, max_context=CONTEXT, **HEADS_OF)


def rms(x):
  return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def turned(x, position, channels):
  """x [H, K], whose pairs (i, i + R/2) of the first R `channels` turn."""
  pairs = channels // 2
  angle = position * BASE ** (-2 * np.arange(pairs) / channels)
  first, second, rest = np.split(x, [pairs, channels], axis=1)
  real = first * np.cos(angle) - second * np.sin(angle)
  imaginary = first * np.sin(angle) + second * np.cos(angle)
  return np.concatenate([real, imaginary, rest], axis=1)


def by_token(params, x, positions, reach, channels, norm):
  """The equations, for one token and row at a time."""
  (own,) = (part for part in params.values() if 'query' in part)
  scales = {name.rpartition('/')[2]: part for name, part in params.items() if 'scale' in part}
  y = np.zeros_like(x)
  for row, t in np.ndindex(x.shape[:2]):
    scores, values = [], []
    for s in range(max(t - min(positions[row, t], reach), 0), t + 1):
      q, k = x[row, t] @ own['query'], x[row, s] @ own['key']
      if norm == 'whole':
        q, k = rms(q), rms(k)
      q, k = q.reshape(HEADS, HEAD_WIDTH), k.reshape(KV_HEADS, HEAD_WIDTH)
      if norm is True:
        q, k = rms(q), rms(k)
      if norm:
        q = q * scales['query_norm']['scale'].reshape(-1, HEAD_WIDTH)
        k = k * scales['key_norm']['scale'].reshape(-1, HEAD_WIDTH)
      q, k = turned(q, t, channels), turned(k, s, channels)
      by_head = np.repeat(k, HEADS // KV_HEADS, axis=0)
      scores.append(np.sum(q * by_head, axis=1) / np.sqrt(HEAD_WIDTH))
      v = (x[row, s] @ own['value']).reshape(KV_HEADS, HEAD_WIDTH)
      values.append(np.repeat(v, HEADS // KV_HEADS, axis=0))
    weights = np.exp(scores - np.max(scores, axis=0))
    weights /= np.sum(weights, axis=0)
    out = np.sum(weights[..., None] * np.stack(values), axis=0).ravel()
    y[row, t] = out / (1 + np.exp(-x[row, t] @ own['gate'])) @ own['out']
  return y


@pytest.mark.parametrize(
  ('make', 'reach', 'share', 'channels', 'norm'),
  [
    (windowed, WINDOW, 0.5, 6, 'whole'),
    (full, CONTEXT, 0.4, 4, True),
    (full, CONTEXT, 0.0, 0, 'whole'),
  ],
)
def test_values_are_those_of_the_equations_whole_and_in_chunks(make, reach, share, channels, norm):
  def mix(x, carry, positions, segment_ids):
    rotary = functools.partial(Rotary, base=BASE, share=share)
    mixer = make(rotary=rotary, query_key_norm=norm, output_gate=True)
    if carry is None:
      carry = mixer.initial_carry(len(x), x.dtype)
    return mixer(x, carry, positions=positions, segment_ids=segment_ids)

  random = np.random.default_rng(0)
  x = random.normal(size=(2, 10, WIDTH))
  positions = np.stack([np.r_[0:10], np.r_[0:3, 0:7]]).astype(np.int32)
  segment_ids = 1 + np.cumsum(positions == 0, axis=1, dtype=np.int32)
  pure = hk.without_apply_rng(hk.transform(mix))
  with jax.enable_x64(True):
    shapes = jax.eval_shape(pure.init, jax.random.key(0), x, None, positions, segment_ids)
    params = jax.tree.map(lambda p: random.normal(size=p.shape), shapes)
    apply = jax.jit(pure.apply)
    whole, _ = apply(params, x, None, positions, segment_ids)
    first, carry = apply(params, x[:, :5], None, positions[:, :5], segment_ids[:, :5])
    second, _ = apply(params, x[:, 5:], carry, positions[:, 5:], segment_ids[:, 5:])
  expected = by_token(params, x, positions, reach, channels, norm)
  np.testing.assert_allclose(whole, expected, atol=1e-11)
  np.testing.assert_allclose(jnp.concatenate([first, second], axis=1), whole, atol=1e-12)


def test_a_gate_counts_as_one_more_projection():
  def flops(gate):
    return windowed(output_gate=gate).forward_flops(WIDTH)

  counted = hk.transform(lambda: flops(True) - flops(False)).apply({}, None)
  assert counted == 2 * WIDTH * HEADS * HEAD_WIDTH


def test_forms_that_cannot_be_are_refused():
  with pytest.raises(ConfigurationError, match="query_key_norm='each' is unknown"):
    hk.transform(lambda: windowed(query_key_norm='each')).init(None)
