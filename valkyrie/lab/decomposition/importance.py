"""Causal importance: how much each token needs each component, from the clean activations.

An importance function gives one logit z for each token and component. Two functions clip it: the
lower one for the masks of components, the upper one for the pressure to be small (D6).
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import math
from typing import Protocol
import zlib

import gin
import haiku as hk
import jax
import jax.numpy as jnp

from valkyrie.config.ranges import PositiveInt, check_fields
from valkyrie.errors import ConfigurationError
from valkyrie.models.block import Block
from valkyrie.models.declarations import Parameter
from valkyrie.models.layers import RMSNorm, project
from valkyrie.models.model import created
from valkyrie.models.sites import Site
from valkyrie.sharding import layer_weights
from valkyrie.types import Array, Batch, Carry, DType, Params

Sites = Mapping[str, Site]
LEAK = 0.01
_TINY = 1e-12
NETS = 'decomposition/nets'  # the module of the nets


@jax.custom_vjp
def lower(z: Array) -> Array:
  """clip(z, 0, 1). Its gradient leads out of z < 0, if descent raises z, and not out of z > 1."""
  return jnp.clip(z, 0, 1)


def _lower_backward(z: Array, g: Array) -> tuple[Array]:
  below = jnp.where(g < 0, LEAK * g, 0)
  inside_or_above = jnp.where(z <= 1, g, 0)
  return (jnp.where(z <= 0, below, inside_or_above),)


lower.defvjp(lambda z: (lower(z), z), _lower_backward)


def upper(z: Array) -> Array:
  """clip(z, 0, 1), with a slope of 0.01 above 1."""
  above = 1 + LEAK * (z - 1)
  inside = jnp.clip(z, 0, 1)
  return jnp.where(z > 1, above, inside)


def counted(high: Array, exponent: Array | float, smooth: bool = False) -> Array:
  """What minimality counts of the upper importances g: (g + 1e-12)^p, or g² / (g² + p²) (D11)."""
  if smooth:
    square = high * high
    return square / (square + exponent**2)
  return (high + _TINY) ** exponent


class Importance(Protocol):
  """The importance functions of all sites."""

  def created(self, sites: Sites) -> tuple[Callable, Callable]:
    """The functions `init` and `parameters` of `Model.extended`."""
    ...

  def initial_carry(self, rows: int, dtype: DType) -> Carry:
    """The carry of rows that have read nothing."""
    ...

  def __call__(
    self, params: Params, sites: Sites, inputs: Mapping[str, Array], carry: Carry, batch: Batch
  ) -> tuple[dict[str, Array], Carry]:
    """({path: z [L, B, T, C]}, the carry after), from the inputs [L, B, T, d_in] of each site."""
    ...


@dataclasses.dataclass(frozen=True)
class _Nets:
  """Nets of two layers with an exact GELU between them, of each token by itself.

  Attributes:
    width: h, the width of the hidden layer.
  """

  width: PositiveInt = 16

  def __post_init__(self):
    check_fields(self)

  def _shapes(self, site: Site) -> dict[str, tuple[tuple[int, ...], float]]:
    """{name: (shape, standard deviation)} of the parameters of a site."""
    raise NotImplementedError

  def _logits(self, params: Mapping[str, Array], x: Array, v: Callable[[], Array]) -> Array:
    """z [L, B, T, C] from the parameters of a site, its inputs [L, B, T, d_in] and its V()."""
    raise NotImplementedError

  def created(self, sites):
    """Every device has the parameters whole. The key of a parameter depends on its name."""
    shapes = {}
    for path, site in sites.items():
      for name, shape in self._shapes(site).items():
        shapes[f'{path}/{name}'] = shape

    def init(rng):
      params = {}
      for name, (shape, deviation) in shapes.items():
        seed = zlib.crc32(name.encode())
        key = jax.random.fold_in(rng, seed)
        params[name] = deviation * jax.random.normal(key, shape, jnp.float32)
      return {NETS: params}

    def parameters():
      declared = {}
      for name, (shape, _) in shapes.items():
        struct = jax.ShapeDtypeStruct(shape, jnp.float32)
        axes = (None,) * len(shape)
        declared[name] = Parameter(struct, axes, None)
      return {NETS: declared}

    return init, parameters

  def initial_carry(self, rows, dtype):
    return ()

  def __call__(self, params, sites, inputs, carry, batch):
    return self.logits(params, sites, inputs), carry

  def logits(self, params: Params, sites: Sites, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """{path: z [L, B, T, C]}; each token is read by itself."""
    z = {}
    for path, site in sites.items():
      z[path] = self._site_logits(params, path, site, inputs[path])
    return z

  def _site_logits(self, params: Params, path: str, site: Site, x: Array) -> Array:
    net = {name: params[NETS][f'{path}/{name}'] for name in ('w1', 'b1', 'w2', 'b2')}
    shape = site.layers, site.d_in, site.components

    def v():
      factor, _ = site.factors(params)
      return layer_weights.whole(factor, shape, x.dtype)

    return self._logits(net, x, v)


@gin.configurable
class PerComponent(_Nets):
  """A net 1 -> h -> 1 for each component, of its inner activation x V."""

  def _shapes(self, site: Site) -> dict[str, tuple[tuple[int, ...], float]]:
    """{name: (shape, standard deviation)}: by fan-in, with sqrt(2) before the GELU."""
    hidden = (site.layers, site.components, self.width)
    out = (site.layers, site.components)
    return {
      'w1': (hidden, math.sqrt(2)),
      'b1': (hidden, 0.0),
      'w2': (hidden, self.width**-0.5),
      'b2': (out, 0.0),
    }

  def _logits(self, params, x, v):
    factor = v().astype(x.dtype)
    inner = jnp.einsum('lbtd,ldc->lbtc', x, factor)
    w1 = params['w1'][:, None, None]
    b1 = params['b1'][:, None, None]
    b2 = params['b2'][:, None, None]
    linear = inner[..., None] * w1 + b1
    hidden = jax.nn.gelu(linear, approximate=False)
    out = jnp.einsum('lbtch,lch->lbtc', hidden, params['w2'])
    return out + b2


@gin.configurable
class Shared(_Nets):
  """A net d_in -> h -> C for each site, of its input."""

  def _shapes(self, site: Site) -> dict[str, tuple[tuple[int, ...], float]]:
    layers = site.layers
    h = self.width
    c = site.components
    return {
      'w1': ((layers, site.d_in, h), math.sqrt(2 / site.d_in)),
      'b1': ((layers, h), 0.0),
      'w2': ((layers, h, c), h**-0.5),
      'b2': ((layers, c), 0.0),
    }

  def _logits(self, params, x, v):
    w1 = params['w1'].astype(x.dtype)
    b1 = params['b1'][:, None, None]
    b2 = params['b2'][:, None, None]
    inner = jnp.einsum('lbtd,ldh->lbth', x, w1)
    hidden = jax.nn.gelu(inner + b1, approximate=False)
    out = jnp.einsum('lbth,lhc->lbtc', hidden, params['w2'])
    return out + b2


class _Stack(hk.Module):
  """Blocks that read the inputs of all sites [B, T, D] -> the logits of all components [B, T, S].

  S is the sum of layers times components over the sites.
  """

  def __init__(self, width: int, pattern: Sequence[Callable[..., Block]], logits: int):
    super().__init__('decomposition')
    self._width = width
    self._logits = logits
    self._blocks = [make(name=f'block_{i}') for i, make in enumerate(pattern)]

  def initial_carry(self, rows: int, dtype: DType) -> list[Carry]:
    return [block.initial_carry(rows, dtype) for block in self._blocks]

  def __call__(self, x: Array, carry: list[Carry], batch: Batch) -> tuple[Array, list[Carry]]:
    (x,) = project(x, (None, 'embed'), stream=self._width)
    carries = []
    for block, before in zip(self._blocks, carry, strict=True):
      x, after = block(x, before, positions=batch.positions, segment_ids=batch.segment_ids)
      carries.append(after)
    x = RMSNorm(name='final_norm')(x)
    (z,) = project(x, ('embed', None), logits=self._logits)
    return z, carries


@gin.configurable
@dataclasses.dataclass(frozen=True)
class Blocks:
  """A causal stack that reads the normalized inputs of all sites, with a carry of its own.

  Attributes:
    width: the width of its residual stream.
    pattern: classes of its blocks (`@importance/Block` in gin), one for each layer.
  """

  width: PositiveInt
  pattern: Sequence[Callable[..., Block]]

  def __post_init__(self):
    check_fields(self)
    if not self.pattern:
      raise ConfigurationError(
        'Blocks.pattern is empty. Name at least one block, such as (@importance/Block,).'
      )

  def _stack(self, sites: Sites) -> _Stack:
    counts = [site.layers * site.components for site in sites.values()]
    logits = sum(counts)
    return _Stack(self.width, self.pattern, logits)

  def created(self, sites):
    def read_a_token():
      widths = [site.layers * site.d_in for site in sites.values()]
      stack = self._stack(sites)
      carry = stack.initial_carry(1, jnp.float32)
      one = jnp.ones((1, 1), jnp.int32)
      batch = Batch(one, one, jnp.ones((1, 1)), one, one)
      x = jnp.zeros((1, 1, sum(widths)))
      stack(x, carry, batch)

    return created(read_a_token)

  def initial_carry(self, rows, dtype):
    make = hk.transform(lambda: self._stack({}).initial_carry(rows, dtype))
    return make.apply({}, None)

  def __call__(self, params, sites, inputs, carry, batch):
    inputs_of_sites = [_flat(inputs[path]) for path in sites]
    x = jnp.concatenate(inputs_of_sites, axis=-1)
    read = hk.transform(lambda: self._stack(sites)(x, carry, batch))
    all_logits, after = read.apply(params, None)
    z = {}
    begin = 0
    for path, site in sites.items():
      end = begin + site.layers * site.components
      shape = (*all_logits.shape[:2], site.layers, site.components)
      by_layer = all_logits[..., begin:end].reshape(shape)
      z[path] = jnp.moveaxis(by_layer, 2, 0)
      begin = end
    return z, after


def _flat(x: Array) -> Array:
  """[L, B, T, d_in] -> [B, T, L d_in], each input with a mean square of 1."""
  mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
  normalized = x * jax.lax.rsqrt(mean_square + 1e-6)
  _, rows, time, _ = x.shape
  by_token = jnp.moveaxis(normalized, 0, 2)
  return by_token.reshape(rows, time, -1)
