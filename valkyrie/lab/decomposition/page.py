"""The page of components: a folder that a browser opens from the disk, and that only shows.

    FOLDER/index.html            with app.js and style.css, the program
    FOLDER/data/index.js         sites, clusters, and a line of each component: what lists need
    FOLDER/data/texts_N.js       texts of 200 components, which are loaded when one is looked at
    FOLDER/data/reading_N.js     a text of the user, with the components that are active in it
    FOLDER/data/attention_N_M.js the attention patterns of its last tokens, in one layer
    FOLDER/files.json            the names of all these, by which a later page replaces them

A browser reads no files beside a page on a disk except scripts, so each file of data is one: a call
with JSON. The program makes text nodes of all texts in it, and never markup.
"""

from collections.abc import Iterator, Mapping, Sequence
import importlib.resources
import json
import pathlib
from typing import Any, NamedTuple

import numpy as np

from valkyrie import foreign
from valkyrie.lab.decomposition.clusters import Clustering
from valkyrie.lab.decomposition.evaluation import ALIVE
from valkyrie.lab.decomposition.own_text import ReadText
from valkyrie.lab.decomposition.shown import (
  SPAN,
  Component,
  Decode,
  ShownSite,
  Token,
  Window,
  pieces,
  visible,
)
from valkyrie.lab.decomposition.text_patterns import LayerPatterns
from valkyrie.storage import owned

START = 'index.html'
_PROGRAM = (START, 'app.js', 'style.css')
_RECORD = 'files.json'
_LEVELS = 10  # colors of importances, as in app.js
_TEXTS_IN_FILE = 200  # components
_MOST_MEANS = 400  # points of a curve
_STRETCH = 256  # tokens of a text that are decoded together
_BEFORE = 8  # tokens before these, on which their characters can depend
_CHIPS = 4  # tokens of a line
_ABOUT = f"""A component is the product of a column of V and a row of U of a matrix. Its
importance is a number from 0 to 1 for each token: with 0 it can be removed at this token. A
component is active where its importance exceeds the threshold of the evaluation, and alive if its
mean is above {ALIVE:g}. Texts are windows of at most {SPAN} tokens of one document, chosen for the
largest importances, and at random among equal ones; each was chosen for its underlined token.
Tokens are ordered by their pointwise mutual information with the activity of the component, in
bits; the percentages are their shares of its activity."""


class PageContent(NamedTuple):
  """What a page shows: sites, clusters if there are any, and texts of the user."""

  title: str
  sites: Sequence[ShownSite]
  clustering: Clustering | None
  readings: Sequence[ReadText]


def write(folder: pathlib.Path, content: PageContent, decode: Decode) -> None:
  """Writes a page, in place of an earlier one; raises OSError.

  What somebody else has put into the folder of an earlier page stays beside it, as
  `owned.new_folder` says.
  """
  names = [*_PROGRAM]
  with owned.new_folder(folder, replaces=_recorded(folder)) as place:
    (place / 'data').mkdir()
    for name in _PROGRAM:
      (place / name).write_text(_program(name), encoding='utf-8')
    for name, value in _data(content, decode):
      file = f'data/{name}.js'
      (place / file).write_text(f'receive({json.dumps(name)}, {_json(value)});\n')
      names.append(file)
    (place / _RECORD).write_text(json.dumps([*names, _RECORD]))


def _program(name: str) -> str:
  """A file of the program, which is part of the package."""
  package = importlib.resources.files('valkyrie.lab.decomposition')
  return package.joinpath('page_files', name).read_text('utf-8')


def _recorded(folder: pathlib.Path) -> list[str]:
  """The names of the files of an earlier page; none if the folder has no record of a page."""
  try:
    names = json.loads(foreign.content(folder / _RECORD))
  except (OSError, ValueError):
    return []
  if not isinstance(names, list):
    return []
  return [name for name in names if isinstance(name, str)]


def _data(content: PageContent, decode: Decode) -> Iterator[tuple[str, Any]]:
  """(name, value) of each file of data."""
  numbers = {site.name: number for number, site in enumerate(content.sites)}
  rows = []
  for number, site in enumerate(content.sites):
    for component in site.components:
      rows.append((number, component))
  yield 'index', _index(content, rows, numbers, decode)
  for begin in range(0, len(rows), _TEXTS_IN_FILE):
    part = rows[begin : begin + _TEXTS_IN_FILE]
    texts = [_texts(component, decode) for _, component in part]
    yield f'texts_{begin // _TEXTS_IN_FILE}', texts
  for number, reading in enumerate(content.readings):
    yield f'reading_{number}', _reading(reading, numbers, decode)
    for layer, patterns in enumerate(reading.patterns.values()):
      yield f'attention_{number}_{layer}', _attention(patterns)


def _index(
  content: PageContent,
  rows: Sequence[tuple[int, Component]],
  numbers: Mapping[str, int],
  decode: Decode,
) -> dict[str, Any]:
  clusters = []
  cluster_of = {}
  if content.clustering is not None:
    for place, cluster in enumerate(content.clustering.clusters):
      members = []
      for member in cluster.members:
        site = numbers[member.site]
        members.append([site, member.component, member.tokens])
        cluster_of[site, member.component] = place
      clusters.append({'stability': _number(cluster.stability), 'members': members})
  return {
    'title': f'Components of {visible(content.title)}',
    'about': ' '.join(_ABOUT.split()),
    'alive': ALIVE,
    'texts_in_file': _TEXTS_IN_FILE,
    'sites': [_site(site) for site in content.sites],
    'components': {
      'site': [site for site, _ in rows],
      'number': [component.number for _, component in rows],
      'mean': [_number(component.mean) for _, component in rows],
      'share': [_number(component.share) for _, component in rows],
      'tokens': [_chips(component, decode) for _, component in rows],
      'label': [visible(component.label) for _, component in rows],
      'cluster': [cluster_of.get((site, component.number), -1) for site, component in rows],
    },
    'clusters': clusters,
    'readings': [_reading_line(reading) for reading in content.readings],
  }


def _reading_line(reading: ReadText) -> dict[str, Any]:
  name = visible(reading.name)
  return {'name': name, 'tokens': len(reading.ids), 'attention': [*reading.patterns]}


def _site(site: ShownSite) -> dict[str, Any]:
  count = len(site.means)
  places = np.unique(np.linspace(0, count - 1, min(count, _MOST_MEANS)).astype(int))
  return {
    'name': site.name,
    'components': count,
    'alive': site.alive,
    'active': _number(site.active),
    'means': [_number(mean) for mean in site.means[places]],
  }


def _chips(component: Component, decode: Decode) -> list[str]:
  return [_chip(token.id, decode) for token in component.inputs[:_CHIPS]]


def _chip(token: int, decode: Decode) -> str:
  """The text of a token, or its number if it has none."""
  text = visible(decode([token])).replace(' ', '␣')
  return text or f'#{token}'


def _texts(component: Component, decode: Decode) -> dict[str, Any]:
  """What is shown of a component that somebody looks at."""
  return {
    'inputs': [_token(token, decode) for token in component.inputs],
    'outputs': [_token(token, decode) for token in component.outputs],
    'windows': [_window(window, decode) for window in component.windows],
  }


def _token(token: Token, decode: Decode) -> list[Any]:
  return [_chip(token.id, decode), _number(token.bits), _number(token.share)]


def _window(window: Window, decode: Decode) -> dict[str, Any]:
  importances = np.clip(window.importances, 0, 1)
  levels = np.ceil(importances * _LEVELS).astype(int)
  texts = [visible(piece) for piece in pieces(window.ids.tolist(), decode)]
  return {'pieces': texts, 'levels': levels.tolist(), 'peak': window.peak}


def _reading(reading: ReadText, numbers: Mapping[str, int], decode: Decode) -> dict[str, Any]:
  """The pieces of a text, and [site, component, importance] of what is active at each."""
  active = []
  for found in reading.active:
    rows = []
    for component in found:
      importance = round(min(component.importance, 1.0), 3)
      rows.append([numbers[component.site], component.number, importance])
    active.append(rows)
  return {'pieces': _lines(reading.ids, decode), 'active': active}


def _attention(patterns: LayerPatterns) -> dict[str, Any]:
  """For each head, and for each of the last tokens of a text, the weights of what it reads.

  A weight is a hexadecimal digit, from 0 to `_LEVELS`, of its square root. The first one is of all
  that is before these tokens, and of registers; the others are of the tokens up to the query.
  """
  _, queries, columns = patterns.clean.shape
  before = columns - queries

  def heads(weights):
    earlier = weights[..., :before].sum(-1, keepdims=True)
    shown = np.concatenate([earlier, weights[..., before:]], axis=-1)
    levels = np.rint(_LEVELS * np.sqrt(np.clip(shown, 0, 1))).astype(int)
    found = []
    for head in levels:
      rows = [''.join(f'{level:x}' for level in row[: n + 2]) for n, row in enumerate(head)]
      found.append(rows)
    return found

  return {'first': before - 1, 'model': heads(patterns.clean), 'masked': heads(patterns.masked)}


def _lines(ids: Sequence[int], decode: Decode) -> list[str]:
  """The pieces of a long text. They are decoded in stretches: `pieces` takes the square of time."""
  found = []
  for begin in range(0, len(ids), _STRETCH):
    before = min(begin, _BEFORE)
    stretch = pieces(ids[begin - before : begin + _STRETCH], decode)
    found += [visible(piece).replace('↵', '↵\n') for piece in stretch[before:]]
  return found


def _number(value: float) -> float | None:
  """A number with four digits; None, which JSON has, for NaN, which it has not."""
  if np.isnan(value):
    return None
  return float(f'{value:.4g}')


def _json(value: Any) -> str:
  """JSON in ASCII, so that no character of a text ends a line of a script, and all are Unicode."""
  return json.dumps(value, separators=(',', ':'), allow_nan=False)
