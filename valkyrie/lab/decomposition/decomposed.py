"""A trained decomposition in Python: `valkyrie.decomposition(RUN)`.

A text is tokens; they are read in chunks, each from the carry of the chunk before, so that a text
may be longer than the memory: `readings` has one chunk at a time. Sites have the names of tensors,
such as 'layers.0.mlp.out', and values of components are [T, C] for a chunk of T tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from valkyrie.checkpoint.manager import LATEST
from valkyrie.config import ranges
from valkyrie.config.load import Configuration
from valkyrie.errors import UsageError
from valkyrie.inference import opened
from valkyrie.inference.loaded import LoadedModel
from valkyrie.inference.reader import places, predicting_hidden
from valkyrie.inference.text_rows import Text
from valkyrie.lab.decomposition import masking
from valkyrie.lab.decomposition.activation_errors import hidden_sums, layers_of, pattern_sums
from valkyrie.lab.decomposition.clusters import Clustering, clustered
from valkyrie.lab.decomposition.evaluation import ComponentScores
from valkyrie.lab.decomposition.masking import Masking, Numbers
from valkyrie.lab.decomposition.passes import Passes
from valkyrie.lab.decomposition.split import component_scores
from valkyrie.lab.decomposition.text_patterns import LayerPatterns, of_text
from valkyrie.lab.decomposition.writers import Tracer, Writers
from valkyrie.models.features import ACTIVATIONS, Features
from valkyrie.models.sites import ordered
from valkyrie.sharding.partitioner import Partitioner
from valkyrie.training.losses import divergences, logits, token_scores
from valkyrie.training.setup import StepSettings
from valkyrie.types import Params
from valkyrie.weights.restored import restored_params


class SiteFactors(NamedTuple):
  """A site: its matrix W [d_in, d_out], V [d_in, C] and U [C, d_out], float32."""

  w: np.ndarray
  v: np.ndarray
  u: np.ndarray


class Reading(NamedTuple):
  """A chunk of a text.

  begin: the number of its first token.
  tokens: int32 [T].
  importances: {name of a site: g [T, C]}, from 0 to 1.
  activations: {name of a site: [T, C]}, (x V_c) |U_c|: the size of what each component adds to the
    product, with a sign that has a meaning only relative to other tokens.
  """

  begin: int
  tokens: np.ndarray
  importances: Mapping[str, np.ndarray]
  activations: Mapping[str, np.ndarray]


class Comparison(NamedTuple):
  """A text under masks, beside the model itself.

  log_probs, masked_log_probs: log p(token | earlier tokens), float32 [T]; NaN for the first one.
  divergences: KL(model || masked) of the token after each token, in nats, float32 [T].
  hidden_errors: {kind of `LoadedModel.activations`: float64 [layers]}, the squared error of what
    the masked model computes, over all tokens, divided by the square of what the model does.
  pattern_errors: {name of a layer of attention: float64 [heads]}, KL(model || masked) of the
    patterns of `ComponentScores.pattern_queries` tokens of each chunk, the mean, in nats.
  """

  log_probs: np.ndarray
  masked_log_probs: np.ndarray
  divergences: np.ndarray
  hidden_errors: Mapping[str, np.ndarray]
  pattern_errors: Mapping[str, np.ndarray]


class Decomposed:
  """A trained decomposition.

  Attributes:
    run: the model, see `valkyrie.load`.
    names: the sites, from the first layer to the last.
    sizes: {name of a site: the number of its components}.
    threshold: the importance above which a component is active (`ComponentScores.threshold`).
  """

  def __init__(
    self,
    run: LoadedModel,
    params: Params,
    scores: ComponentScores,
    configuration: Configuration,
  ):
    """Takes a run, its parameters with those of the importance functions, and its evaluation."""
    self.run = run
    self.threshold = scores.threshold
    self._asked = scores.asked
    self._params = params
    self._passes = Passes(run.text_rows.reader, scores, configuration.installed)
    self._sites = self._passes.sites
    self._names = self._passes.names
    self.names = [self._names[path][layer] for path, layer in ordered(self._sites)]
    self.sizes = {}
    for path, site in self._sites.items():
      for name in self._names[path]:
        self.sizes[name] = site.components
    self._read = jax.jit(self._read_chunk)
    self._compare = jax.jit(self._compare_chunk, static_argnums=5)
    self._show = jax.jit(self._masked_logits, static_argnums=5)
    self._tracer: Tracer | None = None

  def factors(self, name: str) -> SiteFactors:
    """The matrices of a site."""
    path, layer = self.place(name)
    site = self._sites[path]
    v, u = site.factors(self._params)
    arrays = (site.target(self._params)[layer], v[layer], u[layer])
    return SiteFactors(*(np.asarray(array, np.float32) for array in arrays))

  def place(self, name: str) -> tuple[str, int]:
    """The path of a site in Haiku's parameters, and its number in the stack there."""
    masking.check_site(name, self.sizes)
    for path, names in self._names.items():
      if path in self._sites and name in names:
        return path, names.index(name)
    raise AssertionError(name)

  def readings(self, text: Text) -> Iterator[Reading]:
    """Reads a text, and yields what its components are in each chunk."""
    carries = self._passes.fresh()
    begin = 0
    for chunk, lengths, tokens in self._chunks(text):
      (g, inner), carries = self._read(self._params, carries, chunk, lengths)
      of_tokens = [self._passes.by_name(values, len(tokens)) for values in (g, inner)]
      yield Reading(begin, tokens, *of_tokens)
      begin += len(tokens)

  def importances(self, text: Text) -> dict[str, np.ndarray]:
    """{name of a site: g [T, C]} of a whole text; `readings` has it chunk by chunk."""
    parts = [reading.importances for reading in self.readings(text)]
    return {name: np.concatenate([part[name] for part in parts]) for name in self.names}

  def activations(self, text: Text) -> dict[str, np.ndarray]:
    """{name of a site: [T, C]} of a whole text, see `Reading`."""
    parts = [reading.activations for reading in self.readings(text)]
    return {name: np.concatenate([part[name] for part in parts]) for name in self.names}

  def ablated(self, numbers: Numbers) -> Masking:
    """The model without these components {name of a site: their numbers}; the rest is unchanged."""
    return masking.ablated(numbers, self.sizes)

  def kept(self, numbers: Numbers, kind: str = 'whole') -> Masking:
    """Only these components of all sites, {name of a site: their numbers}.

    kind: 'whole', or their importances ('important'), or 1 where they are active ('rounded').
    """
    return masking.kept(numbers, self.sizes, kind)

  def scaled(self, factors: Mapping[str, Mapping[int, float]]) -> Masking:
    """The model with factors of components, {name of a site: {number: factor}}."""
    return masking.scaled(factors, self.sizes)

  def compare(self, text: Text, masks: Masking) -> Comparison:
    """Reads a text with the model and with masks, each with a memory of its own.

    `masks` come from `ablated`, `kept` or `scaled`, or are `masking.UNMASKED`, `IMPORTANT` or
    `ROUNDED`.
    """
    carries = self._passes.fresh()
    factors = self._passes.factors(masks)
    parts: list[np.ndarray] = []
    totals: Any = None
    for chunk, lengths, tokens in self._chunks(text):
      (of_tokens, sums), carries = self._compare(self._params, carries, chunk, lengths, *factors)
      parts.append(np.asarray(of_tokens)[:, : len(tokens)])
      sums = jax.tree.map(lambda x: np.asarray(x, np.float64), sums)
      if totals is not None:
        sums = jax.tree.map(np.add, totals, sums)
      totals = sums
    log_probs, masked_log_probs, kl = np.concatenate(parts, axis=1)
    log_probs[:1] = np.nan
    masked_log_probs[:1] = np.nan
    hidden, patterns, queries = totals
    hidden_errors = {kind: error / square for kind, (error, square) in hidden.items()}
    pattern_errors = {}
    for path, names in layers_of(self.run.model.parameters()).items():
      if queries and path in patterns:
        pattern_errors |= dict(zip(names, patterns[path] / queries, strict=True))
    return Comparison(log_probs, masked_log_probs, kl, hidden_errors, pattern_errors)

  def patterns(
    self,
    text: Text,
    masks: Masking = masking.IMPORTANT,
    queries: int = 128,
  ) -> dict[str, LayerPatterns]:
    """{name of a layer: its attention patterns}, of the last tokens of a text, see `of_text`."""
    (tokens,) = self.run.text_rows.tokens([text], None)
    ranges.check('patterns.queries', queries, ranges.PositiveInt)
    if not len(tokens):
      raise UsageError('A text without tokens has no pattern. Pass a text of a token or more.')
    return of_text(self._passes, self._params, tokens, masks, queries)

  def logits(self, text: Text, masks: Masking) -> np.ndarray:
    """The logits under masks of the token after each token, float32 [T, vocabulary size]."""
    carries = self._passes.fresh()
    factors = self._passes.factors(masks)
    parts = []
    for chunk, lengths, tokens in self._chunks(text):
      found, carries = self._show(self._params, carries, chunk, lengths, *factors)
      parts.append(np.asarray(found)[0, : len(tokens)])
    return np.concatenate(parts)

  def clusters(
    self,
    text: Text,
    *,
    most: int = 1000,
    distance: float = 0.5,
    seeds: Sequence[int] = (0, 1, 2, 3, 4),
  ) -> Clustering:
    """Components of a text that are active at the same tokens, see `clusters.clustered`."""

    def read():
      return (reading.importances for reading in self.readings(text))

    return clustered(read, self.threshold, most=most, distance=distance, seeds=seeds)

  def writers(
    self,
    text: Text,
    name: str,
    component: int,
    token: int | None = None,
    *,
    distance: int = 0,
    count: int = 20,
  ) -> Writers:
    """Which components wrote, at earlier tokens, what a component reads at a token of a text.

    Args:
      text: read from its start.
      name, component: the component that reads.
      token: the number of the token at which it reads; None for the last one.
      distance: the fewest tokens between a write and the read.
      count: the number of `Writers.strongest`.

    Raises a UsageError if there is no such component or token.
    """
    place = (*self.place(name), component)
    masking.check_numbers(name, [component], self.sizes)
    rows = self.run.text_rows
    (tokens,) = rows.tokens([text], None)
    last = len(tokens) - 1 if token is None else token
    if not 0 <= last < len(tokens):
      raise UsageError(f'token={token}, but the text has {len(tokens)}. Name one of these, from 0.')
    if self._tracer is None:
      self._tracer = Tracer(rows.reader, self._sites, self._names)
    return self._tracer(self._params, tokens[: last + 1], place, distance, count)

  # Chunks.

  def _chunks(self, text: Text) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(tokens [1, T], padded; their number [1]; tokens without padding) of each chunk."""
    rows = self.run.text_rows
    (tokens,) = rows.tokens([text], None)
    if not len(tokens):
      raise UsageError('The text is empty, and has no components. Pass a text of a token or more.')
    for chunk, lengths in rows.reader.chunks(rows.reader.fresh(1), [tokens]):
      yield chunk, lengths, chunk[0, : lengths[0]]

  # Traced.

  def _read_chunk(
    self,
    params,
    carries,
    tokens,
    lengths,
  ):
    features, g, carries = self._passes.clean(params, carries, tokens, lengths)
    inputs = features.sites or {}
    inner = {}
    for path, site in self._sites.items():
      v, u = site.factors(params)
      x = inputs[path]
      sizes = jnp.linalg.norm(u, axis=-1)
      inner[path] = jnp.einsum('lbtd,ldc->lbtc', x, v.astype(x.dtype)) * sizes[:, None, None]
    return (g, inner), carries

  def _masked_logits(
    self,
    params,
    carries,
    tokens,
    lengths,
    of_sites,
    masks,
  ):
    read = self._passes.masked(params, carries, tokens, lengths, of_sites, masks)
    size = self.run.model.about.vocabulary_size
    return logits(read.masked, size)[..., :size], read.after

  def _compare_chunk(
    self,
    params,
    carries,
    tokens,
    lengths,
    of_sites,
    masks,
  ):
    kinds = (*ACTIVATIONS, self._asked)
    read = self._passes.masked(params, carries, tokens, lengths, of_sites, masks, kinds)
    size = self.run.model.about.vocabulary_size

    def log_probs(carry, features):
      hidden = predicting_hidden(carry, features)
      return -token_scores(Features(hidden, features.unembedding), tokens, size).loss

    of_tokens = jnp.concatenate(
      [
        log_probs(carries.clean, read.clean),
        log_probs(carries.masked, read.masked),
        divergences(read.clean, read.masked, size),
      ]
    )
    _, segments = places(carries.clean, tokens, lengths)
    real = segments > 0
    is_query = real[:, self._asked.at(tokens.shape[1])]
    hidden = hidden_sums(read.clean, read.masked, real)
    patterns = pattern_sums(read.clean, read.masked, is_query)
    return (of_tokens, (hidden, patterns, jnp.sum(is_query))), read.after


def decomposition(
  model_dir: str | os.PathLike,
  step: str | int = LATEST,
  *,
  bindings: Sequence[str] = (),
  allow_import: Sequence[str] = (),
) -> Decomposed:
  """Opens the decomposition that a run has trained; see `valkyrie.load` for the arguments.

  Raises a ConfigurationError if the run decomposes nothing, and otherwise as `load` does.
  """
  directory, configuration = opened.configured(model_dir, bindings, allow_import)
  with configuration.installed():
    settings: Any = StepSettings  # gin gives the arguments
    scores = component_scores(settings())
  run = opened.load_configured(directory, step, configuration, lazily=True)
  with configuration.installed():
    whole = scores.extended(run.model)  # with the importance functions
    one_device = Partitioner((('data', 1),), (), (), manual=True)
    params, _ = restored_params(whole, one_device, directory, run.tokenizer, str(step))
  run.params = run.model.own(params)
  return Decomposed(run, params, scores, configuration)
