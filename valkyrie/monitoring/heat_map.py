"""Pictures of scores over two quantities: a panel of colored cells for each condition."""

from collections.abc import Mapping, Sequence
import pathlib

from PIL import Image, ImageDraw, ImageFont

from valkyrie.errors import storage_errors

Grid = Mapping[tuple[str, str], float]  # (column, row): score from 0 to 1

_CELL = (92, 44)
_LEFT, _TOP, _GAP, _BOTTOM = 110, 76, 28, 40  # margins, in pixels
_LOW, _HIGH = (247, 244, 238), (23, 78, 140)  # colors of 0 and 1


def write(
  path: pathlib.Path,
  title: str,
  panels: Mapping[str, Grid],
  columns: Sequence[str],
  rows: Sequence[str],
) -> None:
  """Draws the panels beside each other; a cell without a score stays empty.

  Args:
    path: of the .png file, which is replaced.
    title: above the panels.
    panels: the grid of each panel, by its name.
    columns, rows: from left to right, and from top to bottom.

  Raises:
    StorageError: the picture cannot be written.
  """
  width, height = _CELL[0] * len(columns), _CELL[1] * len(rows)
  size = (_LEFT + len(panels) * (width + _GAP), _TOP + height + _BOTTOM)
  image = Image.new('RGB', size, 'white')
  draw, font = ImageDraw.Draw(image), ImageFont.load_default(16)
  draw.text((12, 12), title, fill='black', font=font, anchor='lt')
  for number, row in enumerate(rows):
    at = _TOP + (number + 0.5) * _CELL[1]
    draw.text((_LEFT - 10, at), row, fill='black', font=font, anchor='rm')
  for panel, (name, grid) in enumerate(panels.items()):
    left = _LEFT + panel * (width + _GAP)
    draw.text((left, _TOP - 10), name, fill='black', font=font, anchor='ls')
    for x, column in enumerate(columns):
      middle = left + (x + 0.5) * _CELL[0]
      draw.text((middle, _TOP + height + 8), column, fill='black', font=font, anchor='mt')
      for y, row in enumerate(rows):
        if (score := grid.get((column, row))) is None:
          continue
        corner = (left + x * _CELL[0], _TOP + y * _CELL[1])
        box = [corner, (corner[0] + _CELL[0] - 2, corner[1] + _CELL[1] - 2)]
        draw.rectangle(box, fill=color(score))
        ink = 'white' if score > 0.5 else 'black'
        center = (middle - 1, corner[1] + _CELL[1] / 2 - 1)
        draw.text(center, f'{score:.0%}', fill=ink, font=font, anchor='mm')
  with storage_errors(f'{path} cannot be written', 'Make room there.'):
    image.save(path)


def color(score: float) -> tuple[int, ...]:
  """The color of a score from 0 to 1."""
  return tuple(round(low + score * (high - low)) for low, high in zip(_LOW, _HIGH, strict=True))
