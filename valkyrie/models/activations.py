"""Intermediate values of a model, for analysis: recorded where they arise, by kind."""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import contextvars

from valkyrie.errors import ConfigurationError
from valkyrie.types import Array

# Of a block, [B, T, D]: what its mixers add to the residual stream, what its MLP adds, and the
# stream after it.
KINDS = ('mixers', 'mlp', 'stream')

_wanted: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar('wanted', default=())
_recorded: contextvars.ContextVar[dict[str, list[Array]] | None]
_recorded = contextvars.ContextVar('recorded', default=None)


@contextlib.contextmanager
def wanted(kinds: Sequence[str]) -> Iterator[None]:
  """Lets the model that is traced inside return these kinds, see `Features.activations`.

  Raises:
    ConfigurationError: a kind is unknown.
  """
  if unknown := [kind for kind in kinds if kind not in KINDS]:
    raise ConfigurationError(
      f'There are no activations of the kind {unknown[0]!r}. Use {", ".join(KINDS)}.'
    )
  token = _wanted.set(tuple(kinds))
  try:
    yield
  finally:
    _wanted.reset(token)


@contextlib.contextmanager
def recorded() -> Iterator[dict[str, list[Array]]]:
  """The wanted values that are recorded inside, of each kind in their order."""
  found: dict[str, list[Array]] = {kind: [] for kind in _wanted.get()}
  token = _recorded.set(found)
  try:
    yield found
  finally:
    _recorded.reset(token)


def record(kind: str, value: Callable[[], Array]) -> None:
  """Computes and records a value, if its kind is wanted."""
  found = _recorded.get()
  if found is not None and kind in found:
    found[kind].append(value())
