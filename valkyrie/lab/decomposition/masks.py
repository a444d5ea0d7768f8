"""Masked passes: which sites are live, for which tokens, and where their masks come from."""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import itertools
from typing import ClassVar, NamedTuple

import gin
import jax.numpy as jnp

from valkyrie.config import ranges
from valkyrie.errors import ConfigurationError, check_choice
from valkyrie.lab.decomposition import draws
from valkyrie.models.declarations import Masks
from valkyrie.models.features import Features
from valkyrie.models.sites import Site
from valkyrie.training.objective import Chunk
from valkyrie.types import Array, Carry

LIVE = ('all', 'each', 'subset', 'groups')


class Tokens(NamedTuple):
  """What the masks of a chunk depend on: the draws' seed, and row and number of each token."""

  seed: int | Array
  row: Array
  number: Array


@gin.configurable
@dataclasses.dataclass(frozen=True)
class Stochastic:
  """Passes with masks g + (1 - g) r of random sources r; one reconstruction loss, their mean (D9).

  Attributes:
    coefficient: of the loss.
    live: 'all' sites in one pass; 'each' site in a pass of its own; 'subset', in one pass, where a
      token uses k sites, with k uniform from 1 to all; 'groups', one pass for each group of
      consecutive sites, with a subset of it.
    groups: their number.
    source: a number for all sources, with which the delta is left out; None draws them uniformly
      from 0 to 1.
  """

  coefficient: float = 1.0
  live: str = 'all'
  groups: int = 4
  source: float | None = None

  adversarial: ClassVar[bool] = False

  def __post_init__(self):
    check_choice(f'{type(self).__name__}.live', self.live, LIVE)
    ranges.check_fields(self)

  def passes(self, sites: Mapping[str, Site]) -> list[list[tuple[str, int]]]:
    """The sites (path, layer) that are live in each pass."""
    known = ordered(sites)
    if self.live == 'each':
      return [[one] for one in known]
    if self.live != 'groups':
      return [known]
    if self.groups > len(known):
      raise ConfigurationError(
        f'{type(self).__name__}.groups={self.groups}, but the model has only {len(known)} sites. '
        f'Set groups = {len(known)} or less.'
      )
    ends = [round(n * len(known) / self.groups) for n in range(self.groups + 1)]
    return [known[begin:end] for begin, end in itertools.pairwise(ends)]

  def routes(
    self, live: Sequence[tuple[str, int]], sites: Mapping[str, Site], use: int, tokens: Tokens
  ) -> dict[str, Array]:
    """{path: bool [L, B, T]}, whether a token uses the masks of a site."""
    shape = tokens.number.shape
    chosen = jnp.ones((len(live), *shape), bool)
    if self.live in ('subset', 'groups'):
      drawn = draws.uniform(tokens.seed, use, tokens.row, tokens.number, len(live) + 1)
      count = 1 + jnp.floor(drawn[..., -1] * len(live))
      ranks = jnp.argsort(jnp.argsort(drawn[..., :-1], axis=-1), axis=-1)
      chosen = jnp.moveaxis(ranks < count[..., None], -1, 0)
    of = dict(zip(live, chosen, strict=True))
    none = jnp.zeros(shape, bool)
    return {
      path: jnp.stack([of.get((path, layer), none) for layer in range(sites[path].layers)])
      for path in {path: None for path, _ in live}
    }

  def sources(
    self, paths: Sequence[str], sites: Mapping[str, Site], use: int | Array, tokens: Tokens
  ) -> dict[str, Array]:
    """{path: r [L, B, T, C + 1]}, the last of the delta."""
    shapes = {path: (sites[path].layers, sites[path].components + 1) for path in paths}
    if self.source is not None:
      return {
        path: jnp.full((layers, *tokens.number.shape, size), self.source).at[..., -1].set(0)
        for path, (layers, size) in shapes.items()
      }
    total = sum(layers * size for layers, size in shapes.values())
    drawn = draws.uniform(tokens.seed, use, tokens.row, tokens.number, total)
    found = {}
    begin = 0
    for path, (layers, size) in shapes.items():
      part = drawn[..., begin : begin + layers * size]
      found[path] = jnp.moveaxis(part.reshape(*part.shape[:2], layers, size), 2, 0)
      begin += layers * size
    return found

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
      number: of the loss among others, whose draws are independent.
      low: g, the lower importances [L, B, T, C] by path.
      sites: of the model.
      tokens: of the chunk.
      sources: r of all passes, for an adversary; None draws them for each pass.
    """
    for path, g in low.items():
      expected = (sites[path].layers, *tokens.number.shape, sites[path].components)
      if g.shape != expected:
        raise ConfigurationError(
          f'The importances of {path} have the shape {g.shape}. Let their function give {expected}.'
        )
    for index, live in enumerate(self.passes(sites)):
      use = 2 * (1000 * number + index)  # two draws each
      routes = self.routes(live, sites, use, tokens)
      of = self.sources([*routes], sites, use + 1, tokens) if sources is None else sources
      yield {
        path: Masks(low[path] + (1 - low[path]) * of[path][..., :-1], of[path][..., -1], route)
        for path, route in routes.items()
      }


def ordered(sites: Mapping[str, Site]) -> list[tuple[str, int]]:
  """The sites (path, layer) from the first layer to the last, and by path."""
  return sorted(
    ((path, layer) for path, site in sites.items() for layer in range(site.layers)),
    key=lambda site: (site[1], site[0]),
  )


def masked(chunk: Chunk, given: Mapping[str, Masks], carry: Carry) -> tuple[Features, Carry]:
  """Reads a chunk with masks, from a carry of the model: (its features, the carry after it)."""
  before = {'model': carry['model']}
  return chunk.model.read(chunk.params, before, chunk.batch, chunk.rng, masks=given)
