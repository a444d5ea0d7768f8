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
_LEVELS = 10  # of the heat
_FLOOR = 1e-9  # of a mean on a logarithmic axis
_OPEN = 3  # components of a site that are unfolded
_STYLE = """
:root { --heat: 217, 95, 14; --soft: rgba(127, 127, 127, .12); } a { color: var(--c0); }
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
i { font-style: normal; padding: .1rem 0; } i.peak { box-shadow: inset 0 -2px 0 var(--text); }
""" + ''.join(
  f'.h{n} {{ background: rgba(var(--heat), {0.8 * n / _LEVELS:.2f}); }}\n'
  for n in range(1, _LEVELS + 1)
)
_ABOUT = f"""<p>Each box is a component: the product of a column of V and a row of U of a matrix.
Its importance is a number from 0 to 1 for each token: with 0 it can be removed at this token. A
component is active where its importance exceeds the threshold of the evaluation, and alive if its
mean is above {ALIVE:g}. Texts are windows of at most {SPAN} tokens of one document, those with the
largest importances; among equal ones they are drawn at random. The underlined token is the one for
which the text was chosen.</p>
<p>Tokens are ordered by their pointwise mutual information with the activity of the component, in
bits; the percentages are their shares of its activity. A component without such tokens is active at
many kinds alike.</p>"""

Decode = Callable[[Iterable[int]], str]


class Window(NamedTuple):
  """Tokens of a document, the importance of the component at each, and the number of the peak."""

  ids: np.ndarray
  importances: np.ndarray
  peak: int


class Token(NamedTuple):
  """A token, its mutual information with the activity of a component, and its share of it."""

  bits: float
  share: float
  id: int


class Component(NamedTuple):
  """What is shown of a component: its number, mean importance, and share of active tokens.

  inputs, outputs: the tokens at which it is active, and those that follow them.
  """

  number: int
  mean: float
  share: float
  windows: Sequence[Window]
  inputs: Sequence[Token]
  outputs: Sequence[Token]


class ShownSite(NamedTuple):
  """What is shown of a site: its alive components, and the number of active ones at a token.

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
  scale = ''.join(f'<i class="h{n}"> {n / _LEVELS:g} </i>' for n in range(1, _LEVELS + 1))
  counts = [(len(site.means), site.alive, site.active) for site in sites]
  totals = [sum(of) for of in zip(*counts, strict=True)]
  names = [*(site.name for site in sites), 'all']
  rows = [(name, *row) for name, row in zip(names, [*counts, totals], strict=True)]
  links = (f'<a href="#s{n}">{html.escape(site.name)}</a>' for n, site in enumerate(sites))
  parts = [
    f'<h1>{html.escape(title)}</h1>\n{_ABOUT}\n<p class="text">importance{scale}</p>',
    table(('site', 'components', 'alive', 'active at a token'), rows),
    f'<nav>{"".join(links)}</nav>',
    *(_site(n, site, decode) for n, site in enumerate(sites)),
  ]
  return document(title, parts, _STYLE)


def _site(number: int, site: ShownSite, decode: Decode) -> str:
  size = len(site.means)
  means = [(n + 1.0, max(float(mean), _FLOOR)) for n, mean in enumerate(site.means)]
  alive = Curve('alive above', [(1.0, ALIVE), (float(size), ALIVE)])
  curves = [Curve('the smallest mean', means), alive]
  return '\n'.join(
    [
      f'<section id="s{number}">\n<h2>{html.escape(site.name)}</h2>',
      f'<p>{site.alive:,} of {size:,} components are alive, and {site.active:.3g} are active at a '
      f'token. The {len(site.components)} most frequent follow.</p>',
      figure('Mean importances', 'components, sorted', '', curves, logarithmic='y'),
      *(_component(of, decode, unfolded=n < _OPEN) for n, of in enumerate(site.components)),
      '</section>',
    ]
  )


def _component(component: Component, decode: Decode, *, unfolded: bool) -> str:
  def chip(token):
    return f'<code>{_shown(decode([token.id])).replace(" ", "␣") or f"#{token.id}"}</code>'

  def numbered(token):
    return (
      f'<span>{chip(token)} <small>{token.bits:.1f} bits, {_percent(token.share)}</small></span>'
    )

  tables = [
    f'<dt>{words}</dt><dd>{"".join(map(numbered, tokens))}</dd>'
    for words, tokens in (('reads', component.inputs), ('is followed by', component.outputs))
    if tokens
  ]
  texts = '\n'.join(_text(window, decode) for window in component.windows)
  return (
    f'<details{" open" if unfolded else ""}>\n<summary><b>{component.number}</b>'
    f'<meter value="{component.share:.4f}"></meter>active at {_percent(component.share)} of tokens'
    f'<small>mean importance {component.mean:.3g}</small>'
    f'<span>{" ".join(map(chip, component.inputs[:4]))}</span></summary>\n'
    f'<div><dl>{"".join(tables)}</dl>\n<div class="texts">{texts}</div></div>\n</details>'
  )


def _text(window: Window, decode: Decode) -> str:
  """The text of a window; neighbors with the same heat are one element."""
  heat = np.ceil(np.clip(window.importances, 0, 1) * _LEVELS).astype(int)
  kinds = (f'h{level}' * bool(level) + ' peak' * (n == window.peak) for n, level in enumerate(heat))
  pairs = zip(kinds, pieces(window.ids.tolist(), decode), strict=True)
  parts = []
  for kind, group in itertools.groupby(pairs, key=lambda pair: pair[0]):
    text = _shown(''.join(piece for _, piece in group))
    parts.append(f'<i class="{kind}">{text}</i>' if kind else text)
  return f'<p class="text">{"".join(parts)}</p>'


def pieces(ids: Sequence[int], decode: Decode) -> list[str]:
  """The text of each token after those before it; the last token of a character has all of it."""
  texts = [decode(ids[:n]).rstrip('\ufffd') for n in range(1, len(ids))] + [decode(ids)]
  ends = [0, *itertools.accumulate(map(len, texts), max)]
  return [texts[-1][begin:end] for begin, end in itertools.pairwise(ends)]


def _shown(text: str) -> str:
  """A text with signs for what would not be seen, or change the direction of the page."""
  signs = {'\n': '↵', '\t': '⇥'}
  return html.escape(''.join(signs.get(x, x if x.isprintable() else '·') for x in text))


def _percent(share: float) -> str:
  return f'{share:.0%}' if share >= 0.1 else f'{share:.2%}' if share >= 1e-4 else f'{share:.1e}'
