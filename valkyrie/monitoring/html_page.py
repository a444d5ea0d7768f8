"""A page in one file, without a network or a script, in the light or dark style of its reader."""

from collections.abc import Sequence
import html
from typing import Any, NamedTuple

from valkyrie.monitoring.pictures import can_be_drawn

_STYLE = """
:root { color-scheme: light dark; --line: #8886; --mark: #e0b00050; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto;
  padding: 0 1rem; }
figure { display: inline-block; width: 34rem; max-width: 100%; margin: 0 1rem 1.5rem 0; }
img { width: 100%; }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto; }
th, td { border-bottom: 1px solid var(--line); padding: .2rem .8rem; text-align: left; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
tr.differs td { background: var(--mark); }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border-left: 3px solid var(--line);
  padding-left: .8rem; }
"""


class Link(NamedTuple):
  """A cell of a table that leads to another page."""

  text: str
  address: str


def document(title: str, parts: Sequence[str], style: str = '') -> str:
  """A page of these parts, in the style of all pages, with more of its own."""
  body = '\n'.join(filter(None, parts))
  return (
    '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    f'<title>{html.escape(title)}</title>\n<style>{_STYLE}{style}</style>\n</head>\n'
    f'<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n'
  )


def table(header: Sequence[str], rows: Sequence[Sequence[Any]], marked: bool = False) -> str:
  """A table of a page; numbers stand to the right, and `marked` rows have a background."""
  cells = [f'<th scope="col">{html.escape(name)}</th>' for name in header]
  head = ''.join(cells)
  row_start = '<tr>'
  if marked:
    row_start = '<tr class="differs">'
  lines = []
  for row in rows:
    cells = ''.join(map(_cell, row))
    lines.append(f'{row_start}{cells}</tr>')
  body = '\n'.join(lines)
  return f'<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>\n'


def _cell(value: Any) -> str:
  if value is None:
    return '<td></td>'
  if isinstance(value, Link):
    return f'<td><a href="{html.escape(value.address)}">{html.escape(value.text)}</a></td>'
  if not can_be_drawn(value):
    return f'<td>{html.escape(str(value))}</td>'
  number = f'{value:,}' if isinstance(value, int) else f'{value:,.4g}'
  return f'<td class="number">{number}</td>'
