"""Names of tensors in messages."""

from collections.abc import Sequence
import re

from valkyrie.errors import first_of

_SHOWN = 8  # names in a message


def over_layers(tensors: Sequence[str]) -> str:
  """Names in short: 'layers.0-3.mlp.out' for four names."""
  layers_of: dict[str, list[int]] = {}  # by the name, with # for the number of a layer
  for name in tensors:
    match = re.fullmatch(r'layers\.(\d+)\.(.+)', name)
    if match is None:
      layers_of[name] = []
      continue
    number, name_in_layer = match.groups()
    layers = layers_of.setdefault(f'layers.#.{name_in_layer}', [])
    layers.append(int(number))
  texts = []
  for name, layers in layers_of.items():
    text = name
    if layers:
      text = name.replace('#', _ranges(layers))
    texts.append(text)
  return ', '.join(first_of(texts, _SHOWN))


def _ranges(numbers: Sequence[int]) -> str:
  """Numbers in short: '0-3,5'."""
  runs: list[list[int]] = []
  for number in sorted(numbers):
    follows = bool(runs) and number == runs[-1][-1] + 1
    if follows:
      runs[-1].append(number)
    else:
      runs.append([number])
  texts = []
  for first, *others in runs:
    text = str(first)
    if others:
      text += f'-{others[-1]}'
    texts.append(text)
  return ','.join(texts)


def lines(texts: Sequence[str]) -> str:
  indented = [f'  {text}' for text in first_of(texts, _SHOWN)]
  return '\n'.join(indented)
