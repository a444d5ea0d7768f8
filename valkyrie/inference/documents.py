"""Documents that were read, with carries from which a changed document is continued; their files.

A file of a carry or a document is only valid with what made it, see `carry_origin`.
"""

from collections.abc import Mapping
import json
import os
import pathlib
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from valkyrie.errors import ConfigurationError, StorageError, write_errors
from valkyrie.inference import kept_carries
from valkyrie.inference.carry_origin import FIELDS, digest_of
from valkyrie.inference.reader import Reader, TextCarry
from valkyrie.storage import owned
from valkyrie.types import Array, Carry, Params
from valkyrie.weights import tensor_writer
from valkyrie.weights.tensor_files import TensorFile, name_of_dtype

_MOST_ROWS = 2**20
_CONTENT = 'sha256'  # the field with the digest of the leaves, in the metadata of a file


class Document(NamedTuple):
  """A text that was read from its start. Can be used wherever a `TextCarry` is accepted.

  Carries are kept after 1, 2, 4, 8, ... chunks, as many before the last whole one, and after it:
  about 2 log2 of their number. To reuse the first p of N tokens, which another document shares, at
  most p / 2 tokens are read again, or N - p and a chunk. The chunks are the same as if the other
  document were read from its start.

  Attributes, besides those of `TextCarry`:
    tokens: int32 [N].
    kept: by the number of tokens read, a multiple of the chunk size; see `kept_carries`.
  """

  carry: Carry
  position: Array
  hidden: Array
  tokens: np.ndarray
  kept: Mapping[int, TextCarry]

  def after(self, place: int) -> TextCarry:
    """A copy of the carry after so many tokens, one of those that are kept."""
    return kept_carries.whole(_copy(self.kept[place]), TextCarry(*self[:3]))


AnyCarry = TextCarry | Document


def read_document(
  reader: Reader,
  params: Params,
  tokens: np.ndarray,
  like: Document | None = None,
) -> Document:
  """Reads the tokens [N] of a document, from the nearest carry that it shares with another one."""
  size = reader.chunk_size
  kept: dict[int, TextCarry] = {}
  if like is not None:
    shared = _shared(tokens, like.tokens)
    for place, carry in like.kept.items():
      if place <= shared:
        kept[place] = carry
  place = max(kept, default=0)
  carry = like.after(place) if like is not None and kept else reader.fresh(1)
  longest = reader.model.about.max_context
  chunks = len(tokens) // size
  last = chunks * size
  steps = {size << power for power in range(chunks.bit_length())}
  before_last = {last - step for step in steps}
  marks = steps | before_last | {last}

  def keep(end: int, carry: TextCarry) -> None:
    if end in marks:
      kept[end] = _copy(kept_carries.kept(carry, longest))

  unread = tokens[place:]
  carry = reader.read(params, carry, [unread], begin=place, passed=keep)
  # The other document kept none at some of these marks: the nearest carry before replaces it.
  nearest: set[int] = set()
  for mark in marks:
    before_mark = [place for place in kept if place <= mark]
    if before_mark:
      nearest.add(max(before_mark))
  by_place = {place: kept[place] for place in sorted(nearest)}
  return Document(*carry, tokens, by_place)


def _shared(tokens: np.ndarray, others: np.ndarray) -> int:
  """The number of tokens at the start of two texts that are equal."""
  length = min(len(tokens), len(others))
  differs = tokens[:length] != others[:length]
  differing = np.flatnonzero(differs)
  if not len(differing):
    return length
  return int(differing[0])


def _copy(carry: TextCarry) -> TextCarry:
  """A copy of a carry, since the reader overwrites its argument."""
  return jax.tree.map(jnp.copy, carry)


def save(path: pathlib.Path, carry: AnyCarry, origin: Mapping[str, str]) -> None:
  """Writes a new safetensors file; raises a StorageError if it exists or cannot be written."""
  if os.path.lexists(path):
    raise StorageError(f'{path} is there already. Name another file, or delete it.')
  leaves = {}
  for name, leaf in _named_leaves(carry).items():
    leaves[name] = np.asarray(leaf)
  metadata = {**origin, _CONTENT: digest_of(leaves)}
  failure = write_errors(f'{path} cannot be written', 'name another file')
  with failure, owned.temporary_folder(path) as folder:
    file = folder / path.name
    arrays = tensor_writer.of_arrays(leaves)
    tensor_writer.write_file(file, arrays, metadata)
    owned.move(file, path)


def load(path: pathlib.Path, reader: Reader, origin: Mapping[str, str]) -> AnyCarry:
  """Reads a file with this origin, for this reader; for errors see `load_carry`."""
  file = TensorFile(path, 'file of a carry', 'Read the text again.')
  forms = {}
  for name, tensor in file.tensors.items():
    forms[name] = (tensor.shape, tensor.dtype)
  like = _form(reader, file)
  expected = {}
  for name, leaf in _named_leaves(like).items():
    expected[name] = (leaf.shape, name_of_dtype(leaf.dtype))
  file_origin = {name: file.metadata[name] for name in FIELDS if name in file.metadata}
  if file_origin != origin or forms != expected:
    raise ConfigurationError(
      f'{path} was saved with other weights, tokenizer, first carry or bindings '
      f'({json.dumps(file.metadata):.400}) than the loaded ones ({json.dumps(origin):.400}), or '
      'by a model of other sizes. Read the text again.'
    )
  arrays = {}
  for name, tensor in file.tensors.items():
    arrays[name] = tensor.whole()
  digest = digest_of(arrays)
  recorded_digest = file.metadata.get(_CONTENT, digest)
  if recorded_digest != digest:  # files of earlier versions have no digest
    raise StorageError(f'{path} is damaged: its content has another digest. Read the text again.')
  leaves = []
  for name in _named_leaves(like):
    if name == 'tokens':
      leaves.append(arrays[name])
    else:
      leaves.append(jnp.asarray(arrays[name]))
  structure = jax.tree.structure(like)
  return jax.tree.unflatten(structure, leaves)


def _form(reader: Reader, file: TensorFile) -> Any:
  """The shapes of the carry or document that a file with these names has, by this reader."""
  rows = 1
  position = file.tensors.get('position')
  if position is not None and len(position.shape) == 1:
    (positions,) = position.shape
    if positions < _MOST_ROWS:
      rows = positions
  carry: Any = _fresh(reader, rows)
  if 'tokens' not in file.tensors:
    return carry
  kept_carry = kept_carries.kept(carry, reader.model.about.max_context)
  kept = {}
  for name in file.tensors:
    match = re.match(r'kept\.(\d{1,18})\.', name)
    if match:
      place = int(match[1])
      kept[place] = kept_carry
  shape = file.tensors['tokens'].shape
  tokens: Any = jax.ShapeDtypeStruct(shape, np.int32)
  return Document(*carry[:3], tokens=tokens, kept=kept)


def _fresh(reader: Reader, rows: int) -> TextCarry:
  """The shapes of a carry of so many rows."""
  return jax.eval_shape(lambda: reader.fresh(rows))


def check(carry: AnyCarry, reader: Reader) -> None:
  """Raises a ConfigurationError if a model of other sizes has made the carry."""
  expected = _fresh(reader, len(carry.position))
  text_carry = TextCarry(*carry[:3])
  if _sizes(text_carry) != _sizes(expected):
    raise ConfigurationError(
      'The carry was made by a model of other sizes. Read the text again with the run that goes on.'
    )


def _sizes(carry: Any) -> dict[str, Any]:
  leaves = _named_leaves(carry)
  return {name: (leaf.shape, leaf.dtype) for name, leaf in leaves.items()}


def _named_leaves(carry: AnyCarry) -> dict[str, Array]:
  leaves = {}
  for path, leaf in jax.tree.leaves_with_path(carry):
    name = jax.tree_util.keystr(path, simple=True, separator='.')
    leaves[name] = leaf
  return leaves
