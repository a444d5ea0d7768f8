"""Masked passes: which sites are live, for which tokens, and where their masks come from."""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import itertools
from typing import ClassVar, NamedTuple

import gin
import jax.numpy as jnp

from valkyrie.config.ranges import Fraction, NonNegativeFloat, PositiveInt, check_fields
from valkyrie.errors import ConfigurationError, check_choice
from valkyrie.lab.decomposition import draws
from valkyrie.models.features import Features, Kind
from valkyrie.models.matrices import Masks
from valkyrie.models.sites import Site, ordered
from valkyrie.training.objective import Chunk
from valkyrie.types import Array, Carry

LIVE = ('all', 'each', 'subset', 'groups')


class Tokens(NamedTuple):
  """What the draws of a chunk depend on: the seed, and the row and the number of each token."""

  seed: int | Array
  row: Array
  number: Array


@gin.configurable
@dataclasses.dataclass(frozen=True)
class Stochastic:
  """Passes with masks g + (1 - g) r of random sources r; one reconstruction loss, their mean (D9).

  Attributes:
    coefficient: the coefficient of the loss.
    live: 'all' sites in one pass; 'each' site in a pass of its own; 'subset', in one pass, where a
      token uses k sites, with k uniform from 1 to all; 'groups', one pass for each group of
      consecutive sites, with a subset of it.
    groups: the number of groups.
    source: a number for all sources, with which the delta is left out; None draws them uniformly
      from 0 to 1.
  """

  coefficient: NonNegativeFloat = 1.0
  live: str = 'all'
  groups: PositiveInt = 4
  source: Fraction | None = None

  adversarial: ClassVar[bool] = False

  def __post_init__(self):
    check_choice(f'{type(self).__name__}.live', self.live, LIVE)
    check_fields(self)

  def passes(self, sites: Mapping[str, Site]) -> list[list[tuple[str, int]]]:
    """The sites (path, layer) that are live in each pass."""
    all_sites = ordered(sites)
    count = len(all_sites)
    if self.live == 'each':
      return [[site] for site in all_sites]
    if self.live != 'groups':
      return [all_sites]
    if self.groups > count:
      raise ConfigurationError(
        f'{type(self).__name__}.groups={self.groups}, but the model has only {count} sites. '
        f'Set groups = {count} or less.'
      )
    ends = [round(number * count / self.groups) for number in range(self.groups + 1)]
    return [all_sites[begin:end] for begin, end in itertools.pairwise(ends)]

  def routes(
    self,
    live: Sequence[tuple[str, int]],
    sites: Mapping[str, Site],
    use: int,
    tokens: Tokens,
  ) -> dict[str, Array]:
    """{path: bool [L, B, T]}, whether a token uses the masks of a site."""
    shape = tokens.number.shape
    chosen = jnp.ones((len(live), *shape), bool)
    if self.live in ('subset', 'groups'):
      chosen = _subsets(len(live), use, tokens)
    by_site = dict(zip(live, chosen, strict=True))
    no_token = jnp.zeros(shape, bool)
    live_paths = dict.fromkeys(path for path, _ in live)
    routes = {}
    for path in live_paths:
      layers = range(sites[path].layers)
      layer_routes = [by_site.get((path, layer), no_token) for layer in layers]
      routes[path] = jnp.stack(layer_routes)
    return routes

  def sources(
    self,
    paths: Sequence[str],
    sites: Mapping[str, Site],
    use: int | Array,
    tokens: Tokens,
  ) -> dict[str, Array]:
    """{path: r [L, B, T, C + 1]}; the last source is the delta's."""
    shapes = {}
    total = 0
    for path in paths:
      layers = sites[path].layers
      size = sites[path].components + 1
      shapes[path] = (layers, size)
      total += layers * size
    sources = {}
    if self.source is not None:
      for path, (layers, size) in shapes.items():
        constant = jnp.full((layers, *tokens.number.shape, size), self.source)
        sources[path] = constant.at[..., -1].set(0)
      return sources
    drawn = draws.uniform(tokens.seed, use, tokens.row, tokens.number, total)
    begin = 0
    for path, (layers, size) in shapes.items():
      end = begin + layers * size
      shape = (*drawn.shape[:2], layers, size)
      by_layer = drawn[..., begin:end].reshape(shape)
      sources[path] = jnp.moveaxis(by_layer, 2, 0)
      begin = end
    return sources

  def masks(
    self,
    number: int,
    low: Mapping[str, Array],
    sites: Mapping[str, Site],
    tokens: Tokens,
    sources: Mapping[str, Array] | None = None,
  ) -> Iterator[dict[str, Masks]]:
    """{path: masks} of each pass, with m = g + (1 - g) r and d = r of the delta (D1).

    Args:
      number: the number of the loss; losses have independent draws.
      low: g, the lower importances [L, B, T, C] by path.
      sites: the sites of the model.
      tokens: the tokens of the chunk.
      sources: r of all passes, for an adversary; None draws them for each pass.
    """
    for path, g in low.items():
      expected = (sites[path].layers, *tokens.number.shape, sites[path].components)
      if g.shape != expected:
        raise ConfigurationError(
          f'The importances of {path} have the shape {g.shape}, expected {expected}: layers, rows, '
          'tokens, components. Correct the function in Decomposition.importance.'
        )
    for index, live in enumerate(self.passes(sites)):
      use = 2 * (1000 * number + index)  # two draws each
      routes = self.routes(live, sites, use, tokens)
      sources_of_pass = sources
      if sources_of_pass is None:
        sources_of_pass = self.sources([*routes], sites, use + 1, tokens)
      masks = {}
      for path, route in routes.items():
        g = low[path]
        r = sources_of_pass[path][..., :-1]
        delta = sources_of_pass[path][..., -1]
        components = g + (1 - g) * r
        masks[path] = Masks(components, delta, route)
      yield masks


def _subsets(count: int, use: int, tokens: Tokens) -> Array:
  """bool [count, B, T]: a random subset for each token, all sizes from 1 on equally often."""
  drawn = draws.uniform(tokens.seed, use, tokens.row, tokens.number, count + 1)
  values = drawn[..., :-1]
  drawn_size = drawn[..., -1]
  size = 1 + jnp.floor(drawn_size * count)
  is_chosen = smallest(values, size[..., None])
  return jnp.moveaxis(is_chosen, -1, 0)


def smallest(values: Array, count: Array) -> Array:
  """Whether each value is one of the `count` smallest along the last axis."""
  ranks = jnp.argsort(jnp.argsort(values, axis=-1), axis=-1)
  return ranks < count


def masked(
  chunk: Chunk,
  given: Mapping[str, Masks],
  carry: Carry,
  activations: Sequence[Kind] = (),
) -> tuple[Features, Carry]:
  """Reads a chunk with masks, from a carry of the model: (its features, the carry after it)."""
  before = {'model': carry['model']}
  return chunk.model.read(
    chunk.params,
    before,
    chunk.batch,
    chunk.rng,
    masks=given,
    activations=activations,
  )
