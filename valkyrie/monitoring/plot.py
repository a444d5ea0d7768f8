"""Plot of the loss over the position in the document: loss_by_position.png of a run."""

from collections.abc import Mapping
import math
import pathlib

from PIL import Image, ImageDraw, ImageFont

from valkyrie.errors import storage_errors
from valkyrie.monitoring.metrics import BY_POSITION, Metrics

_WIDTH, _HEIGHT = 960, 540
_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 30, 90, 70  # margins, in pixels
COLORS = ('#1f5fa8', '#d1622b', '#2f8f4e', '#8a4fa3')


def write_loss_by_position(model_dir: pathlib.Path, curves: Mapping[str, Metrics]) -> None:
  """Draws the metrics loss_by_position/P over P on a logarithmic axis, one curve per name.

  Raises:
    StorageError: the image cannot be written.
  """
  points = {name: _points(metrics) for name, metrics in curves.items()}
  path = model_dir / 'loss_by_position.png'
  advice = 'Make room there, or name another --model_dir.'
  with storage_errors(f'{path} cannot be written', advice):
    _draw(points).save(path)


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
  highest = max((loss for _, loss in every), default=0.0)
  step = 10.0 ** math.floor(math.log10(highest)) / 2 if highest else 1.0
  ticks = max(1, math.ceil(highest / step))

  def x(k: float) -> float:
    return _LEFT + (k - bins[0] + 0.5) / len(bins) * (_WIDTH - _LEFT - _RIGHT)

  def y(loss: float) -> float:
    return _HEIGHT - _BOTTOM - loss / (ticks * step) * (_HEIGHT - _TOP - _BOTTOM)

  for tick in range(ticks + 1):
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
