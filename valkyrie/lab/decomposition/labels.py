"""Labels: what a language model, or anybody else, says of when a component is active.

    RUN/labels_STEP/components.jsonl     held-out passages of each, and whether it is active there
    RUN/labels_STEP/prompts.jsonl        what is asked of each: its top passages and telling tokens
    RUN/labels_STEP/labels.jsonl         the answers, by any program: see `exchange`

`label_scores` asks how well a label predicts the held-out passages, which no prompt shows.
"""

from collections.abc import Mapping, Sequence
import json
import pathlib
from typing import Any, NamedTuple

import numpy as np

from valkyrie import foreign
from valkyrie.lab.decomposition import exchange
from valkyrie.lab.decomposition.exchange import Request
from valkyrie.lab.decomposition.shown import Component, Decode, ShownSite, Token, Window, pieces

COMPONENTS = 'components.jsonl'
PROMPTS = 'prompts.jsonl'
LABELS = 'labels.jsonl'
LONGEST = 300  # characters of a label
_SYSTEM = """\
You describe what one part of a language model responds to. You are given passages, as JSON \
strings, in which the tokens where the part is active stand between << and >>, and the tokens that \
say most about its activity. Say when the part is active: at which tokens, in which context, or \
before what. Be so specific that a reader of other passages can tell where it is active. Answer \
with one line of at most 20 words, and nothing else."""


class Passage(NamedTuple):
  """A held-out text.

  active: whether the component is active in it.
  has_telling: whether it has one of the tokens of the component's table.
  """

  text: str
  active: bool
  has_telling: bool


class Described(NamedTuple):
  """A component that may have a label.

  id: of the request that asks for it.
  held_out: the component is active in half of them, in no order.
  """

  id: str
  site: str
  component: int
  held_out: Sequence[Passage]


class Labels(NamedTuple):
  """What was answered.

  by_id: {id of the request: label}.
  refused: {id of the request: why its answer is no label}.
  strange: the number of answers to requests that are not there (any more).
  """

  by_id: Mapping[str, str]
  refused: Mapping[str, str]
  strange: int


def write(
  folder: pathlib.Path,
  sites: Sequence[ShownSite],
  decode: Decode,
  threshold: float,
) -> list[Described]:
  """Writes the components and prompts of a harvest; returns these components.

  A component without a passage has neither.
  """
  requests = []
  components = []
  for site in sites:
    for component in site.components:
      if component.windows:
        asked = _request(site.name, component, decode, threshold)
        passages = _held_out(component, decode, threshold)
        requests.append(asked._asdict())
        components.append(Described(asked.id, site.name, component.number, passages))
  exchange.write_lines(folder / COMPONENTS, map(_as_json, components))
  exchange.write_lines(folder / PROMPTS, requests)
  return components


def _as_json(component: Described) -> dict[str, Any]:
  """The line of a component."""
  held_out = [passage._asdict() for passage in component.held_out]
  return {**component._asdict(), 'held_out': held_out}


def described(folder: pathlib.Path) -> list[Described]:
  """The components of a folder of labels; raises a DataError if it has none."""
  path = folder / COMPONENTS
  found = []
  for place, fields in exchange.objects(path, site=str, component=int, held_out=list):
    passages = []
    for passage in fields['held_out']:
      with exchange.told(place):
        foreign.fields(passage, text=str, active=bool, has_telling=bool)
      passages.append(Passage(passage['text'], passage['active'], passage['has_telling']))
    found.append(Described(fields['id'], fields['site'], fields['component'], passages))
  return found


def of_answers(components: Sequence[Described], answers: Mapping[str, str]) -> Labels:
  """The labels of these components among the answers in a file."""
  by_id = {}
  refused = {}
  strange = {*answers}
  for component in components:
    strange.discard(component.id)
    answer = answers.get(component.id)
    if answer is not None:
      words = answer.split()
      label = foreign.shown(' '.join(words))
      if not label:
        refused[component.id] = 'it is empty'
      elif len(label) > LONGEST:
        refused[component.id] = f'it has {len(label):,} characters, expected at most {LONGEST}'
      else:
        by_id[component.id] = label
  return Labels(by_id, refused, len(strange))


def by_place(
  components: Sequence[Described], answers: Mapping[str, str]
) -> dict[tuple[str, int], str]:
  """{(name of a site, number of a component): label}, see `of_answers`."""
  found = of_answers(components, answers).by_id
  labeled = (component for component in components if component.id in found)
  return {(each.site, each.component): found[each.id] for each in labeled}


def with_labels(
  sites: Sequence[ShownSite], of_places: Mapping[tuple[str, int], str]
) -> list[ShownSite]:
  """The sites, with the labels `by_place` of their components."""
  found = []
  for site in sites:
    components = []
    for component in site.components:
      label = of_places.get((site.name, component.number), '')
      components.append(component._replace(label=label))
    found.append(site._replace(components=components))
  return found


def _request(site: str, component: Component, decode: Decode, threshold: float) -> Request:
  """The question what a component responds to."""
  lines = [f'The part is active at {component.share:.2%} of tokens.']
  if component.inputs:
    lines.append(f'Tokens at which it is active: {_telling(component.inputs, decode)}')
  if component.outputs:
    lines.append(f'Tokens that follow: {_telling(component.outputs, decode)}')
  for number, window in enumerate(component.windows, 1):
    text = _marked(window, decode, threshold)
    lines.append(f'Passage {number}: {quoted(text)}')
  return exchange.request(f'{site}/{component.number}', _SYSTEM, '\n'.join(lines))


def quoted(text: str) -> str:
  """A text as a JSON string, on one line."""
  return json.dumps(text, ensure_ascii=False)


def _telling(tokens: Sequence[Token], decode: Decode) -> str:
  """The tokens of a table, with their shares of the activity."""
  return ', '.join(f'{quoted(decode([token.id]))} ({token.share:.0%})' for token in tokens)


def _marked(window: Window, decode: Decode, threshold: float) -> str:
  """The text of a window, with the tokens at which its component is active between << and >>."""
  active = window.importances > threshold
  active[window.peak] = True
  parts = []
  before = False
  for piece, is_active in zip(pieces(window.ids.tolist(), decode), active, strict=True):
    if is_active and not before:
      parts.append('<<')
    if before and not is_active:
      parts.append('>>')
    parts.append(piece)
    before = is_active
  if before:
    parts.append('>>')
  return ''.join(parts)


def _held_out(component: Component, decode: Decode, threshold: float) -> list[Passage]:
  """The held-out passages of a component, mixed; always in the same order."""
  telling = [token.id for token in component.inputs]
  passages = []
  for window in component.held_out:
    is_active = bool(window.importances.max() > threshold)
    has_telling = bool(np.isin(window.ids, telling).any())
    passages.append(Passage(decode(window.ids.tolist()), is_active, has_telling))
  order = np.random.default_rng(component.number).permutation(len(passages))
  return [passages[number] for number in order]
