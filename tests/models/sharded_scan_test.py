"""Powers of a decay against 64-bit mantissas, as far as a long chunk reaches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from valkyrie.models.recurrence.scan import Complex
from valkyrie.models.recurrence.sharded_scan import powers


def growths(dtype):
  """Of decays near the unit circle, where powers last, at all angles; and one inside."""
  random = np.random.default_rng(0)
  rate = np.r_[10 ** random.uniform(-7, -4, 15), 0.7]
  angle = np.r_[random.uniform(-np.pi, np.pi, 10), 10 ** random.uniform(-6, -2, 6)]
  z = np.expm1(-rate + 1j * angle)
  return Complex(np.asarray(z.real, dtype), np.asarray(z.imag, dtype))


def exact(decay):
  return np.asarray(decay.re, np.longdouble) + 1j * np.asarray(decay.im, np.longdouble)


@pytest.mark.parametrize(('dtype', 'highest'), [(np.float32, 131_072), (np.float64, 1000)])
def test_every_power_is_right_to_a_few_roundings(dtype, highest):
  growth = growths(dtype)
  decay = 1 + exact(growth)
  one = Complex(np.ones((1, 16), dtype), np.zeros((1, 16), dtype))
  some = np.r_[: min(highest, 600), np.linspace(0, highest - 1, 300, dtype=int)]
  with jax.enable_x64(dtype == np.float64):
    table = jax.jit(powers, static_argnums=1)(growth, highest)
    everything = table.times(one, highest)
    found = exact(everything)[some, 0], exact(table.at(some)), exact(table.at(np.array([highest])))
  assert everything.re.dtype == dtype
  for powers_found, exponents in zip(found, (some, some, np.array([highest])), strict=True):
    expected = decay ** exponents[:, None]
    lasts = np.abs(expected) > 1e-30  # where float32 has all its digits
    off = np.abs(powers_found - expected)[lasts] / np.abs(expected)[lasts]
    assert np.max(off) < 4 * np.finfo(dtype).eps


def test_the_gradient_in_float64():
  """By central differences, with lengths on both sides of a table's edge."""
  random = np.random.default_rng(1)
  time, lengths = 70, np.array([0, 7, 64, 70])
  growth = Complex(random.uniform(-1.7, -0.3, 5), random.uniform(-0.7, 0.7, 5))
  x, to_x = (Complex(*random.normal(size=(2, 4, 5))) for _ in range(2))
  weights = Complex(*random.normal(size=(2, time, 4, 5)))

  with jax.enable_x64(True):

    @jax.jit
    def loss(growth):
      table = powers(growth, time)
      grown, passed = table.times(x, time), table.at(lengths)
      return jnp.sum((weights * grown).re) + jnp.sum((to_x * passed).re)

    gradient = jax.grad(loss)(growth)
    for part in range(2):
      for p in range(5):
        step = np.zeros((2, 5))
        step[part, p] = 1e-6
        up, down = (loss(Complex(growth.re + s[0], growth.im + s[1])) for s in (step, -step))
        np.testing.assert_allclose(gradient[part][p], (up - down) / 2e-6, rtol=1e-7, atol=1e-7)
