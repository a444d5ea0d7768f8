"""Assertions of chex about what mixers, terms, metrics and feeds return."""

from collections.abc import Callable, Iterator
import contextlib
from typing import Any

import chex
import jax
import jax.numpy as jnp

from valkyrie.errors import ConfigurationError, ValkyrieError


@contextlib.contextmanager
def asserted(
  message: Callable[[], str],
  advice: str,
  kind: type[ValkyrieError] = ConfigurationError,
) -> Iterator[None]:
  """Raises KIND('MESSAGE (what chex says). ADVICE') for an assertion of chex that fails inside.

  Only then `message` is called: what is asserted of every batch costs no text.
  """
  try:
    yield
  except AssertionError as error:
    reason = ' '.join(str(error).split()).rstrip('.')
    raise kind(f'{message()} ({reason}). {advice}') from error


def check_carry(owner: str, found: Any, before: Any, model: str) -> None:
  """Raises a ConfigurationError for a carry with another tree, shape or dtype than `before`.

  Args:
    owner: what returned the carry, such as 'The mixer S5'.
    found: the carry that it returned.
    before: the carry that it took.
    model: where a user finds the right form, such as 'initial_carry'.
  """

  def message() -> str:
    return f'{owner} returned the carry {described(found)}, but took {described(before)}'

  with asserted(message, f'Return the same tree, with the same shapes and dtypes as {model}.'):
    chex.assert_trees_all_equal_shapes_and_dtypes(_forms(found), _forms(before))


def described(tree: Any) -> Any:
  """The pytree with 'float32[2, 8]' and the like in place of its leaves, for messages."""

  def form_of(leaf):
    return f'{jnp.result_type(leaf)}{list(jnp.shape(leaf))}'

  return jax.tree.map(form_of, tree)


def _forms(tree: Any) -> Any:
  return jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)), tree
  )
