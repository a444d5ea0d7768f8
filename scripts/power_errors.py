"""The largest errors of the powers of S5's decay, in float32, for pieces of different lengths.

PYTHONPATH=. python scripts/power_errors.py
"""

import jax
import jax.numpy as jnp
import numpy as np

from valkyrie.models.s5 import init
from valkyrie.models.s5.scan import FORMS, Complex, diagonal_scan
from valkyrie.models.s5.sharded_scan import powers

STATES, BLOCKS = 96, 4
STEP_RANGES = ((1e-3, 0.1), (1e-5, 0.1))
LENGTHS = (2048, 8192, 32768)


def decays(step_range: tuple[float, float]) -> np.ndarray:
  """Λ̄ of a fresh S5 layer, each part rounded to float32."""
  eigenvalues, _ = init.block_diagonal(STATES, BLOCKS)
  low, high = np.log(step_range)
  steps = np.exp(np.random.default_rng(0).uniform(low, high, STATES))
  decay = np.exp(eigenvalues * steps)
  return np.float32(decay.real).astype(np.float64) + 1j * np.float32(decay.imag)


def tables(decay: Complex, length: int) -> Complex:
  """Λ̄^1 .. Λ̄^length, by `sharded_scan.powers`."""
  started = decay.map(lambda part: part[None])
  return powers(decay, length).times(started, length).map(lambda part: part[:, 0])


def running_product(form: str):
  """Λ̄^1 .. Λ̄^length, by a scan of zero inputs from 1."""

  def of(decay: Complex, length: int) -> Complex:
    one = Complex(jnp.ones((1, STATES)), jnp.zeros((1, STATES)))
    zero = Complex(*jnp.zeros((2, length, 1, STATES)))
    reset = jnp.zeros((length, 1), bool)
    return diagonal_scan(decay, zero, one, reset, form=form).map(lambda part: part[:, 0])

  return of


def main() -> None:
  """Prints the table."""
  methods = {'tables': tables, **{f'{form} product': running_product(form) for form in FORMS}}
  print('steps at initialization  length' + ''.join(f'{name:>22}' for name in methods))
  for step_range in STEP_RANGES:
    exact = decays(step_range)
    decay = Complex(jnp.asarray(exact.real, jnp.float32), jnp.asarray(exact.imag, jnp.float32))
    for length in LENGTHS:
      expected = exact[None] ** np.arange(1, length + 1)[:, None]
      errors = []
      for method in methods.values():
        found = jax.jit(method, static_argnums=1)(decay, length)
        value = np.asarray(found.re, np.float64) + 1j * np.asarray(found.im, np.float64)
        errors.append(np.abs(value - expected).max())
      print(f'{step_range!s:>23}{length:8}' + ''.join(f'{error:22.1e}' for error in errors))


if __name__ == '__main__':
  main()
