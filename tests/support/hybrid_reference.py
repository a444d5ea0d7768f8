"""Parts of hybrids of other programs in float64, one token after the other, from their equations.

Tensors have their names and forms there: matrices are [outputs, inputs], and convolutions [F, 1, k]
with the current token last.
"""

import numpy as np


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def silu(x):
  return x * sigmoid(x)


def gelu(x):
  """In the tanh form."""
  return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def softplus(x):
  return np.log1p(np.exp(x))


def rms(x, epsilon):
  return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + epsilon)


def unit(x):
  return x / np.sqrt(np.sum(x**2, -1, keepdims=True) + 1e-6)


def convolve(x, weight, bias=0.0):
  """x [T, F], zeros before it."""
  taps = weight.shape[-1]
  padded = np.concatenate([np.zeros((taps - 1, x.shape[1])), x])
  return sum(weight[:, 0, tap] * padded[tap : tap + len(x)] for tap in range(taps)) + bias


def gated_delta(x, w, *, heads, value_heads, key, value, epsilon, double=False):
  """x [T, D]; w has q, k, v, g, a, b, o, A_log, dt_bias, conv [2 H K + H_v Z, 1, k] and norm."""
  time, share = len(x), value_heads // heads
  mixed = silu(convolve(np.concatenate([x @ w[name].T for name in 'qkv'], axis=1), w['conv']))
  q, k, v = np.split(mixed, (heads * key, 2 * heads * key), axis=1)
  q, k = (unit(part.reshape(time, heads, key)) for part in (q, k))
  v, gate = (part.reshape(time, value_heads, value) for part in (v, x @ w['g'].T))
  decay = np.exp(-np.exp(w['A_log']) * softplus(x @ w['a'].T + w['dt_bias']))
  beta = (2 if double else 1) * sigmoid(x @ w['b'].T)
  state = np.zeros((value_heads, key, value))
  out = np.zeros((time, value_heads, value))
  for t in range(time):
    for h in range(value_heads):
      read = k[t, h // share]
      old = decay[t, h] * state[h]
      state[h] = old + np.outer(read, beta[t, h] * (v[t, h] - old.T @ read))
      out[t, h] = state[h].T @ q[t, h // share] / np.sqrt(key)
  return (rms(out, epsilon) * w['norm'] * silu(gate)).reshape(time, -1) @ w['o'].T


def rotate(x, base, share=1.0, factor=1.0):
  """x [T, H, K] at the positions 0, 1, ..; the first int(share K) channels of a head turn.

  All of them turn `factor` times more slowly.
  """
  turned = int(share * x.shape[-1])
  if not turned:
    return x
  first, second = np.split(x[..., :turned], 2, axis=-1)
  pairs = turned // 2
  angle = np.arange(len(x))[:, None, None] * base ** (-np.arange(pairs) / pairs) / factor
  c, s = np.cos(angle), np.sin(angle)
  return np.concatenate([first * c - second * s, second * c + first * s, x[..., turned:]], axis=-1)


def attend(q, k, v, window=None):
  """q [T, H, K], k and v [T, J, K] -> [T, H, K]; a token sees itself and window - 1 before it."""
  time, heads, width = q.shape
  k, v = (np.repeat(part, heads // k.shape[1], axis=1) for part in (k, v))
  behind = np.arange(time)[:, None] - np.arange(time)[None]
  seen = (behind >= 0) & (behind < (window or time))
  scores = np.where(seen, np.einsum('qhk,nhk->hqn', q, k) / np.sqrt(width), -np.inf)
  shares = np.exp(scores - scores.max(-1, keepdims=True))
  return np.einsum('hqn,nhk->qhk', shares / shares.sum(-1, keepdims=True), v)


def mamba2(x, w, *, heads, width, states, groups, epsilon):
  """x [T, D]; w has in_proj, conv, conv_bias, A_log, dt_bias, D, norm and out_proj."""
  time, inner, share = len(x), heads * width, heads // groups
  z, xbc, dt = np.split(x @ w['in_proj'].T, (inner, 2 * inner + 2 * groups * states), axis=1)
  xbc = silu(convolve(xbc, w['conv'], w['conv_bias']))
  u, b, c = np.split(xbc, (inner, inner + groups * states), axis=1)
  u = u.reshape(time, heads, width)
  b, c = (part.reshape(time, groups, states) for part in (b, c))
  step = softplus(dt + w['dt_bias'])
  state = np.zeros((heads, states, width))
  y = np.zeros((time, heads, width))
  for t in range(time):
    for h in range(heads):
      decay = np.exp(-step[t, h] * np.exp(w['A_log'][h]))
      state[h] = decay * state[h] + step[t, h] * np.outer(b[t, h // share], u[t, h])
      y[t, h] = state[h].T @ c[t, h // share] + w['D'][h] * u[t, h]
  gated = (y.reshape(time, inner) * silu(z)).reshape(time, groups, -1)
  return (rms(gated, epsilon).reshape(time, inner) * w['norm']) @ w['out_proj'].T


class Draws:
  """Random tensors whose values float32 and, for scales near 1, 1 + w hold exactly."""

  def __init__(self, seed):
    self._random = np.random.default_rng(seed)

  def matrix(self, outputs, inputs):
    return (self._random.normal(size=(outputs, inputs)) / np.sqrt(inputs)).astype(np.float32)

  def filters(self, channels, taps):
    return self._random.normal(size=(channels, 1, taps)).astype(np.float32)

  def spread(self, count, least, most):
    return self._random.uniform(least, most, count).astype(np.float32)

  def scale(self, width, center=1.0):
    return (center + self._random.integers(-512, 512, width) / 1024).astype(np.float32)


def delta_tensors(draws, width, *, heads, value_heads, key, value, taps):
  """The tensors of `gated_delta` by its short names; the convolution in q, k and v."""
  keys, values = heads * key, value_heads * value
  return {
    'q': draws.matrix(keys, width),
    'k': draws.matrix(keys, width),
    'v': draws.matrix(values, width),
    'g': draws.matrix(values, width),
    'a': draws.matrix(value_heads, width),
    'b': draws.matrix(value_heads, width),
    'o': draws.matrix(width, values),
    'A_log': draws.spread(value_heads, -2, 1),
    'dt_bias': draws.spread(value_heads, -3, 1),
    'norm': draws.scale(value),
    'q_conv': draws.filters(keys, taps),
    'k_conv': draws.filters(keys, taps),
    'v_conv': draws.filters(values, taps),
  }
