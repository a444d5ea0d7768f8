"""Components as a page shows them: their windows, their tokens and their labels."""

from collections.abc import Callable, Iterable, Sequence
import itertools
from typing import NamedTuple

import numpy as np

SPAN = 41  # tokens of a window

Decode = Callable[[Iterable[int]], str]


class Window(NamedTuple):
  """Tokens of a document, the importance of the component at each, and the number of the peak."""

  ids: np.ndarray
  importances: np.ndarray
  peak: int


class Token(NamedTuple):
  """A token, its mutual information with a component's activity, and its share of this activity."""

  bits: float
  share: float
  id: int


class Component(NamedTuple):
  """What is shown of a component.

  mean: the mean importance.
  share: the share of tokens at which it is active.
  inputs, outputs: the tokens at which it is active, and the tokens that follow.
  held_out: further windows, which are not shown: it is active in the first half of them.
  label: what somebody says of it.
  """

  number: int
  mean: float
  share: float
  windows: Sequence[Window]
  inputs: Sequence[Token]
  outputs: Sequence[Token]
  held_out: Sequence[Window] = ()
  label: str = ''


class ShownSite(NamedTuple):
  """What is shown of a site.

  alive: the number of components that are alive.
  active: the mean number of components that are active at a token.
  means: [C], the mean importances from the largest to the smallest.
  """

  name: str
  alive: int
  active: float
  means: np.ndarray
  components: Sequence[Component]


def pieces(ids: Sequence[int], decode: Decode) -> list[str]:
  """The text that each token adds; a character of several tokens belongs to the last of these."""
  text = decode(ids)
  beginnings = [decode(ids[:n]).rstrip('\ufffd') for n in range(1, len(ids))]
  lengths = map(len, [*beginnings, text])
  ends = [0, *itertools.accumulate(lengths, max)]
  return [text[begin:end] for begin, end in itertools.pairwise(ends)]


def visible(text: str) -> str:
  """A text with signs for characters that are invisible or change the direction of a page."""
  signs = {'\n': '↵', '\t': '⇥'}
  characters = []
  for character in text:
    if character.isprintable():
      characters.append(character)
    else:
      characters.append(signs.get(character, '·'))
  return ''.join(characters)
