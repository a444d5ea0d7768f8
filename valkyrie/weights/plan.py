"""A model as gin bindings: what a configuration of another program becomes."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_LOWERED = '# max_position_embeddings: a run lowers it to its longest document'


class Reference(str):
  """A value that gin reads as it is, such as '@GatedMLP'."""

  __slots__ = ()

  def __repr__(self) -> str:
    return str(self)


class Kind(NamedTuple):
  """The layers that are equal but for their weights: classes of mixers, and bindings."""

  mixers: Sequence[str]
  bindings: Mapping[str, Any]

  @property
  def references(self) -> Reference:
    """The mixers in gin."""
    return references(self.mixers)


class Plan(NamedTuple):
  """A model.

  Attributes:
    shared: {binding: value} of all layers and of the model itself.
    kinds: {name of a kind of layers, which is their scope in gin: what they are}.
    layers: the kind of each layer.
  """

  shared: Mapping[str, Any]
  kinds: Mapping[str, Kind]
  layers: Sequence[str]

  @property
  def bindings(self) -> dict[str, Any]:
    """All bindings but `Block.mixers`; with several kinds, each has its own in its scope."""
    result = dict(self.shared)
    for kind, layer in self.kinds.items():
      for name, value in layer.bindings.items():
        scoped_name = self.scope(kind) + name
        result[scoped_name] = value
    return result

  @property
  def gin_text(self) -> str:
    """A gin file of the model, to be included in a run."""
    blocks = [f'@{self.scope(kind)}Block' for kind in period(self.layers)]
    pattern = _tuple(blocks)
    lines = ["include 'gin/models/defaults.gin'", '', f'LanguageModel.pattern = {pattern}']
    for kind, layer in self.kinds.items():
      lines.append(f'{self.scope(kind)}Block.mixers = {layer.references}')
    for name, value in self.bindings.items():
      line = f'{name} = {value!r}'
      if name.endswith('.max_context'):
        line += f'  {_LOWERED}'
      lines.append(line)
    return '\n'.join(lines) + '\n'

  def scope(self, kind: str) -> str:
    """What precedes the bindings of a kind of layers."""
    if len(self.kinds) > 1:
      return f'{kind}/'
    return ''


def references(classes: Sequence[str]) -> Reference:
  """A tuple of classes in gin."""
  names = [f'@{name}' for name in classes]
  return Reference(_tuple(names))


def _tuple(texts: Sequence[str]) -> str:
  inside = ', '.join(texts)
  if len(texts) == 1:
    inside += ','
  return f'({inside})'


def period(layers: Sequence[str]) -> Sequence[str]:
  """The shortest beginning of a list whose repetition is the list."""
  for length in range(1, len(layers)):
    if _repeats(layers, length):
      return layers[:length]
  return layers


def _repeats(layers: Sequence[str], length: int) -> bool:
  is_multiple = len(layers) % length == 0
  return is_multiple and layers[length:] == layers[:-length]
