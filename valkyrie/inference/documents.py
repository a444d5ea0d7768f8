"""Documents that were read, with the carries from which a changed document is read on; their files.

A file of a carry or a document is only for the weights and the tokenizer that made it.
"""

from collections.abc import Mapping
import json
import pathlib
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from valkyrie.errors import ConfigurationError, StorageError, storage_errors
from valkyrie.inference.reader import Reader, TextCarry
from valkyrie.types import Array, Carry, Params
from valkyrie.weights import named_tensors


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
  for end in sorted(mark for mark in marks if place < mark <= last):
    carry = reader.read(params, carry, [tokens[place:end]])
    kept[end], place = _copy(carry), end
  carry = reader.read(params, carry, [tokens[place:]])
  # Some marks lie where the other document was read without one: the carry before stands for it.
  near = {max((at for at in kept if at <= mark), default=0) for mark in marks} - {0}
  return Document(*carry, tokens, {at: kept[at] for at in sorted(near)})


def _copy(carry: TextCarry) -> TextCarry:
  """The reader overwrites what it is given."""
  return jax.tree.map(jnp.copy, carry)


def save(path: pathlib.Path, carry: AnyCarry, origin: Mapping[str, str]) -> None:
  """Writes a new safetensors file; raises a StorageError if it exists or cannot be written."""
  if path.exists():
    raise StorageError(f'{path} is there already. Name another file, or delete it.')
  leaves = {name: np.asarray(leaf) for name, leaf in _named_leaves(carry).items()}
  with storage_errors(f'{path} cannot be written'):
    unfinished = path.with_name(f'.{path.name}.new')
    named_tensors.write(unfinished, leaves, {**origin})
    unfinished.replace(path)


def load(path: pathlib.Path, reader: Reader, origin: Mapping[str, str]) -> AnyCarry:
  """Reads what was written with this origin, for this reader; for errors see `load_carry`."""
  try:
    with safe_open(path, 'numpy') as file:
      made_by = file.metadata() or {}
      found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, no mapping
  except (OSError, SafetensorError) as error:
    raise StorageError(f'{path} is not a complete file of a carry ({error}).') from error
  like: Any = reader.fresh(np.size(found.get('position', 0)))
  if 'tokens' in found:
    kept = {int(n.split('.')[1]): like for n in found if re.match(r'kept\.\d{1,18}\.', n)}
    like = Document(*like[:3], tokens=found['tokens'], kept=kept)
  if {name: made_by.get(name) for name in origin} != origin or _sizes(found) != _sizes(like):
    raise ConfigurationError(
      f'{path} was saved with other weights or tokenizer ({json.dumps(made_by)}) than the '
      f'loaded ones ({json.dumps(origin)}), or by a model of other sizes. Read the text again.'
    )
  leaves = [found[n] if n == 'tokens' else jnp.asarray(found[n]) for n in _named_leaves(like)]
  return jax.tree.unflatten(jax.tree.structure(like), leaves)


def check(carry: AnyCarry, reader: Reader) -> None:
  """Raises a ConfigurationError if a model of other sizes has made the carry."""
  own = jax.eval_shape(lambda: reader.fresh(len(carry.position)))
  if _sizes(TextCarry(*carry[:3])) != _sizes(own):
    raise ConfigurationError(
      'The carry was made by a model of other sizes. Read the text again with the run that goes on.'
    )


def _sizes(carry: Any) -> dict[str, Any]:
  return {name: (leaf.shape, leaf.dtype) for name, leaf in _named_leaves(carry).items()}


def _named_leaves(carry: AnyCarry) -> dict[str, Array]:
  leaves, _ = jax.tree_util.tree_flatten_with_path(carry)
  return {jax.tree_util.keystr(path, simple=True, separator='.'): leaf for path, leaf in leaves}
