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
NAME = 'decomposition'  # the beginning of the names of modules
NETS = f'{NAME}/nets'


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
    self,
    params: Params,
    sites: Sites,
    inputs: Mapping[str, Array],
    carry: Carry,
    batch: Batch,
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

  def __call__(
    self,
    params,
    sites,
    inputs,
    carry,
    batch,
  ):
    return self.logits(params, sites, inputs), carry

  def logits(self, params: Params, sites: Sites, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """{path: z [L, B, T, C]}; each token is read by itself."""
    z = {}
    for path, site in sites.items():
      z[path] = self._site_logits(params, path, site, inputs[path])
    return z

  def _site_logits(
    self,
    params: Params,
    path: str,
    site: Site,
    x: Array,
  ) -> Array:
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

  def __init__(
    self,
    width: int,
    pattern: Sequence[Callable[..., Block]],
    logits: int,
    name: str,
  ):
    super().__init__(name)
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
    groups: stacks of the same shapes, one for each group of consecutive layers, in a loop; each
      reads the sites of its own layers, and gathers its weights as a layer of the model does.
    recomputed: compute the activations of a group again in the backward pass, instead of saving
      them.
  """

  width: PositiveInt
  pattern: Sequence[Callable[..., Block]]
  groups: PositiveInt = 1
  recomputed: bool = False

  def __post_init__(self):
    check_fields(self)
    if not self.pattern:
      raise ConfigurationError(
        'Blocks.pattern is empty. Name at least one block, such as (@importance/Block,).'
      )

  def _check_sites(self, sites: Sites) -> None:
    counts = sorted({site.layers for site in sites.values()})
    if self.groups > 1 and (len(counts) > 1 or counts[0] % self.groups):
      listed = ', '.join(map(str, counts))
      raise ConfigurationError(
        f'Blocks.groups={self.groups}, but sites have {listed} layers in a stack. Set it to a '
        'divisor of one number of layers that all sites have, or to 1.'
      )

  def _stack(self, sites: Sites, name: str = NAME) -> _Stack:
    """The blocks of a group."""
    counts = [site.layers // self.groups * site.components for site in sites.values()]
    logits = sum(counts)
    return _Stack(self.width, self.pattern, logits, name)

  def _read(
    self,
    sites: Sites,
    x: Array,
    carry: Carry,
    batch: Batch,
  ) -> tuple[Array, Carry]:
    """(Logits [B, T, S], the carry after) of x [B, T, D]; with groups in front, if several."""

    name = NAME if self.groups == 1 else 'group'

    def of_group(nothing, x, carry):
      return nothing, self._stack(sites, name)(x, carry, batch)

    if self.recomputed:
      of_group = hk.remat(of_group)
    nothing = jnp.zeros(())
    if self.groups == 1:
      _, results = of_group(nothing, x, carry)
      return results
    loop = hk.layer_stack(self.groups, with_per_layer_inputs=True, name=NAME)
    with hk.custom_getter(layer_weights.getter):
      _, results = loop(of_group)(nothing, x, carry)
    return results

  def created(self, sites):
    self._check_sites(sites)

    def read_a_token():
      widths = [site.layers // self.groups * site.d_in for site in sites.values()]
      one = jnp.ones((1, 1), jnp.int32)
      batch = Batch(one, one, jnp.ones((1, 1)), one, one)
      carry = self.initial_carry(1, jnp.float32)
      leading = (self.groups,) if self.groups > 1 else ()
      x = jnp.zeros((*leading, 1, 1, sum(widths)))
      self._read(sites, x, carry, batch)

    return created(read_a_token)

  def initial_carry(self, rows, dtype):
    make = hk.transform(lambda: self._stack({}).initial_carry(rows, dtype))
    carry = make.apply({}, None)
    if self.groups == 1:
      return carry
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (self.groups, *leaf.shape)), carry)

  def __call__(
    self,
    params,
    sites,
    inputs,
    carry,
    batch,
  ):
    def joined(inputs):
      inputs_of_sites = [_flat(inputs[path]) for path in sites]
      return jnp.concatenate(inputs_of_sites, axis=-1)

    def by_site(all_logits):
      z = {}
      begin = 0
      for path, site in sites.items():
        layers = site.layers // self.groups
        end = begin + layers * site.components
        shape = (*all_logits.shape[:2], layers, site.components)
        by_layer = all_logits[..., begin:end].reshape(shape)
        z[path] = jnp.moveaxis(by_layer, 2, 0)
        begin = end
      return z

    read = hk.transform(lambda x: self._read(sites, x, carry, batch))
    if self.groups == 1:
      logits, after = read.apply(params, None, joined(inputs))
      return by_site(logits), after
    grouped = jax.tree.map(lambda x: x.reshape(self.groups, -1, *x.shape[1:]), {**inputs})
    x = jax.vmap(joined)(grouped)
    logits, after = read.apply(params, None, x)
    z = jax.vmap(by_site)(logits)
    return jax.tree.map(lambda of_group: of_group.reshape(-1, *of_group.shape[2:]), z), after


def _flat(x: Array) -> Array:
  """[L, B, T, d_in] -> [B, T, L d_in], each input with a mean square of 1."""
  mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
  normalized = x * jax.lax.rsqrt(mean_square + 1e-6)
  _, rows, time, _ = x.shape
  by_token = jnp.moveaxis(normalized, 0, 2)
  return by_token.reshape(rows, time, -1)
