"""Documents that were read, with the carries from which a changed document is read on; their files.

A file of a carry or a document is only for the weights and the tokenizer that made it.
"""

from collections.abc import Mapping
import hashlib
import json
import os
import pathlib
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from valkyrie.errors import ConfigurationError, StorageError, storage_errors
from valkyrie.inference.reader import Reader, TextCarry
from valkyrie.storage import owned
from valkyrie.types import Array, Carry, Params
from valkyrie.weights import named_tensors
from valkyrie.weights.tensor_files import TensorFile, name_of_dtype

_MOST_ROWS = 2**20
_CONTENT = 'sha256'  # of the leaves, in the metadata of a file


class Document(NamedTuple):
  """A text that was read from its start, and all that a `TextCarry` has; it stands for one.

  Carries are kept after 1, 2, 4, 8, ... chunks, as many before the last whole one, and after it:
  about 2 log2 of their number. Whatever shares its first p of N tokens with this document reads at
  most p / 2 tokens, or N - p and a chunk, again, in the same chunks as if it were read anew.
  """

  carry: Carry
  position: Array
  hidden: Array
  tokens: np.ndarray  # int32 [N]
  kept: Mapping[int, TextCarry]  # by the number of tokens read, a multiple of the chunk size


AnyCarry = TextCarry | Document


def read(
  reader: Reader, params: Params, tokens: np.ndarray, like: Document | None = None
) -> Document:
  """Reads the tokens [N] of a document, from the nearest carry that it shares with another one."""
  size, old = reader.chunk_size, {} if like is None else like.kept
  shared = 0
  if like is not None:
    length = min(len(tokens), len(like.tokens))
    differs = np.flatnonzero(tokens[:length] != like.tokens[:length])
    shared = int(differs[0]) if len(differs) else length
  kept = {place: carry for place, carry in old.items() if place <= shared}
  place = max(kept, default=0)
  carry = _copy(kept[place]) if kept else reader.fresh(1)
  last = len(tokens) // size * size
  steps = {size << power for power in range((last // size).bit_length())}
  marks = steps | {last - step for step in steps} | {last}

  def keep(end: int, carry: TextCarry) -> None:
    if end in marks:
      kept[end] = _copy(carry)

  carry = reader.read(params, carry, [tokens[place:]], begin=place, passed=keep)
  # Some marks lie where the other document was read without one: the carry before stands for it.
  near = {max((at for at in kept if at <= mark), default=0) for mark in marks} - {0}
  return Document(*carry, tokens, {at: kept[at] for at in sorted(near)})


def _copy(carry: TextCarry) -> TextCarry:
  """The reader overwrites what it is given."""
  return jax.tree.map(jnp.copy, carry)


def save(path: pathlib.Path, carry: AnyCarry, origin: Mapping[str, str]) -> None:
  """Writes a new safetensors file; raises a StorageError if it exists or cannot be written."""
  if os.path.lexists(path):
    raise StorageError(f'{path} is there already. Name another file, or delete it.')
  leaves = {name: np.asarray(leaf) for name, leaf in _named_leaves(carry).items()}
  failure = storage_errors(f'{path} cannot be written', 'Name another file, or make room.')
  with failure, owned.temporary_folder(path) as folder:
    named_tensors.write(folder / path.name, leaves, {**origin, _CONTENT: _digest(leaves)})
    owned.move(folder / path.name, path)


def load(path: pathlib.Path, reader: Reader, origin: Mapping[str, str]) -> AnyCarry:
  """Reads what was written with this origin, for this reader; for errors see `load_carry`."""
  file = TensorFile(path, 'file of a carry', 'Read the text again.')
  shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in file.tensors.items()}
  rows = shapes['position'][0] if 'position' in shapes else ()
  like: Any = _fresh(reader, rows[0] if len(rows) == 1 and rows[0] < _MOST_ROWS else 1)
  if 'tokens' in shapes:
    kept = {int(n.split('.')[1]): like for n in shapes if re.match(r'kept\.\d{1,18}\.', n)}
    tokens: Any = jax.ShapeDtypeStruct(shapes['tokens'][0], np.int32)
    like = Document(*like[:3], tokens=tokens, kept=kept)
  expected = {
    name: (leaf.shape, name_of_dtype(leaf.dtype)) for name, leaf in _named_leaves(like).items()
  }
  if {name: file.metadata.get(name) for name in origin} != origin or shapes != expected:
    raise ConfigurationError(
      f'{path} was saved with other weights or tokenizer ({json.dumps(file.metadata):.400}) than '
      f'the loaded ones ({json.dumps(origin)}), or by a model of other sizes. Read the text again.'
    )
  found = {
    name: tensor.read((slice(None),) * len(tensor.shape)) for name, tensor in file.tensors.items()
  }
  # Files of earlier versions have no digest.
  if file.metadata.get(_CONTENT, _digest(found)) != _digest(found):
    raise StorageError(f'{path} is damaged: its content has another digest. Read the text again.')
  leaves = [found[n] if n == 'tokens' else jnp.asarray(found[n]) for n in _named_leaves(like)]
  return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _fresh(reader: Reader, rows: int) -> TextCarry:
  """The shapes of a carry of so many rows."""
  return jax.eval_shape(lambda: reader.fresh(rows))


def _digest(leaves: Mapping[str, np.ndarray]) -> str:
  """SHA-256 of the names and bytes of arrays."""
  digest = hashlib.sha256()
  for name in sorted(leaves):
    digest.update(f'{name}\0'.encode())
    digest.update(np.ascontiguousarray(leaves[name]).tobytes())
  return digest.hexdigest()


def check(carry: AnyCarry, reader: Reader) -> None:
  """Raises a ConfigurationError if a model of other sizes has made the carry."""
  own = _fresh(reader, len(carry.position))
  if _sizes(TextCarry(*carry[:3])) != _sizes(own):
    raise ConfigurationError(
      'The carry was made by a model of other sizes. Read the text again with the run that goes on.'
    )


def _sizes(carry: Any) -> dict[str, Any]:
  return {name: (leaf.shape, leaf.dtype) for name, leaf in _named_leaves(carry).items()}


def _named_leaves(carry: AnyCarry) -> dict[str, Array]:
  leaves, _ = jax.tree_util.tree_flatten_with_path(carry)
  return {jax.tree_util.keystr(path, simple=True, separator='.'): leaf for path, leaf in leaves}
