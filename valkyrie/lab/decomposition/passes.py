"""Passes over chunks of one text: the model's, its importance functions', and one under masks."""

from collections.abc import Callable, Mapping, Sequence
import contextlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from valkyrie.inference.reader import Reader, TextCarry, places
from valkyrie.lab.decomposition.evaluation import ComponentScores
from valkyrie.lab.decomposition.masking import Masking
from valkyrie.models.features import SITES, Features, Kind
from valkyrie.models.sites import by_name, sites_of
from valkyrie.types import Array, Batch, Carry, Params
from valkyrie.weights.named_tensors import names_of


class Carries(NamedTuple):
  """What is carried from chunk to chunk: the model's, the importances' and the masked model's."""

  clean: TextCarry
  importance: Carry
  masked: TextCarry


class Factors(NamedTuple):
  """A masking, split into its arrays, {path: float32 [L, C]}, and what a compiler must know."""

  of_sites: dict[str, np.ndarray]
  masking: Masking


class Pass(NamedTuple):
  """What is computed of a chunk.

  clean, masked: the features of the model, and those under masks.
  importances: g [L, 1, T, C] by path.
  after: the carries after the chunk.
  """

  clean: Features
  masked: Features
  importances: dict[str, Array]
  after: Carries


class Passes:
  """Passes over chunks of a text. Of a chunk, `lengths` [1] counts the tokens [1, T] that are real.

  `params` have those of the importance functions among them.
  """

  def __init__(
    self,
    reader: Reader,
    scores: ComponentScores,
    installed: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
  ):
    """Takes a reader of the model, its evaluation, and a context in which gin has its bindings."""
    self.reader = reader
    self.sites = sites_of(reader.model.parameters())
    self.names = names_of(reader.model.parameters())
    self._scores = scores
    self._installed = installed
    self.read = jax.jit(self.masked, static_argnums=(5, 6))

  def fresh(self) -> Carries:
    """Before the first token."""
    with self._installed():
      dtype = self.reader.model.about.compute_dtype
      functions = self._scores.importance().initial_carry(1, dtype)
    return Carries(self.reader.fresh(1), functions, self.reader.fresh(1))

  def factors(self, masks: Masking) -> Factors:
    """A masking in arrays."""
    of_sites = {}
    for path, site in self.sites.items():
      others = np.full(site.components, masks.others, np.float32)
      of_sites[path] = np.stack([masks.factors.get(name, others) for name in self.names[path]])
    return Factors(of_sites, masks._replace(factors=()))

  def by_name(self, by_path: Mapping[str, Array], length: int) -> dict[str, np.ndarray]:
    """{name of a site: the first tokens [length, C]} of values [L, 1, T, C] by path."""
    found = by_name(by_path, self.sites, self.names)
    return {name: of_site[0, :length] for name, of_site in found.items()}

  # Traced.

  def clean(
    self,
    params: Params,
    carries: Carries,
    tokens: Array,
    lengths: Array,
    kinds: Sequence[Kind] = (),
  ) -> tuple[Features, dict[str, Array], Carries]:
    """(The model's features, importances [L, 1, T, C] by path, the carries after the chunk)."""
    features, clean = self.reader.apply(params, carries.clean, tokens, lengths, (SITES, *kinds))
    positions, segments = places(carries.clean, tokens, lengths)
    batch = Batch(tokens, tokens, segments.astype(jnp.float32), positions, segments)
    with self._installed():
      g, functions = self._scores.importances(
        self.reader.model, params, features, carries.importance, batch
      )
    return features, g, carries._replace(clean=clean, importance=functions)

  def masked(
    self,
    params: Params,
    carries: Carries,
    tokens: Array,
    lengths: Array,
    of_sites: dict[str, Any],
    masking: Masking,
    kinds: Sequence[Kind] = (),
  ) -> Pass:
    """A chunk read by the model, and under `Factors`."""
    features, g, after = self.clean(params, carries, tokens, lengths, kinds)
    given = {}
    for path, of_site in g.items():
      given[path] = masking.masks(of_sites[path], of_site, self._scores.threshold)
    masked, masked_carry = self.reader.apply(
      params, carries.masked, tokens, lengths, kinds, masks=given
    )
    return Pass(features, masked, g, after._replace(masked=masked_carry))
