"""Pictures of runs, drawn by matplotlib: losses by position, heat maps of scores, curves of a page.

matplotlib takes a second to import, so this happens where a picture is drawn. Figures are drawn
without pyplot, in any thread.
"""

import base64
from collections.abc import Callable, Mapping, Sequence
import functools
import html
import importlib
import io
import itertools
import os
import pathlib
import re
from typing import Any, NamedTuple

import numpy as np

from valkyrie.errors import ValkyrieError
from valkyrie.monitoring.metrics import BY_POSITION, Metrics
from valkyrie.storage import whole_file

# Of curves, on a white and on a black ground.
COLORS = ('#2f74c0', '#d1622b', '#2f8f4e', '#9a5fb5', '#9a7400', '#00868f')
MAP = 'Blues'  # the colors of scores
_WITH_CONTEXT = 16  # from this position on, a token has some context
_LEAST = 0.1  # nats that the axis of losses covers at least
_DPI = 100
_MOST_POINTS = 400  # points of a curve of a page; more are averaged
_GRAY = '#808080'  # of the axes of a page, in its light and its dark style
_UNITS = ((1e3, 'k'), (1e6, 'M'), (1e9, 'G'), (1e12, 'T'), (1e15, 'P'))
_LARGEST = 1e39  # no float32 is larger, and sums and axes of float64 overflow far above
_DASHES = ('-', '--', ':')  # so that curves differ in more than color


class Curve(NamedTuple):
  """A name, and points (x, y) in the order of x."""

  name: str
  points: Sequence[tuple[float, float]]


def _drawn_anyhow(draw: Callable[..., Any]) -> Callable[..., Any]:
  """Draws with matplotlib's defaults where the settings of this user do not work.

  Such as `text.usetex` without LaTeX.
  """

  @functools.wraps(draw)
  def call(*arguments: Any, **options: Any) -> Any:
    mpl = _matplotlib()
    try:
      return draw(*arguments, **options)
    except ValkyrieError:
      raise
    except Exception:
      with mpl.rc_context(mpl.rcParamsDefault):
        return draw(*arguments, **options)

  return call


def _matplotlib() -> Any:
  """The package, which no picture shows in a window: MPLBACKEND may name anything."""
  backend = os.environ.pop('MPLBACKEND', None)
  try:
    return importlib.import_module('matplotlib')
  finally:
    if backend is not None:
      os.environ['MPLBACKEND'] = backend


@_drawn_anyhow
def write_loss_by_position(
  model_dir: pathlib.Path,
  curves: Mapping[str, Metrics],
  name: str = '',
) -> np.ndarray:
  """Draws the metrics loss_by_position/P over P on a logarithmic axis, one curve per name.

  The left part has all positions. The first ones, which have little context, can hide differences
  between the others, so the right part begins at position 16. The file in model_dir is
  loss_by_position.png, or for other data loss_by_position_NAME.png. Returns the picture, uint8
  [height, width, 3]; raises a StorageError if it cannot be written.
  """
  points = {}
  last = 1
  for label, metrics in curves.items():
    points[label] = by_position(metrics)
    for position, _ in points[label]:
      last = max(last, position)
  canvas, whole, with_context = _canvas(9.6, 5.4, 2)
  first_with_context = min(_WITH_CONTEXT, last)
  _draw_losses(whole, points, 1)
  _draw_losses(with_context, points, first_with_context)
  whole.set_ylabel('loss, nats per token')
  whole.legend(labelcolor='linecolor', frameon=False)
  stem = 'loss_by_position'
  if name:
    stem += f'_{name}'
  _write_png(model_dir / f'{stem}.png', canvas)
  pixels = np.asarray(canvas.buffer_rgba())
  return pixels[..., :3].copy()


def _draw_losses(
  axes: Any,
  points: Mapping[str, Sequence[tuple[float, float]]],
  first: int,
) -> None:
  """Draws a curve for each name, from the position `first` on."""
  axes.set_xscale('log', base=2)
  colors = itertools.cycle(COLORS)
  for label, curve in points.items():
    shown = [(position, loss) for position, loss in curve if position >= first]
    positions = [position for position, _ in shown]
    losses = [loss for _, loss in shown]
    axes.plot(positions, losses, 'o-', color=next(colors), lw=3, label=label)
  low, high = axes.get_ylim()
  covered = high - low
  missing = max(0, _LEAST - covered)
  room = missing / 2
  axes.set_ylim(low - room, high + room)
  axes.xaxis.set_major_formatter('{x:.0f}')
  axes.grid(axis='y', color='#dddddd')
  axes.set_xlabel('position in the document, from P to 2 P - 1')


def by_position(metrics: Mapping[str, Any]) -> list[tuple[int, float]]:
  """(P, loss) for each bin, from position P on, whose loss `can_be_drawn`."""
  points = []
  for name, loss in metrics.items():
    is_bin = re.fullmatch(rf'{BY_POSITION}[1-9]\d{{,17}}', name)
    if is_bin and can_be_drawn(loss):
      position = int(name.removeprefix(BY_POSITION))
      points.append((position, loss))
  return sorted(points)


def can_be_drawn(value: Any) -> bool:
  """Whether a value of a file is a number that a float32 could have, so that no axis overflows."""
  is_number = isinstance(value, int | float)
  return is_number and abs(value) < _LARGEST


@_drawn_anyhow
def write_heat_map(
  path: pathlib.Path,
  title: str,
  panels: Mapping[str, np.ndarray],
  columns: Sequence[str],
  rows: Sequence[str],
) -> None:
  """Draws a panel of colored cells for each condition to a .png file, which is replaced.

  A panel has scores from 0 to 1, [rows, columns]; NaN leaves a cell empty. Rows are named from top
  to bottom. Raises a StorageError if the picture cannot be written.
  """
  panel_width = 0.92 * len(columns) + 0.3
  width = max(6.0, 1.5 + len(panels) * panel_width)  # room for the title
  height = 1.3 + 0.44 * len(rows)
  canvas, *every = _canvas(width, height, len(panels))
  canvas.figure.suptitle(title, parse_math=False)
  column_places = range(len(columns))
  row_places = range(len(rows))
  row_names = rows
  for axes, (name, scores) in zip(every, panels.items(), strict=True):
    _draw_cells(axes, scores)
    axes.set_title(name, parse_math=False)
    axes.set_xticks(column_places, columns)
    axes.set_yticks(row_places, row_names)
    row_names = [''] * len(rows)  # only the first panel names the rows
  _write_png(path, canvas)


def _draw_cells(axes: Any, scores: np.ndarray) -> None:
  """Draws a colored cell for each score [rows, columns], with its number."""
  axes.imshow(scores, cmap=MAP, vmin=0, vmax=1, aspect='auto')
  for (row, column), score in np.ndenumerate(scores):
    if np.isnan(score):
      continue
    ink = 'black'
    if score > 0.5:
      ink = 'white'
    axes.text(column, row, f'{score:.0%}', color=ink, ha='center', va='center')


@_drawn_anyhow
def write_spikes(path: pathlib.Path, sizes: np.ndarray, x_name: str, y_name: str) -> None:
  """Draws many sizes [N] over their places to a .png file, the largest of each pixel."""
  canvas, axes = _canvas(9.6, 3.2, 1)
  part_count = min(len(sizes), 900)
  parts = np.array_split(sizes, part_count)
  part_sizes = [len(part) for part in parts]
  ends = np.cumsum(part_sizes)
  largest = [part.max(initial=0) for part in parts]
  axes.vlines(ends, 0, largest, color=COLORS[0], lw=1)
  axes.set_xlabel(x_name)
  axes.set_ylabel(y_name)
  _write_png(path, canvas)


@_drawn_anyhow
def figure(
  title: str,
  x_name: str,
  y_name: str,
  curves: Sequence[Curve],
  logarithmic: str = '',
) -> str:
  """A figure of a page, with its caption; '' if no curve has a point.

  `logarithmic` is an axis, 'x' or 'y'.
  """
  drawn = [(number, curve) for number, curve in enumerate(curves) if curve.points]
  if not drawn:
    return ''
  canvas, axes = _canvas(5.6, 3.2)
  legend = []
  for number, curve in drawn:
    points = _thinned(curve.points)
    xs, ys = zip(*points, strict=True)
    times_around, color_number = divmod(number, len(COLORS))
    color = COLORS[color_number]
    dashes = _DASHES[times_around % len(_DASHES)]
    marker = ''
    if len(points) == 1:
      marker = 'o'
    axes.plot(xs, ys, dashes, color=color, lw=2, marker=marker)
    _, last_y = curve.points[-1]
    name = f'{html.escape(curve.name)} {short(last_y)}'
    legend.append(f'<span style="color: {color}">{name}</span>')
  if logarithmic == 'x':
    axes.set_xscale('log', base=2)
  if logarithmic == 'y':
    axes.set_yscale('log')
    axes.minorticks_off()
  axes.xaxis.set_major_formatter(lambda x, _: short(x))
  axes.yaxis.set_major_formatter(lambda y, _: short(y))
  axes.grid(axis='y', color=_GRAY, alpha=0.4)
  axes.spines[:].set_visible(False)
  axes.tick_params(length=0, labelcolor=_GRAY)
  axes.set_xlabel(x_name, color=_GRAY)
  file = io.BytesIO()
  canvas.figure.savefig(file, format='svg', transparent=True)
  content = file.getvalue()
  picture = base64.b64encode(content).decode()
  title = html.escape(title)
  caption = f'<strong>{title}</strong>'
  if y_name:
    caption += f', {html.escape(y_name)}'
  listed = ', '.join(legend)
  return (
    f'<figure>\n<figcaption>{caption}: at the end {listed}'
    f'</figcaption>\n<img alt="{title}" src="data:image/svg+xml;base64,{picture}">\n</figure>'
  )


def _write_png(path: pathlib.Path, canvas: Any) -> None:
  picture = io.BytesIO()
  canvas.print_png(picture)
  whole_file.write(path, picture.getvalue())


def _canvas(width: float, height: float, panels: int = 1) -> list[Any]:
  """[an Agg canvas, the axes of each panel]; the size is in units of 100 pixels."""
  from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
  from matplotlib.figure import Figure  # noqa: PLC0415

  drawing = Figure((width, height), dpi=_DPI, layout='constrained')
  canvas = FigureCanvasAgg(drawing)
  (row,) = drawing.subplots(1, panels, squeeze=False)
  return [canvas, *row]


def short(value: float) -> str:
  """A number in few characters: 1.234, 12.3k, 4.5M."""
  if not abs(value) >= 1e4:
    return f'{value:.4g}'
  size, letter = _UNITS[0]
  for next_size, next_letter in _UNITS:
    if abs(value) >= next_size:
      size = next_size
      letter = next_letter
  return f'{value / size:.3g}{letter}'


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
  """The points, or means of neighbors where there are too many."""
  size = -(-len(points) // _MOST_POINTS)
  means = []
  for first in range(0, len(points), size):
    group = points[first : first + size]
    last_x, _ = group[-1]
    sum_y = sum(y for _, y in group)
    mean_y = sum_y / len(group)
    means.append((last_x, mean_y))
  return means
