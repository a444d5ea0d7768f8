"""A page in one file, without a network or a script, in the light or dark style of its reader."""

from collections.abc import Sequence
import html
from typing import Any, NamedTuple

from valkyrie.monitoring.pictures import can_be_drawn

_STYLE = """
:root { color-scheme: light dark;
  --text: #1b1b1b; --page: #ffffff; --line: #c8c8c8; --mark: #fff0c2;
  --better: #d8f0dd; --worse: #fbdcd3;
  --c0: #1f5fa8; --c1: #b3491a; --c2: #22733d; --c3: #7a3d94; --c4: #8a6500; --c5: #00707a; }
@media (prefers-color-scheme: dark) { :root { --text: #e8e8e8; --page: #16181c; --line: #4a4d52;
  --mark: #4d431f; --better: #1f4a2b; --worse: #5a2a1c;
  --c0: #7db4f0; --c1: #f09a6c; --c2: #7fd19b; --c3: #cf9be3; --c4: #e3c15c;
  --c5: #5fd0da; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page);
  max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
figure { display: inline-block; width: 34rem; max-width: 100%; margin: 0 1rem 1.5rem 0; }
svg { width: 100%; height: auto; } svg text { fill: var(--text); font-size: 12px; }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto; }
th, td { border-bottom: 1px solid var(--line); padding: .2rem .8rem; text-align: left; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
tr.differs td { background: var(--mark); }
td.better { background: var(--better); } td.worse { background: var(--worse); }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border-left: 3px solid var(--line);
  padding-left: .8rem; }
"""


def document(title: str, parts: Sequence[str], style: str = '') -> str:
  """A page of these parts, in the style of all pages, with more of its own."""
  body = '\n'.join(filter(None, parts))
  return (
    '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    f'<title>{html.escape(title)}</title>\n<style>{_STYLE}{style}</style>\n</head>\n'
    f'<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n'
  )


class Cell(NamedTuple):
  """A text of a table, with its classes in the style."""

  text: str
  kind: str


def table(header: Sequence[str], rows: Sequence[Sequence[Any]], marked: bool = False) -> str:
  """A table of a page; numbers stand to the right, and `marked` rows have a background."""
  head = ''.join(f'<th scope="col">{html.escape(name)}</th>' for name in header)
  row_start = '<tr class="differs">' if marked else '<tr>'
  body = '\n'.join(row_start + ''.join(map(_cell, row)) + '</tr>' for row in rows)
  return f'<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>\n'


def _cell(value: Any) -> str:
  if value is None:
    return '<td></td>'
  if can_be_drawn(value):
    digits = ',' if isinstance(value, int) else ',.4g'
    value = Cell(f'{value:{digits}}', 'number')
  if isinstance(value, Cell):
    return f'<td class="{value.kind}">{value.text}</td>'
  return f'<td>{html.escape(str(value))}</td>'
