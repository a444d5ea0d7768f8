"""Line charts as SVG inside a page: axes, curves in the page's colors, and a legend."""

from collections.abc import Sequence
import html
import math
from typing import NamedTuple

_WIDTH, _HEIGHT = 560, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 34, 12, 44  # margins
_MOST_POINTS = 400  # of a curve; more are averaged
COLORS = 6  # --c0 to --c5 in the style of the page
_DASHES = ('', '6 3', '2 3')  # so that colors are not all that tells curves apart


class Curve(NamedTuple):
  """A name, and points (x, y) in the order of x."""

  name: str
  points: Sequence[tuple[float, float]]


def chart(
  title: str, x_name: str, y_name: str, curves: Sequence[Curve], logarithmic: bool = False
) -> str:
  """A figure with a caption; '' if no curve has a point. `logarithmic` is the axis of x."""
  drawn = [(number, curve) for number, curve in enumerate(curves) if curve.points]
  if not drawn:
    return ''
  scale = (lambda x: math.log2(max(x, 1))) if logarithmic else (lambda x: x)
  thinned = {number: _thinned(curve.points) for number, curve in drawn}
  xs = [scale(x) for points in thinned.values() for x, _ in points]
  ys = [y for points in thinned.values() for _, y in points]
  x_ticks, y_ticks = ticks(min(xs), max(xs)), ticks(min(ys), max(ys))

  def place(x: float, y: float) -> tuple[float, float]:
    right = (scale(x) - x_ticks[0]) / (x_ticks[-1] - x_ticks[0])
    up = (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    return _LEFT + right * width, _HEIGHT - _BOTTOM - up * height

  parts = []
  for tick in y_ticks:
    _, y = place(1, tick)
    parts.append(
      f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--line)"/>'
      f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{short(tick)}</text>'
    )
  for tick in x_ticks:
    value = 2**tick if logarithmic else tick
    x, _ = place(value, y_ticks[0])
    name = f'{value:,.0f}' if logarithmic else short(value)
    parts.append(
      f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{name}</text>'
    )
  middle = (_LEFT + _WIDTH - _RIGHT) / 2
  parts.append(
    f'<text x="{middle}" y="{_HEIGHT - 6}" text-anchor="middle">{html.escape(x_name)}</text>'
  )
  for number, points in thinned.items():
    line = ' '.join('{:.1f},{:.1f}'.format(*place(x, y)) for x, y in points)
    dashes = _DASHES[number // COLORS % len(_DASHES)]
    parts.append(
      f'<polyline points="{line}" fill="none" stroke="var(--c{number % COLORS})" stroke-width="2" '
      f'stroke-dasharray="{dashes}"/>'
    )
    if len(points) == 1:
      x, y = place(*points[0])
      parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="var(--c{number % COLORS})"/>')
  legend = ', '.join(
    f'<span style="color: var(--c{number % COLORS})">{html.escape(curve.name)} '
    f'{short(curve.points[-1][1])}</span>'
    for number, curve in drawn
  )
  unit = f', {html.escape(y_name)}' if y_name else ''
  return (
    f'<figure>\n<figcaption><strong>{html.escape(title)}</strong>{unit}: at the end {legend}'
    f'</figcaption>\n<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
    f'aria-label="{html.escape(title)}">{"".join(parts)}</svg>\n</figure>'
  )


def ticks(low: float, high: float, count: int = 5, least: float = 0.0) -> list[float]:
  """Round numbers that enclose a range, at steps of 1, 2 or 5 times a power of ten.

  The steps are so large that `count` of them, or a few more, cover the range, and also `least`.
  """
  span = max(high - low, least) or abs(high) or 1.0
  power = 10.0 ** math.floor(math.log10(span / count))
  step = power * next(f for f in (1, 2, 5, 10) if f * power >= 0.999 * span / count)
  first, last = math.floor(low / step), math.ceil(high / step)
  return [step * number for number in range(first, max(last, first + 1) + 1)]


def short(value: float) -> str:
  """A number in few characters: 1.234, 12.3k, 4.5M."""
  for size, letter in ((1e15, 'P'), (1e12, 'T'), (1e9, 'G'), (1e6, 'M'), (1e4, 'k')):
    if abs(value) >= size:
      return f'{value / (1e3 if letter == "k" else size):.3g}{letter}'
  return f'{value:.4g}'


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
  """The points, or means of neighbors where there are too many."""
  size = -(-len(points) // _MOST_POINTS)
  groups = [points[first : first + size] for first in range(0, len(points), size)]
  return [(group[-1][0], sum(y for _, y in group) / len(group)) for group in groups]
