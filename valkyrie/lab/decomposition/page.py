"""The page of components: for each site its mean importances, and the texts of its components."""

from collections.abc import Callable, Iterable, Sequence
import html
import itertools
from typing import NamedTuple

import numpy as np

from valkyrie.lab.decomposition.evaluation import ALIVE
from valkyrie.monitoring.html_page import document, table
from valkyrie.monitoring.pictures import Curve, figure

SPAN = 41  # tokens of a window
_LEVELS = 10  # colors for importances
_FLOOR = 1e-9  # the smallest mean on a logarithmic axis
_OPEN = 3  # components of a site that are unfolded
_STYLE = """
:root { --heat: 217, 95, 14; --soft: rgba(127, 127, 127, .12); }
section { border-top: 1px solid var(--line); margin-top: 2.5rem; }
nav, summary, dd { display: flex; flex-wrap: wrap; gap: .2rem 1rem; align-items: center; }
dd { margin: 0; }
details { border: 1px solid var(--line); border-radius: .4rem; margin: .6rem 0; }
summary { cursor: pointer; padding: .4rem .8rem; font-variant-numeric: tabular-nums; }
summary:hover, code { background: var(--soft); }
summary::before { content: '▸'; } [open] > summary::before { content: '▾'; }
summary b { min-width: 3rem; } meter { width: 6rem; height: .7rem; }
details > div { padding: .2rem .8rem .6rem; border-top: 1px solid var(--line); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .3rem .8rem; margin: .5rem 0; }
dt, small { opacity: .7; font-size: .85rem; }
code, .text { font: .85rem/1.5 ui-monospace, 'DejaVu Sans Mono', monospace; }
code { border-radius: .2rem; padding: 0 .3rem; white-space: pre; }
.texts { display: grid; gap: .4rem 1.5rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 24rem), 1fr)); }
.text { margin: 0; padding-left: .6rem; border-left: 3px solid var(--line);
  white-space: pre-wrap; overflow-wrap: anywhere; }
i { font-style: normal; padding: .1rem 0; } i.peak { box-shadow: inset 0 -2px 0 currentColor; }
""" + ''.join(
  f'.h{n} {{ background: rgba(var(--heat), {0.8 * n / _LEVELS:.2f}); }}\n'
  for n in range(1, _LEVELS + 1)
)
_ABOUT = f"""<p>Each box is a component: the product of a column of V and a row of U of a matrix.
Its importance is a number from 0 to 1 for each token: with 0 it can be removed at this token. A
component is active where its importance exceeds the threshold of the evaluation, and alive if its
mean is above {ALIVE:g}. Texts are windows of at most {SPAN} tokens of one document, chosen for the
largest importances, and at random among equal ones. The text was chosen for its underlined token.
</p>
<p>Tokens are ordered by their pointwise mutual information with the activity of the component, in
bits; the percentages are their shares of its activity. A component without such tokens is active at
tokens of many kinds.</p>"""

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


def page(title: str, sites: Sequence[ShownSite], decode: Decode) -> str:
  """The text of the page."""
  title = f'Components of {title}'
  colors = []
  for level in range(1, _LEVELS + 1):
    colors.append(f'<i class="h{level}"> {level / _LEVELS:g} </i>')
  links = []
  sections = []
  for number, site in enumerate(sites):
    links.append(f'<a href="#s{number}">{html.escape(site.name)}</a>')
    sections.append(_site(number, site, decode))
  parts = [
    f'<h1>{html.escape(title)}</h1>\n{_ABOUT}\n<p class="text">importance{"".join(colors)}</p>',
    _overview(sites),
    f'<nav>{"".join(links)}</nav>',
    *sections,
  ]
  return document(title, parts, _STYLE)


def _overview(sites: Sequence[ShownSite]) -> str:
  """The table of the sites, and of all together."""
  rows = [(site.name, len(site.means), site.alive, site.active) for site in sites]
  components = sum(len(site.means) for site in sites)
  alive = sum(site.alive for site in sites)
  active = sum(site.active for site in sites)
  rows.append(('all', components, alive, active))
  return table(('site', 'components', 'alive', 'active at a token'), rows)


def _site(number: int, site: ShownSite, decode: Decode) -> str:
  size = len(site.means)
  means = []
  for place, mean in enumerate(site.means, 1):
    shown_mean = max(float(mean), _FLOOR)
    means.append((float(place), shown_mean))
  threshold = [(1.0, ALIVE), (float(size), ALIVE)]
  curves = [Curve('the smallest mean', means), Curve('alive above', threshold)]
  parts = [
    f'<section id="s{number}">\n<h2>{html.escape(site.name)}</h2>',
    f'<p>{site.alive:,} of {size:,} components are alive, and {site.active:.3g} are active at a '
    f'token. The {len(site.components)} most frequent follow.</p>',
    figure('Mean importances', 'components, sorted', '', curves, logarithmic='y'),
  ]
  for rank, component in enumerate(site.components):
    parts.append(_component(component, decode, unfolded=rank < _OPEN))
  parts.append('</section>')
  return '\n'.join(parts)


def _component(component: Component, decode: Decode, *, unfolded: bool) -> str:
  tables = ''
  if component.inputs:
    tables += _token_table('reads', component.inputs, decode)
  if component.outputs:
    tables += _token_table('is followed by', component.outputs, decode)
  texts = '\n'.join(_text(window, decode) for window in component.windows)
  chips = ' '.join(_chip(token, decode) for token in component.inputs[:4])
  is_open = ' open' if unfolded else ''
  label = f'<em>{_visible(component.label)}</em>' if component.label else ''
  return (
    f'<details{is_open}>\n<summary><b>{component.number}</b>'
    f'<meter value="{component.share:.4f}"></meter>active at {_percent(component.share)} of tokens'
    f'<small>mean importance {component.mean:.3g}</small>'
    f'<span>{chips}</span>{label}</summary>\n'
    f'<div><dl>{tables}</dl>\n<div class="texts">{texts}</div></div>\n</details>'
  )


def _token_table(title: str, tokens: Sequence[Token], decode: Decode) -> str:
  cells = []
  for token in tokens:
    numbers = f'{token.bits:.1f} bits, {_percent(token.share)}'
    cells.append(f'<span>{_chip(token, decode)} <small>{numbers}</small></span>')
  return f'<dt>{title}</dt><dd>{"".join(cells)}</dd>'


def _chip(token: Token, decode: Decode) -> str:
  """The text of a token, or its number if it has none."""
  text = _visible(decode([token.id])).replace(' ', '␣')
  return f'<code>{text or f"#{token.id}"}</code>'


def _text(window: Window, decode: Decode) -> str:
  """The text of a window; neighbors with the same color are one element."""
  importances = np.clip(window.importances, 0, 1)
  levels = np.ceil(importances * _LEVELS).astype(int)
  styles = [f'h{level}' if level else '' for level in levels]
  styles[window.peak] += ' peak'
  all_pieces = pieces(window.ids.tolist(), decode)
  pairs = zip(styles, all_pieces, strict=True)
  parts = []
  for style, group in itertools.groupby(pairs, key=lambda pair: pair[0]):
    joined = ''.join(piece for _, piece in group)
    text = _visible(joined)
    if style:
      text = f'<i class="{style}">{text}</i>'
    parts.append(text)
  whole = ''.join(parts)
  return f'<p class="text">{whole}</p>'


def pieces(ids: Sequence[int], decode: Decode) -> list[str]:
  """The text that each token adds; a character of several tokens belongs to the last of these."""
  text = decode(ids)
  beginnings = [decode(ids[:n]).rstrip('\ufffd') for n in range(1, len(ids))]
  lengths = map(len, [*beginnings, text])
  ends = [0, *itertools.accumulate(lengths, max)]
  return [text[begin:end] for begin, end in itertools.pairwise(ends)]


def _visible(text: str) -> str:
  """A text with signs for characters that are invisible or change the direction of the page."""
  signs = {'\n': '↵', '\t': '⇥'}
  characters = []
  for character in text:
    if character.isprintable():
      characters.append(character)
    else:
      characters.append(signs.get(character, '·'))
  return html.escape(''.join(characters))


def _percent(share: float) -> str:
  if share >= 0.1:
    return f'{share:.0%}'
  if share >= 1e-4:
    return f'{share:.2%}'
  return f'{share:.1e}'
