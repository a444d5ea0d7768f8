"""Texts of the user for the page of components: what is active at each token, and what it reads."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from valkyrie import foreign
from valkyrie.data.vocabularies import Vocabulary
from valkyrie.errors import DataError, reason_of, with_home
from valkyrie.lab.decomposition.split import SplitReader
from valkyrie.lab.decomposition.text_patterns import LayerPatterns

_MOST_ACTIVE = 30  # components of a token, the most important ones


class ActiveComponent(NamedTuple):
  """A component that is active at a token, and its importance there."""

  site: str
  number: int
  importance: float


Patterns = Mapping[str, LayerPatterns]  # by the names of the layers


class ReadText(NamedTuple):
  """A text of T tokens, and the components that are active at each, the most important first.

  patterns: of its last tokens, under importances as masks.
  """

  name: str
  ids: Sequence[int]
  active: Sequence[Sequence[ActiveComponent]]
  patterns: Patterns


def content(name: str) -> str:
  """The text in a file; raises a DataError if it cannot be read."""
  try:
    return foreign.content(with_home(name)).decode()
  except (OSError, ValueError) as error:
    raise DataError(
      f'The text {name} cannot be read ({reason_of(error)}). Name a file of UTF-8 text.'
    ) from error


def read(
  reader: SplitReader,
  patterns_of: Callable[[np.ndarray], Patterns],
  vocabulary: Vocabulary,
  name: str,
  text: str,
) -> ReadText:
  """Reads a text as one document; raises a ConfigurationError if the model cannot read it."""
  ids = vocabulary.begun(text)
  active: list[list[ActiveComponent]] = []
  for importances, count in reader.document(ids):
    of_chunk: list[list[ActiveComponent]] = [[] for _ in range(count)]
    for site, g in importances.items():
      for token, number in np.argwhere(g > reader.scores.threshold).tolist():
        found = ActiveComponent(site, number, float(g[token, number]))
        of_chunk[token].append(found)
    for found in of_chunk:
      found.sort(key=lambda component: -component.importance)
      active.append(found[:_MOST_ACTIVE])
  return ReadText(name, ids.tolist(), active, patterns_of(ids))
