"""Tables of names: the tensors of a class of models in another program, and ours.

An `Entry` says where the values of one of our tensors are there, and in which form. The same
entries read a folder, without loading anything, and write one. A `#` in a name is the number of a
layer:

    entry('layers.#.mlp.gate', MATRIX, 'model.layers.#.mlp.gate_proj.weight')

Our tensor may be several of theirs side by side, or some rows of one. Of several spellings the
first one that a folder has is read, and the first one is written.
"""

from collections.abc import Iterable, Mapping, Sequence
import itertools
import re
from typing import Any, NamedTuple

from valkyrie.errors import ConfigurationError
from valkyrie.weights import forms, listing
from valkyrie.weights.forms import Form, Ranges
from valkyrie.weights.tensor_files import Tensor

_LAYER = re.compile(r'(?<=layers\.)(0|[1-9]\d{0,7})(?=\.)')


class Piece(NamedTuple):
  """A tensor there, or some of its rows.

  rows: the ranges of its rows that are columns of ours, in our order; None for all.
  width: the number of its rows, where other tensors stand beside it in ours.
  """

  name: str
  rows: Ranges | None = None
  width: int | None = None


class Entry(NamedTuple):
  """One of our tensors, and its spellings there, each of pieces side by side."""

  ours: str
  form: Form
  spellings: Sequence[Sequence[Piece]]


class Names(NamedTuple):
  """The tensors of a model.

  Attributes:
    shared: the entries outside of layers.
    layers: {kind of a layer: its entries}.
    kinds: the kind of each layer.
    skipped: patterns of names there that no model here uses.
    closed: whether a tensor of another name is refused; in an open table it keeps its name. A layer
      that `kinds` lacks is refused in both.
  """

  shared: Sequence[Entry]
  layers: Mapping[str, Sequence[Entry]]
  kinds: Sequence[str]
  skipped: Sequence[str] = ()
  closed: bool = True

  def entries(self, layer: str) -> Sequence[Entry]:
    """The entries of the layer with this number, or those outside of layers for ''."""
    if not layer:
      return self.shared
    number = int(layer)
    if number >= len(self.kinds):
      return ()
    kind = self.kinds[number]
    return self.layers[kind]

  @property
  def in_layers(self) -> frozenset[str]:
    """The names there, with # for a number, of all tensors of layers of any kind."""
    entries = itertools.chain.from_iterable(self.layers.values())
    spellings = itertools.chain.from_iterable(one.spellings for one in entries)
    return frozenset(piece.name for piece in itertools.chain.from_iterable(spellings))


class Renamed(NamedTuple):
  """The tensors of a folder by our names, and the names there of those that are skipped."""

  tensors: dict[str, Tensor]
  skipped: Sequence[str] = ()


def entry(ours: str, form: Form, *theirs: str) -> Entry:
  """The entry of a tensor that is a whole one there, under the first of these names."""
  spellings = [[Piece(name)] for name in theirs]
  return Entry(ours, form, spellings)


def read(names: Names, tensors: Mapping[str, Tensor]) -> Renamed:
  """Their tensors by our names; nothing is loaded yet.

  Raises a ConfigurationError if two tensors would have one name, if no entry names some rows of a
  tensor, if a layer has a number that the model lacks, or if a closed table does not know a tensor.
  """
  found: dict[str, Tensor] = {}
  used: set[str] = set()
  for layer, group in _by_layer(tensors).items():
    rows: dict[str, list[tuple[int, int]]] = {}
    for one in names.entries(layer):
      pieces = _spelling(one, layer, group)
      if pieces:
        parts = [_part(one.form, piece, group[piece.name]) for piece in pieces]
        name = _numbered(one.ours, layer)
        found[name] = forms.side_by_side(parts)
      for piece in pieces:
        rows_of_piece = _rows(piece, group[piece.name])
        rows.setdefault(piece.name, []).extend(rows_of_piece)
    for name, ranges in rows.items():
      numbered_name = _numbered(name, layer)
      _check_rows(numbered_name, group[name], ranges)
      used.add(numbered_name)
  left = {name: tensor for name, tensor in tensors.items() if name not in used}
  skipped = [name for name in left if _matches(name, names.skipped)]
  others = {name: left[name] for name in left if name not in skipped}
  _check_layers(names, others)
  if names.closed and others:
    raise ConfigurationError(
      f'The source has {len(others)} tensors that Valkyrie does not know in this class of models, '
      f'or twice under two names:\n{listing.lines(sorted(others))}\nFetch the weights again, or '
      'write the model in gin and name its tensors in InitialWeights.rules: see "Names and rules" '
      'in docs/finetune.md.'
    )
  for name in others:
    if name in found:
      raise ConfigurationError(
        f'Two tensors of the source become {name!r:.80}; the second one has the name '
        f'{name!r:.80} there. Remove the tensor that does not count.'
      )
  return Renamed(found | others, sorted(skipped))


def written(names: Names, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
  """Tensors by our names, by theirs and in their form; nothing is loaded yet.

  A tensor without an entry keeps its name.
  """
  result: dict[str, Tensor] = {}
  parts: dict[str, list[tuple[Ranges, Tensor]]] = {}
  form_of: dict[str, Form] = {}
  for layer, group in _by_layer(tensors).items():
    entries = {one.ours: one for one in names.entries(layer)}
    for ours, tensor in group.items():
      if ours not in entries:
        result[_numbered(ours, layer)] = tensor
        continue
      one = entries[ours]
      begin = 0
      for piece in one.spellings[0]:
        width = _width(piece, tensor)
        theirs = _numbered(piece.name, layer)
        form_of[theirs] = one.form
        end = begin + width
        part = forms.columns(tensor, [(begin, end)])
        rows = piece.rows or [(0, width)]
        parts.setdefault(theirs, []).append((rows, part))
        begin = end
  for name, pieces in parts.items():
    joined = _joined(pieces)
    result[name] = form_of[name].write(joined)
  return result


def joint(names: Names, tensors: Mapping[str, Any]) -> dict[str, dict[str, Form]]:
  """{a tensor there: {each of our tensors that has rows of it: its form}}."""
  result: dict[str, dict[str, Form]] = {}
  for layer, group in _by_layer(tensors).items():
    for one in names.entries(layer):
      if one.ours not in group:
        continue
      ours = _numbered(one.ours, layer)
      for piece in one.spellings[0]:
        theirs = _numbered(piece.name, layer)
        form_of = result.setdefault(theirs, {})
        form_of[ours] = one.form
  return result


def _by_layer(tensors: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
  """{number of a layer, or '': {name with # in its place: tensor}}."""
  groups: dict[str, dict[str, Any]] = {}
  for name, tensor in tensors.items():
    match = _LAYER.search(name)
    number = ''
    if match is not None:
      number = match[0]
    group = groups.setdefault(number, {})
    general_name = _LAYER.sub('#', name)
    group[general_name] = tensor
  return groups


def _numbered(name: str, layer: str) -> str:
  return name.replace('#', layer)


def _matches(name: str, patterns: Iterable[str]) -> bool:
  return any(re.fullmatch(pattern, name) for pattern in patterns)


def _check_layers(names: Names, others: Iterable[str]) -> None:
  """Raises a ConfigurationError if tensors without an entry are of layers that the model lacks."""
  in_layers = names.in_layers
  count = len(names.kinds)
  beyond = []
  for name in others:
    match = _LAYER.search(name)
    if match is not None and int(match[0]) >= count and _LAYER.sub('#', name) in in_layers:
      beyond.append(name)
  if beyond:
    raise ConfigurationError(
      f'The source has {len(beyond)} tensors of other layers than the {count} of its config.json:\n'
      f'{listing.lines(sorted(beyond))}\nFetch config.json and the weights again, from one place. '
      'To begin from the first layers of a model, keep its config.json, and bind a smaller '
      'LanguageModel.layers.'
    )


def _spelling(one: Entry, layer: str, group: Mapping[str, Tensor]) -> Sequence[Piece]:
  """The pieces of the first spelling that a folder has; none without one.

  Raises a ConfigurationError if a folder has some pieces of a spelling.
  """
  for number, pieces in enumerate(one.spellings):
    present = [piece for piece in pieces if piece.name in group]
    is_whole = len(present) == len(pieces)
    if is_whole and (number == 0 or _fit(pieces, group)):
      return pieces
    if present and not is_whole:
      absent = [piece for piece in pieces if piece not in present]
      missing = [_numbered(piece.name, layer) for piece in absent]
      raise ConfigurationError(
        f'The source has {_numbered(present[0].name, layer)}, but lacks {", ".join(missing)}. '
        'Fetch the whole folder again.'
      )
  return ()


def _fit(pieces: Sequence[Piece], group: Mapping[str, Tensor]) -> bool:
  """Whether the tensors have the rows of the pieces."""
  for piece in pieces:
    tensor = group[piece.name]
    last = max(stop for _, stop in _rows(piece, tensor))
    if last > _count(tensor):
      return False
  return True


def _part(form: Form, piece: Piece, theirs: Tensor) -> Tensor:
  """A piece in our form."""
  tensor = form.read(theirs)
  if piece.rows is None:
    return tensor
  return forms.columns(tensor, piece.rows)


def _rows(piece: Piece, theirs: Tensor) -> Ranges:
  """The rows that a piece uses."""
  if piece.rows is None:
    return [(0, _count(theirs))]
  return piece.rows


def _count(theirs: Tensor) -> int:
  if not theirs.shape:
    return 1
  return theirs.shape[0]


def _check_rows(name: str, tensor: Tensor, ranges: Ranges) -> None:
  """Raises a ConfigurationError unless the ranges are all rows of a tensor, each once."""
  place = 0
  for start, stop in sorted(ranges):
    if start != place:
      break
    place = stop
  rows = _count(tensor)
  expected = max(stop for _, stop in ranges)
  if place != expected or rows != expected:
    raise ConfigurationError(
      f'The tensor {name!r:.80} of the source has {rows:,} rows, but its configuration says '
      f'{expected:,}. Fetch the whole folder again.'
    )


def _width(piece: Piece, tensor: Tensor) -> int:
  """The columns of our tensor that are a piece."""
  if piece.rows is not None:
    counts = [stop - start for start, stop in piece.rows]
    return sum(counts)
  if piece.width is not None:
    return piece.width
  if not tensor.shape:
    return 1
  return tensor.shape[-1]


def _joined(pieces: Sequence[tuple[Ranges, Tensor]]) -> Tensor:
  """Their tensor in our form, from parts [..., F] and the rows there that their columns are."""
  if len(pieces) == 1:
    return pieces[0][1]
  found = []  # (the first row there, the range of these columns in the parts side by side)
  place = 0
  for rows, _ in pieces:
    for start, stop in rows:
      end = place + stop - start
      found.append((start, (place, end)))
      place = end
  in_their_order = [columns for _, columns in sorted(found)]
  parts = [part for _, part in pieces]
  return forms.columns(forms.side_by_side(parts), in_their_order)
