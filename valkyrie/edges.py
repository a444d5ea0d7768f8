"""Assertions of chex about what mixers, terms, metrics and feeds return."""

from collections.abc import Iterator
import contextlib
from typing import Any

import chex
import jax
import jax.numpy as jnp

from valkyrie.errors import ConfigurationError, ValkyrieError


@contextlib.contextmanager
def asserted(
  message: str, advice: str, kind: type[ValkyrieError] = ConfigurationError
) -> Iterator[None]:
  """Raises KIND('MESSAGE (what chex says). ADVICE') for an assertion of chex that fails inside."""
  try:
    yield
  except AssertionError as error:
    reason = ' '.join(str(error).split()).rstrip('.')
    raise kind(f'{message} ({reason}). {advice}') from error


def assert_same_form(found: Any, expected: Any) -> None:
  """Asserts that two pytrees have the same structure, and leaves of the same shapes and dtypes."""
  chex.assert_trees_all_equal_shapes_and_dtypes(_forms(found), _forms(expected))


def described(tree: Any) -> Any:
  """The pytree with 'float32[2, 8]' and the like in place of its leaves, for messages."""
  return jax.tree.map(lambda leaf: f'{jnp.result_type(leaf)}{list(jnp.shape(leaf))}', tree)


def _forms(tree: Any) -> Any:
  return jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)), tree
  )
