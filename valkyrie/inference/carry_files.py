"""Files of carries: a long document is read once."""

import json
import os
import pathlib

import jax
import numpy as np
from safetensors import SafetensorError, safe_open

from valkyrie.errors import ConfigurationError, StorageError, storage_errors
from valkyrie.inference.reader import TextCarry
from valkyrie.weights import tensor_files


def save(path: str | os.PathLike, carry: TextCarry, weights: str) -> None:
  """Writes a carry to a safetensors file, with the fingerprint of the weights that made it.

  Raises:
    StorageError: the file is there already, or cannot be written.
  """
  place = pathlib.Path(path)
  if place.exists():
    raise StorageError(f'{place} is there already. Name another file, or delete it.')
  leaves = {name: np.asarray(leaf) for name, leaf in _named(carry).items()}
  with storage_errors(f'{place} cannot be written'):
    unfinished = place.with_name(f'.{place.name}.new')
    tensor_files.write(unfinished, leaves, {'weights': weights})
    unfinished.replace(place)


def load(path: str | os.PathLike, like: TextCarry, weights: str) -> TextCarry:
  """Reads a carry of the form of `like`, which the same weights have made.

  Raises:
    ConfigurationError: it is of another model, or of another step of it.
    StorageError: the file is missing or not whole.
  """
  try:
    with safe_open(path, 'numpy') as file:
      made_by = (file.metadata() or {}).get('weights')
      found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, no mapping
  except (OSError, SafetensorError) as error:
    raise StorageError(f'{path} is not a whole file of a carry ({error}).') from error
  if made_by != weights:
    raise ConfigurationError(
      f'{path} was made by other weights ({json.dumps(made_by)}) than those loaded '
      f'({json.dumps(weights)}). Read the text again.'
    )
  expected = _named(like)
  if found.keys() != expected.keys() or any(
    found[name].shape != leaf.shape or found[name].dtype != leaf.dtype
    for name, leaf in expected.items()
  ):
    raise ConfigurationError(
      f'{path} is the carry of a model of other sizes. Read the text again with this one.'
    )
  _, tree = jax.tree.flatten(like)
  return jax.tree.unflatten(tree, [jax.numpy.asarray(found[name]) for name in expected])


def _named(carry: TextCarry) -> dict:
  leaves, _ = jax.tree_util.tree_flatten_with_path(carry)
  return {jax.tree_util.keystr(path, simple=True, separator='.'): leaf for path, leaf in leaves}
