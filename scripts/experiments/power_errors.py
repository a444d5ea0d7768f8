"""The largest errors of the powers of S5's decay, in float32, for pieces of different lengths.

bash scripts/experiment power_errors
"""
# Environment: base

import sys

import jax
import jax.numpy as jnp
import numpy as np

from valkyrie.distributed import console
from valkyrie.models.recurrence.scan import FORMS, Complex, diagonal_scan
from valkyrie.models.recurrence.sharded_scan import powers
from valkyrie.models.s5 import init

STATES = 96
BLOCKS = 4
HORIZONS = (2e3, 2e5, 1e7)
LENGTHS = (512, 2048)


def growths(horizon: float) -> np.ndarray:
  """Λ̄ - 1 of a fresh S5 layer, each part rounded to float32."""
  eigenvalues, _ = init.block_diagonal(STATES, BLOCKS)
  constants = np.exp(np.random.default_rng(0).uniform(np.log(20), np.log(horizon), STATES))
  growth = np.expm1(-eigenvalues / eigenvalues.real / constants)
  return np.float32(growth.real).astype(np.float64) + 1j * np.float32(growth.imag)


def tables(growth: Complex, length: int) -> Complex:
  """Λ̄^1 .. Λ̄^length, by `sharded_scan.powers`."""
  started = growth.map(lambda part: part[None])
  started = Complex(1 + started.re, started.im)
  return powers(growth, length).times(started, length).map(lambda part: part[:, 0])


def running_product(form: str):
  """Λ̄^1 .. Λ̄^length, by a scan of zero inputs from 1."""

  def of(growth: Complex, length: int) -> Complex:
    one = Complex(jnp.ones((1, STATES)), jnp.zeros((1, STATES)))
    zero = Complex(*jnp.zeros((2, length, 1, STATES)))
    reset = jnp.zeros((length, 1), bool)
    return diagonal_scan(growth, zero, one, reset, form=form).map(lambda part: part[:, 0])

  return of


@console.program
def main() -> None:
  """Prints the table."""
  methods = {'tables': tables, **{f'{form} product': running_product(form) for form in FORMS}}
  print('horizon  length' + ''.join(f'{name:>22}' for name in methods))
  for horizon in HORIZONS:
    exact = growths(horizon)
    growth = Complex(jnp.asarray(exact.real, jnp.float32), jnp.asarray(exact.imag, jnp.float32))
    for length in LENGTHS:
      expected = np.exp(np.log1p(exact)[None] * np.arange(1, length + 1)[:, None])
      errors = []
      for method in methods.values():
        found = jax.jit(method, static_argnums=1)(growth, length)
        value = np.asarray(found.re, np.float64) + 1j * np.asarray(found.im, np.float64)
        errors.append(np.abs(value - expected).max())
      print(f'{horizon:7.0e}{length:8}' + ''.join(f'{error:22.1e}' for error in errors))


if __name__ == '__main__':
  sys.exit(main())
