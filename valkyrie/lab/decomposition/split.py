"""The validation split in chunks, with the importances of all components."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from valkyrie.data.read_ahead import prefetch
from valkyrie.errors import ConfigurationError
from valkyrie.inference.reader import check_length
from valkyrie.lab.decomposition.evaluation import ComponentScores
from valkyrie.models.features import SITES
from valkyrie.models.sites import by_name, sites_of
from valkyrie.run.evaluator import Evaluator
from valkyrie.training.objective import evaluations, terms_of
from valkyrie.training.setup import StepSettings
from valkyrie.types import Array, Batch, Params, position_of
from valkyrie.weights.named_tensors import names_of


def component_scores(settings: StepSettings) -> ComponentScores:
  """The evaluation of the decomposition; raises a ConfigurationError without one."""
  for term in evaluations(terms_of(settings.objective)):
    if isinstance(term, ComponentScores):
      return term
  raise ConfigurationError(
    'StepSettings.objective decomposes nothing, so there are no components to show. Name the '
    '--model_dir of a run with @Decomposition in StepSettings.objective.'
  )


class SplitChunk(NamedTuple):
  """A chunk, where it begins in its source, and its importances g [L, B, T, C] by path."""

  source: str
  position: int
  batch: Batch
  importances: Mapping[str, Array]


class SplitReader:
  """Reads the split in chunks, with the importances of all components."""

  def __init__(self, evaluator: Evaluator, scores: ComponentScores, params: Params):
    self.scores = scores
    self.model = evaluator.model
    self.eos = evaluator.vocabulary.eos_id
    self.vocabulary_size = evaluator.model.about.vocabulary_size
    self._evaluator = evaluator
    self._params = params
    self._read = jax.jit(self._read_chunk)

  def chunks(self) -> Iterator[SplitChunk]:
    """All chunks of all sources, in order."""
    for source, feed in self._evaluator.sources.items():
      spans = self._evaluator.spans(feed, whole=True)
      carry = self._initial_carry()
      for (position, _), batch in zip(spans, prefetch(feed, spans), strict=True):
        low, carry = self._read(carry, batch)
        yield SplitChunk(source, position, batch, low)

  def document(self, ids: np.ndarray) -> Iterator[dict[str, np.ndarray]]:
    """{name of a site: g [T, C]} of each chunk of a document, in a row of its own.

    Raises a ConfigurationError if the model cannot read a document of this length.
    """
    check_length(self.model.about, len(ids))
    shape = (self._evaluator.batch_size, self._evaluator.chunk_size)
    carry = self._initial_carry()
    for begin in range(0, len(ids), shape[1]):
      chunk = ids[begin : begin + shape[1]]
      count = len(chunk)
      batch = Batch(*(np.zeros(shape, np.int32) for _ in Batch._fields))
      batch = batch._replace(weights=np.zeros(shape, np.float32))
      batch.inputs[0, :count] = chunk
      batch.positions[0, :count] = position_of(np.arange(begin, begin + count))
      batch.segment_ids[0, :count] = 1
      low, carry = self._read(carry, batch)
      yield {name: g[0, :count] for name, g in self._by_name(low).items()}

  def _initial_carry(self) -> Any:
    """The carries of the model and of the importances, which have read nothing."""
    initial = self.model.initial_carry(self._evaluator.batch_size)
    return {'model': initial['model']}, initial[self.scores.name].importance

  def _read_chunk(self, carry, batch):
    model = self.model
    model_carry, importance_carry = carry
    features, model_carry = model.read(self._params, model_carry, batch, activations=(SITES,))
    low, importance_carry = self.scores.importances(
      model, self._params, features, importance_carry, batch
    )
    return low, (model_carry, importance_carry)

  def importances(self) -> Iterator[dict[str, np.ndarray]]:
    """{name of a site: g [N, C]} of the N tokens of each chunk that are no padding."""
    for chunk in self.chunks():
      real = chunk.batch.segment_ids > 0
      yield {name: g[real] for name, g in self._by_name(chunk.importances).items()}

  def _by_name(self, importances: Mapping[str, Array]) -> dict[str, np.ndarray]:
    """{name of a site: g [B, T, C]} of importances [L, B, T, C] by path."""
    parameters = self.model.parameters()
    return by_name(importances, sites_of(parameters), names_of(parameters))
