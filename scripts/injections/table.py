"""The rows of the table: what is injected, what is promised, and whether that was kept."""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
from typing import Any, NamedTuple


class Trial(NamedTuple):
  """One injection.

  what: was done, such as 'killed 1.31 s after its start'; found: what happened instead of what is
  promised, None where the promise was kept; cost: in the unit of the row.
  """

  what: str
  found: str | None = None
  cost: float | None = None


class Unavailable(Exception):
  """This machine cannot inject such a fault; the message says why."""


@dataclasses.dataclass(frozen=True)
class Fault:
  """A row: `inject(laboratory, times)` yields a Trial for each injection."""

  name: str
  promise: str
  inject: Callable[[Any, int], Iterator[Trial]]
  full: int
  short: int
  unit: str


FAULTS: list[Fault] = []


def fault(name: str, promise: str, *, full: int, short: int = 0, unit: str = '') -> Callable:
  """Adds the row of a function; `short` and `full` say how often each form of the table injects."""

  def register(inject: Callable) -> Callable:
    FAULTS.append(Fault(name, promise, inject, full, short, unit))
    return inject

  return register


def summary(row: Fault, trials: list[Trial], seconds: float) -> dict[str, Any]:
  """The numbers of a row."""
  costs = [trial.cost for trial in trials if trial.cost is not None]
  return {
    'fault': row.name,
    'injected': len(trials),
    'promise': row.promise,
    'kept': sum(trial.found is None for trial in trials),
    'worst': f'{max(costs):.3g} {row.unit}' if costs else '',
    'seconds': round(seconds, 1),
    'broken': [f'{trial.what}: {trial.found}' for trial in trials if trial.found is not None],
  }


def markdown(rows: Sequence[dict[str, Any]]) -> str:
  """The table."""
  names = ('fault', 'injected', 'promise', 'kept', 'worst')
  lines = ['| ' + ' | '.join(names) + ' |', '| --- ' * len(names) + '|']
  for row in rows:
    values = {**row, 'kept': row.get('unavailable') or row['kept']}
    lines.append('| ' + ' | '.join(str(values[name]) for name in names) + ' |')
  return '\n'.join(lines)
