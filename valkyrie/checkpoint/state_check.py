"""Checks of a train state: finite before a save, and of the same model before a restore."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from valkyrie.errors import ConfigurationError
from valkyrie.types import leaf_path

_SHOWN = 5


def not_finite(state: Any) -> list[str]:
  """The paths of the leaves that hold an infinity or a NaN; waits for the state."""
  leaves = {
    leaf_path(path): leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    if jnp.issubdtype(leaf.dtype, jnp.inexact)
  }
  finite = jax.device_get(_are_finite(leaves))
  return [path for path in leaves if not finite[path]]


@jax.jit
def _are_finite(leaves):
  return {path: jnp.all(jnp.isfinite(leaf)) for path, leaf in leaves.items()}


def check_same_model(place: pathlib.Path, stored: Any, target: Any, partial: bool) -> None:
  """Raises ConfigurationError if names, shapes or dtypes of leaves differ; the message shows them.

  Args:
    place: the directory of the step.
    stored: a pytree of the metadata of the stored arrays.
    target, partial: as in `CheckpointDirectory.restore`.
  """
  if partial:
    stored = {field: tree for field, tree in stored.items() if field in target}
  if different := differences(stored, target):
    raise ConfigurationError(
      f'{place} is a checkpoint of another model. These leaves differ:\n  '
      + '\n  '.join(different)
      + '\nNothing was changed. Use another --model_dir, or the gin file of the checkpoint.'
    )


def differences(stored: Any, target: Any) -> list[str]:
  """A line for each of the first leaves whose shapes or dtypes differ between two pytrees."""
  found, expected = _describe(stored), _describe(target)
  different = [path for path in found | expected if found.get(path) != expected.get(path)]
  lines = [
    f'{path}: found {found.get(path, "nothing")}, expected {expected.get(path, "nothing")}'
    for path in different
  ]
  if len(lines) > _SHOWN:
    lines[_SHOWN:] = [f'and {len(lines) - _SHOWN} more']
  return lines


def _describe(tree: Any) -> dict[str, str]:
  """{'params/mlp/w': 'float32[4, 8]', ...}; a container without arrays is 'empty'."""

  def is_empty(node):
    return node is None or (isinstance(node, dict | list | tuple) and not node)

  return {
    leaf_path(path): 'empty' if is_empty(leaf) else f'{np.dtype(leaf.dtype).name}{list(leaf.shape)}'
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_empty)[0]
  }
