"""Attention by its definition: every pair of tokens at once, in float64, with numpy alone."""

import numpy as np


def scores(q, k, distance):
  """q [T, K] against k [S, K], each pair at its own distance [T, S], rotated as RoPE would."""
  half = q.shape[-1] // 2
  frequency = 10_000.0 ** -(np.arange(half) / half)
  turn = np.exp(1j * distance[..., None] * frequency)
  q, k = (x[:, :half] + 1j * x[:, half:] for x in (q, k))
  return np.einsum('tf,sf,tsf->ts', q, k.conj(), turn).real * (2 * half) ** -0.5


def attend(logits, seen):
  """The weights [T, S] of a softmax over what is seen; zero where that is nothing."""
  weights = np.where(seen, np.exp(logits), 0)
  total = weights.sum(axis=-1, keepdims=True)
  return weights / np.where(total > 0, total, 1)


def bidirectional(local, from_global, segments, global_tokens, window, dilations):
  """Longformer as published: a window on both sides, and global_tokens tokens that see everything.

  local, from_global: (q [B, T, H, K], k and v [B, T, J, K]) each. global_tokens: bool [B, T].
  A global_tokens token that the window does not show is read as if at the window's edge.
  """
  out = np.zeros_like(local[0])
  batch, time, heads, _ = out.shape
  distance = np.arange(time)[:, None] - np.arange(time)[None]
  for b in range(batch):
    same = (segments[b][:, None] == segments[b][None]) & (segments[b] > 0)[:, None]
    for h in range(heads):
      j = h * len(dilations) // heads
      reach = window * dilations[j]
      shown = (np.abs(distance) <= reach) & (distance % dilations[j] == 0)
      q, k, v = local[0][b, :, h], local[1][b, :, j], local[2][b, :, j]
      away = np.where(shown, distance, np.sign(distance) * reach)
      near = attend(scores(q, k, away), same & (shown | global_tokens[b][None])) @ v
      q, k, v = from_global[0][b, :, h], from_global[1][b, :, j], from_global[2][b, :, j]
      everything = attend(scores(q, k, np.clip(distance, -reach, reach)), same) @ v
      out[b, :, h] = np.where(global_tokens[b][:, None], everything, near)
  return out


def causal(q, k, v, registers, positions, segments, window, dilations, starts):
  """A window back, registers, and the first tokens of the document -> [B, T, H, K].

  registers: keys and values, each [R, J, K]. What is not in the window is read as if at its edge.
  """
  register_keys, register_values = registers
  weights = causal_weights(q, k, register_keys, positions, segments, window, dilations, starts)
  rows = np.broadcast_to(register_values, (len(v), *register_values.shape))
  values = np.concatenate([rows, v], axis=1)
  of_heads = np.repeat(values, q.shape[2] // len(dilations), axis=2)
  return np.einsum('bths,bshk->bthk', weights, of_heads)


def causal_weights(q, k, register_keys, positions, segments, window, dilations, starts):
  """The weights [B, T, H, R + T] of the keys of `causal`."""
  batch, time, heads, _ = q.shape
  count = len(register_keys)
  weights = np.zeros((batch, time, heads, count + time))
  distance = np.arange(time)[:, None] - np.arange(time)[None]
  for b in range(batch):
    same = (segments[b][:, None] == segments[b][None]) & (segments[b] > 0)[:, None]
    for h in range(heads):
      j = h * len(dilations) // heads
      reach = window * dilations[j]
      shown = (distance >= 0) & (distance <= reach) & (distance % dilations[j] == 0)
      start = (distance > 0) & (positions[b] < starts)[None]
      keys = np.concatenate([register_keys[:, j], k[b, :, j]])
      always = np.full((time, count), True)
      seen = np.concatenate([always, same & (shown | start)], axis=1)
      away = np.concatenate([reach * always, np.where(shown, distance, reach)], axis=1)
      weights[b, :, h] = attend(scores(q[b, :, h], keys, away), seen)
  return weights
