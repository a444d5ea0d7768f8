"""S5 from its equations: numpy, complex128, one step after the other, a document at a time."""

import itertools

import numpy as np


def system_of(parameters):
  """The float32 parameters of an `S5` module, widened: Λ, B, C, D, log Δ."""
  p = {name: np.asarray(x, np.float64) for name, x in parameters.items()}
  return {
    'eigenvalues': p['lambda_re'] + 1j * p['lambda_im'],
    'b': p['b'][0] + 1j * p['b'][1],
    'c': p['c'][0] + 1j * p['c'][1],
    'd': p['d'],
    'log_step': p['log_step'],
  }


def discretized(eigenvalues, step, method):
  """(Λ̄, the gain of B)."""
  if method == 'zoh':
    decay = np.exp(eigenvalues * step)
    return decay, (decay - 1) / eigenvalues
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
):
  """The layer before its activation: (y [B, T, D], the last state [B, P])."""
  eigenvalues = system['eigenvalues']
  if clip:
    eigenvalues = np.minimum(eigenvalues.real, -1e-4) + 1j * eigenvalues.imag
  decay, gain = discretized(eigenvalues, step_rescale * np.exp(system['log_step']), method)
  b_bar = gain[:, None] * system['b']
  y, last = np.zeros(u.shape), []
  for row in range(len(u)):
    x = initial[row]
    for begin, end in documents(positions[row]):
      if positions[row, begin] == 0:
        x = np.zeros_like(x)
      states = []
      for t in range(begin, end):
        x = decay * x + b_bar @ u[row, t]
        states.append(x)
      read = np.stack(states)
      if bidirectional:
        back, states = np.zeros_like(x), []
        for t in reversed(range(begin, end)):
          back = decay * back + b_bar @ u[row, t]
          states.append(back)
        read = np.concatenate([read, np.stack(states[::-1])], axis=1)
      out = read @ system['c'].T
      if conj_sym:
        out = out + read.conj() @ system['c'].conj().T  # the states that are not stored
      y[row, begin:end] = out.real + system['d'] * u[row, begin:end]
    last.append(x)
  return y, np.stack(last)
