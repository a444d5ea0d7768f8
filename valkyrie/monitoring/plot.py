"""Plot of the loss over the position in the document: loss_by_position.png of a run.

The axis is chosen for the differences between positions and curves. The first positions of a
document, which have little context, are cut off at its top.
"""

from collections.abc import Mapping
import math
import pathlib

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from valkyrie.errors import storage_errors
from valkyrie.monitoring.line_chart import ticks
from valkyrie.monitoring.metrics import BY_POSITION, Metrics

_WIDTH, _HEIGHT = 960, 540
_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 30, 90, 70  # margins, in pixels
_WITH_CONTEXT = 4  # the bin from position 16 on
_TICKS, _LEAST = 8, 0.1  # steps of the axis, and the nats that they cover at least
COLORS = ('#1f5fa8', '#d1622b', '#2f8f4e', '#8a4fa3')


def write_loss_by_position(
  model_dir: pathlib.Path, curves: Mapping[str, Metrics], name: str = ''
) -> np.ndarray:
  """Draws the metrics loss_by_position/P over P on a logarithmic axis, one curve per name.

  Args:
    model_dir: the directory of the run.
    curves: the metrics of each curve, by its name.
    name: of the data, for the name of the file: loss_by_position_NAME.png.

  Returns:
    The picture, uint8 [height, width, 3].

  Raises:
    StorageError: the image cannot be written.
  """
  points = {name: _points(metrics) for name, metrics in curves.items()}
  path = model_dir / f'loss_by_position{name and "_"}{name}.png'
  advice = 'Make room there, or name another --model_dir.'
  with storage_errors(f'{path} cannot be written', advice):
    image = _draw(points)
    image.save(path)
  return np.asarray(image)


def _points(metrics: Metrics) -> list[tuple[int, float]]:
  """(k, loss) for each bin, from position 2^k on, whose loss is finite."""
  return sorted(
    (int(name.removeprefix(BY_POSITION)).bit_length() - 1, loss)
    for name, loss in metrics.items()
    if name.startswith(BY_POSITION) and loss is not None and math.isfinite(loss)
  )


def _draw(curves: Mapping[str, list[tuple[int, float]]]) -> Image.Image:
  image = Image.new('RGB', (_WIDTH, _HEIGHT), 'white')
  draw, font = ImageDraw.Draw(image), ImageFont.load_default(16)
  every = [point for points in curves.values() for point in points]
  bins = range(min((k for k, _ in every), default=0), max((k for k, _ in every), default=0) + 1)
  shown = [loss for k, loss in every if k >= min(_WITH_CONTEXT, bins[-1])]
  marks = ticks(min(shown, default=0.0), max(shown, default=1.0), _TICKS, _LEAST)

  def x(k: float) -> float:
    return _LEFT + (k - bins[0] + 0.5) / len(bins) * (_WIDTH - _LEFT - _RIGHT)

  def y(loss: float) -> float:
    share = (loss - marks[0]) / (marks[-1] - marks[0])
    return _HEIGHT - _BOTTOM - min(share, 1.0) * (_HEIGHT - _TOP - _BOTTOM)

  for tick in marks:
    at = y(tick)
    draw.line([(_LEFT, at), (_WIDTH - _RIGHT, at)], fill='#dddddd')
    draw.text((_LEFT - 8, at), f'{tick:g}', fill='black', font=font, anchor='rm')
  for k in bins:
    draw.text((x(k), _HEIGHT - _BOTTOM + 8), f'{2**k}', fill='black', font=font, anchor='mt')
  middle = (_LEFT + _WIDTH - _RIGHT) / 2
  text = 'position in the document, from P to 2 P - 1'
  draw.text((middle, _HEIGHT - 12), text, fill='black', font=font, anchor='ms')
  draw.text((_LEFT, 12), 'loss, nats per token', fill='black', font=font, anchor='lt')
  for index, (name, points) in enumerate(curves.items()):
    color = COLORS[index % len(COLORS)]
    pixels = [(x(k), y(loss)) for k, loss in points]
    draw.line(pixels, fill=color, width=3)
    for pixel in pixels:
      draw.circle(pixel, 5, fill=color)
    above = 12 + 20 * index
    draw.text((_WIDTH - _RIGHT, above), name, fill=color, font=font, anchor='rt')
  return image
