"""Plot of the loss over the position in the document: loss_by_position.png of a run.

The axis is chosen for the differences between positions and curves. The first positions of a
document, which have little context, are cut off at its top.
"""

from collections.abc import Mapping, Sequence
import math
import pathlib

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from valkyrie.errors import storage_errors
from valkyrie.monitoring.metrics import BY_POSITION, Metrics

_WIDTH, _HEIGHT = 960, 540
_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 30, 90, 70  # margins, in pixels
_WITH_CONTEXT = 4  # the bin from position 16 on
_TICKS = 8
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
  ticks, step = _axis([loss for k, loss in every if k >= min(_WITH_CONTEXT, bins[-1])])

  def x(k: float) -> float:
    return _LEFT + (k - bins[0] + 0.5) / len(bins) * (_WIDTH - _LEFT - _RIGHT)

  def y(loss: float) -> float:
    share = (loss / step - ticks[0]) / (ticks[-1] - ticks[0])
    return _HEIGHT - _BOTTOM - min(share, 1.0) * (_HEIGHT - _TOP - _BOTTOM)

  for tick in ticks:
    at = y(tick * step)
    draw.line([(_LEFT, at), (_WIDTH - _RIGHT, at)], fill='#dddddd')
    draw.text((_LEFT - 8, at), f'{tick * step:g}', fill='black', font=font, anchor='rm')
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


def _axis(losses: Sequence[float]) -> tuple[range, float]:
  """(the ticks as multiples of a step, the step): 1, 2 or 5 times a power of ten."""
  low, high = min(losses, default=0.0), max(losses, default=1.0)
  finest = max(high - low, 0.1) / _TICKS
  power = 10.0 ** math.floor(math.log10(finest))
  step = power * next(factor for factor in (1, 2, 5, 10) if factor * power >= finest * 0.999)
  first, last = math.floor(low / step), math.ceil(high / step)
  return range(first, max(last, first + 1) + 1), step
