"""S5 from its equations: numpy, complex128, one step after the other, a document at a time."""

import itertools

import numpy as np


def system_of(parameters):
  """The float32 parameters of an `S5` module, widened: Λ, B, C, D, log Δ."""
  p = {name: np.asarray(x, np.float64) for name, x in parameters.items()}
  real = -np.exp(p['log_rate']) if 'log_rate' in p else p['lambda_re']
  return {
    'eigenvalues': real + 1j * p['lambda_im'],
    'b': p['b'][0] + 1j * p['b'][1],
    'c': p['c'][0] + 1j * p['c'][1],
    'd': p['d'],
    'log_step': p['log_step'],
  }


def discretized(eigenvalues, step, method):
  """(Λ̄, the gain of B)."""
  decay = np.exp(eigenvalues * step)
  if method == 'zoh':
    return decay, (decay - 1) / eigenvalues
  if method == 'normalized':
    return decay, np.minimum(np.sqrt(1 - np.abs(decay) ** 2), np.abs(1 - decay))
  half = eigenvalues * step / 2
  return (1 + half) / (1 - half), step / (1 - half)


def documents(positions):
  """(begin, end) of each document, or of what stands of it, in a row's positions [T]."""
  edges = sorted({0, *np.flatnonzero(positions == 0), len(positions)})
  return list(itertools.pairwise(edges))


def layer(
  system,
  u,
  initial,
  positions,
  *,
  method='zoh',
  conj_sym=True,
  clip=False,
  step_rescale=1.0,
  bidirectional=False,
  step_weights=None,
):
  """The layer before its activation: (y [B, T, D], the last state [B, P]).

  With `step_weights` [D, P], every step depends on its input: Δ_t = log(1 + Δ exp(u_t W)).
  """
  eigenvalues = system['eigenvalues']
  if clip:
    eigenvalues = np.minimum(eigenvalues.real, -1e-4) + 1j * eigenvalues.imag

  def step_of(u_t):
    step = np.exp(system['log_step'])
    return step if step_weights is None else np.log1p(step * np.exp(u_t @ step_weights))

  def after(x, u_t):
    decay, gain = discretized(eigenvalues, step_rescale * step_of(u_t), method)
    return decay * x + gain * (system['b'] @ u_t)

  y, last = np.zeros(u.shape), []
  for row in range(len(u)):
    x = initial[row]
    for begin, end in documents(positions[row]):
      if positions[row, begin] == 0:
        x = np.zeros_like(x)
      states = []
      for t in range(begin, end):
        x = after(x, u[row, t])
        states.append(x)
      read = np.stack(states)
      if bidirectional:
        back, states = np.zeros_like(x), []
        for t in reversed(range(begin, end)):
          back = after(back, u[row, t])
          states.append(back)
        read = np.concatenate([read, np.stack(states[::-1])], axis=1)
      out = read @ system['c'].T
      if conj_sym:
        out = out + read.conj() @ system['c'].conj().T  # the states that are not stored
      y[row, begin:end] = out.real + system['d'] * u[row, begin:end]
    last.append(x)
  return y, np.stack(last)
