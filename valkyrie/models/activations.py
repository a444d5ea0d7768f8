"""Intermediate values of a model, for analysis: recorded where they arise, by kind."""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import contextvars

from valkyrie.errors import ConfigurationError
from valkyrie.sharding import scopes
from valkyrie.types import Array

# Of a block, [B, T, D]: what its mixers add to the residual stream, what its MLP adds, and the
# stream after it.
KINDS = ('mixers', 'mlp', 'stream')

_wanted: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar('wanted', default=())
_recorded: contextvars.ContextVar[dict[str, list[Array]] | None]
_recorded = contextvars.ContextVar('recorded', default=None)


def wanted(kinds: Sequence[str]) -> contextlib.AbstractContextManager:
  """Lets the model that is traced inside return these kinds, see `Features.activations`.

  Raises:
    ConfigurationError: a kind is unknown.
  """
  if unknown := [kind for kind in kinds if kind not in KINDS]:
    raise ConfigurationError(
      f'There are no activations of the kind {unknown[0]!r}. Use {", ".join(KINDS)}.'
    )
  return scopes.within(_wanted, tuple(kinds))


@contextlib.contextmanager
def recorded() -> Iterator[dict[str, list[Array]]]:
  """The wanted values that are recorded inside, of each kind in their order."""
  found: dict[str, list[Array]] = {kind: [] for kind in _wanted.get()}
  with scopes.within(_recorded, found):
    yield found


def record(kind: str, value: Callable[[], Array]) -> None:
  """Computes and records a value, if its kind is wanted."""
  found = _recorded.get()
  if found is not None and kind in found:
    found[kind].append(value())
