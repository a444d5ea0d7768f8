"""Components that wrote what a later component reads, through the carry of the whole text.

The effect of component c at token t on a later activation a is da/dm for its mask m at this token,
at m = 1: to first order, a falls by the effect if the component is ablated there, and the delta and
all others stay. The gradient is exact through all chunks before, see `inference.segments`, and
through the whole model: recurrent states, keys of attention, and the layers between.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from valkyrie.errors import UsageError
from valkyrie.inference import segments
from valkyrie.inference.reader import Reader, TextCarry, check_finite
from valkyrie.models.features import SITES
from valkyrie.models.matrices import Masks
from valkyrie.models.sites import Site, by_name
from valkyrie.training.tbptt import floats_of
from valkyrie.types import Array, Params


class Write(NamedTuple):
  """A component at a token, and its effect on the activation that is asked about."""

  site: str
  component: int
  token: int
  effect: float


class Writers(NamedTuple):
  """What a component's activation at a token depends on.

  activation: x V_c at the token.
  totals: {name of a site: float64 [C]}, the effects of each component, summed over tokens, from the
    first layer to the last.
  strongest: the largest effects by size, the largest first.
  """

  activation: float
  totals: Mapping[str, np.ndarray]
  strongest: Sequence[Write]


class _Chunk(NamedTuple):
  """tokens: int32 [1, T], padded; lengths: int32 [1]; begin: the number of the first token."""

  tokens: Any
  lengths: Any
  begin: int


class Tracer:
  """Computes `Writers` of a model."""

  def __init__(self, reader: Reader, sites: Mapping[str, Site], names: Mapping[str, Sequence[str]]):
    """Takes the sites of the reader's model, and their names by path."""
    self._reader = reader
    self._sites = sites
    self._names = names
    self._forwards = jax.jit(self._advance)
    self._backwards = jax.jit(self._pulled_back, static_argnums=4)

  def __call__(
    self,
    params: Params,
    tokens: np.ndarray,
    place: tuple[str, int, int],
    distance: int,
    count: int,
  ) -> Writers:
    """The effects on the activation at the last token of a text.

    Args:
      params: the parameters of the model.
      tokens: int32 [N], up to the token at which the activation is read.
      place: the path of a site, the number in its stack, and the component.
      distance: the fewest tokens between an effect and the last token.
      count: effects that are returned.
    """
    if not 0 <= distance < len(tokens):
      raise UsageError(
        f'distance={distance}, but {len(tokens) - 1} tokens are before this one. Ask for a '
        'distance from 0 to this number.'
      )
    chunks = []
    begin = 0
    for padded, lengths in self._reader.chunks(self._reader.fresh(1), [tokens]):
      chunks.append(_Chunk(padded, lengths, begin))
      begin += int(lengths[0])

    def advance(carry, chunk):
      return self._forwards(params, carry, chunk.tokens, chunk.lengths)

    longest = self._reader.model.about.max_context
    read = segments.read(advance, self._reader.fresh(1), chunks, longest)
    last_floats, _ = floats_of(read.last)
    gradient = [jnp.zeros_like(leaf) for leaf in last_floats]
    seed = jnp.ones(())  # only the last chunk has the activation
    totals: dict[str, Any] = {}
    writes: list[Write] = []
    activation = 0.0
    for carry, chunk in segments.reversed_chunks(advance, read):
      value, gradient, effects = self._backwards(
        params, carry, (chunk.tokens, chunk.lengths), (gradient, seed), place
      )
      if chunk is chunks[-1]:
        activation = float(value)
      seed = jnp.zeros(())
      last = min(int(chunk.lengths[0]), len(tokens) - distance - chunk.begin)
      for name, of_row in by_name(effects, self._sites, self._names).items():
        of_site = of_row[0, : max(last, 0)]
        check_finite(np.isfinite(of_site))
        totals[name] = totals.get(name, 0) + of_site.sum(axis=0, dtype=np.float64)
        writes += _largest(name, of_site, chunk.begin, count)
      writes.sort(key=lambda write: -abs(write.effect))
      del writes[count:]
    return Writers(activation, totals, writes)

  def _advance(
    self,
    params: Params,
    carry: TextCarry,
    tokens: Array,
    lengths: Array,
  ) -> TextCarry:
    _, after = self._reader.apply(params, carry, tokens, lengths)
    return after

  def _pulled_back(
    self,
    params,
    carry,
    chunk,
    gradients,
    place,
  ):
    """(The activation, the gradient of the carry before, effects [L, 1, T, C] by path)."""
    tokens, lengths = chunk
    path, layer, component = place
    floats, rebuild = floats_of(carry)

    def read(masks, floats):
      given = {}
      for name, components in masks.items():
        shape = components.shape[:-1]
        given[name] = Masks(components, jnp.ones(shape), jnp.ones(shape, bool))
      features, after = self._reader.apply(
        params, rebuild(floats), tokens, lengths, (SITES,), masks=given
      )
      v, _ = self._sites[path].factors(params)
      inputs = (features.sites or {})[path][layer, 0, lengths[0] - 1]
      activation = inputs.astype(jnp.float32) @ v[layer, :, component].astype(jnp.float32)
      next_floats, _ = floats_of(after)
      return activation, next_floats

    ones = {}
    for name, site in self._sites.items():
      ones[name] = jnp.ones((site.layers, *tokens.shape, site.components))
    (activation, _), pull_back = jax.vjp(read, ones, floats)
    by_carry, seed = gradients
    effects, before = pull_back((seed, by_carry))
    return activation, before, effects


def _largest(name: str, effects: np.ndarray, begin: int, count: int) -> list[Write]:
  """The largest effects [T, C] of a site in a chunk."""
  sizes = np.abs(effects).ravel()
  some = np.arange(sizes.size)
  if sizes.size > count:
    some = np.argpartition(-sizes, count)[:count]
  writes = []
  for index in some.tolist():
    token, component = divmod(index, effects.shape[1])
    effect = float(effects[token, component])
    if effect:
      writes.append(Write(name, component, begin + token, effect))
  return writes
