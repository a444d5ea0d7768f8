"""Causal importance: how much each token needs each component, from the clean activations.

An importance function gives one logit z for each token and component. Two squashings of it are
used: the lower one in the masks of components, the upper one in the pressure to be small (D6).
"""

from collections.abc import Mapping
import dataclasses
import math
from typing import Any, ClassVar, Protocol
import zlib

import gin
import jax
import jax.numpy as jnp

from valkyrie.models.declarations import Parameter
from valkyrie.models.layers import check_sizes
from valkyrie.models.sites import Site
from valkyrie.types import Array, Params

LEAK = 0.01
MODULE = 'decomposition/importance'


@jax.custom_vjp
def lower(z: Array) -> Array:
  """clip(z, 0, 1). Its gradient leads out of z < 0, if descent raises z, and not out of z > 1."""
  return jnp.clip(z, 0, 1)


def _lower_backward(z: Array, g: Array) -> tuple[Array]:
  below = jnp.where(g < 0, LEAK * g, 0)
  return (jnp.where(z <= 0, below, jnp.where(z <= 1, g, 0)),)


lower.defvjp(lambda z: (lower(z), z), _lower_backward)


def upper(z: Array) -> Array:
  """clip(z, 0, 1), with a slope of 0.01 above 1."""
  return jnp.where(z > 1, 1 + LEAK * (z - 1), jnp.clip(z, 0, 1))


class Importance(Protocol):
  """The importance functions of all sites."""

  def shapes(self, sites: Mapping[str, Site]) -> Mapping[str, tuple[tuple[int, ...], float]]:
    """{name of a parameter: (its shape, the standard deviation of its first values)}."""
    ...

  def logits(self, params: Mapping[str, Array], path: str, x: Array, v: Array) -> Array:
    """z [L, B, T, C] of a site, from its inputs x [L, B, T, d_in] and its V [L, d_in, C]."""
    ...


@dataclasses.dataclass(frozen=True)
class _Net:
  """Two layers with an exact GELU between them.

  Attributes:
    width: h, of the hidden layer.
  """

  width: int = 16

  def __post_init__(self):
    check_sizes(type(self).__name__, width=self.width)

  def shapes(self, sites):
    """Weights with fan-in, and a gain of sqrt(2) before the GELU; biases zero."""
    found = {}
    for path, site in sites.items():
      first, second, inputs = self._sizes(site)
      found |= {
        f'{path}/w1': (first, math.sqrt(2 / inputs)),
        f'{path}/b1': ((*first[:-2], first[-1]) if self._joint else first, 0.0),
        f'{path}/w2': (second, self.width**-0.5),
        f'{path}/b2': ((site.layers, site.components), 0.0),
      }
    return found


@gin.configurable
class PerComponent(_Net):
  """A net 1 -> h -> 1 for each component, of its inner activation x V."""

  _joint: ClassVar[bool] = False

  def _sizes(self, site: Site):
    each = site.layers, site.components, self.width
    return each, each, 1

  def logits(self, params, path, x, v):
    inner = jnp.einsum('lbtd,ldc->lbtc', x, v.astype(x.dtype))
    w1, b1, w2, b2 = (params[f'{path}/{name}'] for name in ('w1', 'b1', 'w2', 'b2'))
    hidden = inner[..., None] * w1[:, None, None] + b1[:, None, None]
    active = jax.nn.gelu(hidden, approximate=False)
    return jnp.einsum('lbtch,lch->lbtc', active, w2) + b2[:, None, None]


@gin.configurable
class Shared(_Net):
  """A net d_in -> h -> C for each site, of its input."""

  _joint: ClassVar[bool] = True

  def _sizes(self, site: Site):
    first = site.layers, site.d_in, self.width
    return first, (site.layers, self.width, site.components), site.d_in

  def logits(self, params, path, x, v):
    del v
    w1, b1, w2, b2 = (params[f'{path}/{name}'] for name in ('w1', 'b1', 'w2', 'b2'))
    hidden = jnp.einsum('lbtd,ldh->lbth', x, w1.astype(x.dtype)) + b1[:, None, None]
    active = jax.nn.gelu(hidden, approximate=False)
    return jnp.einsum('lbth,lhc->lbtc', active, w2) + b2[:, None, None]


def parameters(importance: Importance, sites: Mapping[str, Site]) -> Any:
  """Their declarations, as `Model.parameters` has them: every device has them whole."""
  return {
    MODULE: {
      name: Parameter(jax.ShapeDtypeStruct(shape, jnp.float32), (None,) * len(shape), None)
      for name, (shape, _) in importance.shapes(sites).items()
    }
  }


def initial(importance: Importance, sites: Mapping[str, Site], rng: Array) -> Params:
  """Their first values, each by a key of its own name."""

  def value(name, shape, deviation):
    key = jax.random.fold_in(rng, zlib.crc32(name.encode()))
    return deviation * jax.random.normal(key, shape, jnp.float32)

  shapes = importance.shapes(sites)
  return {MODULE: {name: value(name, *of) for name, of in shapes.items()}}
