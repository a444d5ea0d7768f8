"""The plain layers: parameters in float32, arithmetic in the dtype of what comes in."""

import haiku as hk
import jax
import jax.numpy as jnp

from valkyrie.types import Array


class Linear(hk.Module):
  """x @ w without a bias. w [D_in, D_out] is float32 and cast to x's dtype where it is used."""

  def __init__(self, width: int, name: str | None = None):
    super().__init__(name)
    self.width = width

  def __call__(self, x: Array) -> Array:
    fan_in = x.shape[-1]
    init = hk.initializers.TruncatedNormal(fan_in**-0.5)
    w = hk.get_parameter('w', (fan_in, self.width), jnp.float32, init)
    return x @ w.astype(x.dtype)


class RMSNorm(hk.Module):
  """Root-mean-square normalisation (Zhang & Sennrich 2019, eq. 4), computed in float32."""

  def __call__(self, x: Array) -> Array:
    scale = hk.get_parameter('scale', (x.shape[-1],), jnp.float32, jnp.ones)
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean_square + 1e-6) * scale).astype(x.dtype)


class GatedMLP(hk.Module):
  """w_out(gelu(x w_gate) * x w_in) (Shazeer 2020, GEGLU)."""

  def __init__(self, width: int, name: str | None = None):
    super().__init__(name)
    self.width = width

  def __call__(self, x: Array) -> Array:
    gate = jax.nn.gelu(Linear(self.width, name='gate')(x))
    return Linear(x.shape[-1], name='out')(gate * Linear(self.width, name='in')(x))

  def forward_flops(self, width: int) -> int:
    """Three matrix products of width x self.width a token."""
    return 6 * width * self.width
