"""Texts of the user for the page of components: what is active at each token, and what it reads."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from valkyrie import foreign
from valkyrie.errors import DataError, reason_of, with_home
from valkyrie.lab.decomposition.text_patterns import PatternsOfLayers, TextChunk, joined

_MOST_ACTIVE = 30  # components of a token, the most important ones


class ActiveComponent(NamedTuple):
  """A component that is active at a token, and its importance there."""

  site: str
  number: int
  importance: float


class ReadText(NamedTuple):
  """A text of T tokens, and the components that are active at each, the most important first.

  patterns: of its last tokens, under importances as masks.
  """

  name: str
  ids: Sequence[int]
  active: Sequence[Sequence[ActiveComponent]]
  patterns: PatternsOfLayers


def content(name: str) -> str:
  """The text in a file; raises a DataError if it cannot be read."""
  try:
    return foreign.content(with_home(name)).decode()
  except (OSError, ValueError) as error:
    raise DataError(
      f'The text {name} cannot be read ({reason_of(error)}). Name a file of UTF-8 text.'
    ) from error


def read(name: str, ids: np.ndarray, chunks: Iterable[TextChunk], threshold: float) -> ReadText:
  """A text whose components are active above the threshold, from its chunks."""
  active: list[list[ActiveComponent]] = []
  patterns = []
  for chunk in chunks:
    active += _active(chunk.importances, threshold)
    patterns.append(chunk.patterns)
  return ReadText(name, ids.tolist(), active, joined(patterns, len(ids)))


def _active(importances: Mapping[str, np.ndarray], threshold: float) -> list[list[ActiveComponent]]:
  """The most important components that are active at each token of a chunk."""
  first, *_ = importances.values()
  of_tokens: list[list[ActiveComponent]] = [[] for _ in first]
  for site, g in importances.items():
    for token, number in np.argwhere(g > threshold).tolist():
      found = ActiveComponent(site, number, float(g[token, number]))
      of_tokens[token].append(found)
  for found in of_tokens:
    found.sort(key=lambda component: -component.importance)
  return [found[:_MOST_ACTIVE] for found in of_tokens]
