"""The shapes and dtypes of a state, and how they differ from those of another one."""

import pathlib
from typing import Any

import jax
import numpy as np

from valkyrie import errors
from valkyrie.types import leaves_by_path

_SHOWN = 5  # leaves that differ


def check_same(place: pathlib.Path, stored: Any, target: Any) -> None:
  """Raises a ConfigurationError if the shapes or dtypes of a state are not those of a target."""
  different = differences(stored, target)
  if different:
    lines = '\n  '.join(different)
    raise errors.ConfigurationError(
      f'{place.parent} is a checkpoint of another model. These leaves differ:\n  {lines}\n'
      'Nothing was changed. Use another --model_dir, or the gin file of the checkpoint.'
    )


def differences(stored: Any, target: Any) -> list[str]:
  """A line for each of the first leaves whose shapes or dtypes differ between two pytrees."""
  found = _describe(stored)
  expected = _describe(target)
  lines = []
  for path in found | expected:
    found_form = found.get(path, 'nothing')
    expected_form = expected.get(path, 'nothing')
    if found_form != expected_form:
      lines.append(f'{path}: found {found_form}, expected {expected_form}')
  return errors.first_of(lines, _SHOWN)


def _describe(tree: Any) -> dict[str, str]:
  """{'params/mlp/w': 'float32[4, 8]', ...}; a container without arrays is 'empty'."""

  def is_empty(node):
    if node is None:
      return True
    return isinstance(node, dict | list | tuple) and not node

  forms = {}
  for path, leaf in leaves_by_path(tree, is_empty).items():
    forms[path] = 'empty'
    if not is_empty(leaf):
      dtype = np.dtype(leaf.dtype)
      forms[path] = f'{dtype.name}{list(leaf.shape)}'
  return forms


def shapes(tree: Any) -> Any:
  def shape_of(leaf):
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)

  return jax.tree.map(shape_of, tree)


def without_empty_arrays(tree: Any) -> Any:
  """Replaces arrays without elements, which Orbax refuses to save, by None."""
  return jax.tree.map(lambda leaf: leaf if leaf.size else None, tree)
