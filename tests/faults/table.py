"""The table of faults: a row has a fault, its promise, and the number of kept promises."""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
from typing import Any, NamedTuple


class Trial(NamedTuple):
  """One injection.

  what: the injection, such as '1.31 s after a start'.
  failure: the reason why the promise was not kept; None if it was kept.
  cost: a number in the unit of the row.
  """

  what: str
  failure: str | None = None
  cost: float | None = None


class Unavailable(Exception):
  """This machine cannot inject the fault, with the reason as the message."""


@dataclasses.dataclass(frozen=True)
class Fault:
  """A row of the table; `inject(harness, times)` yields a Trial for each injection."""

  name: str
  promise: str
  inject: Callable[[Any, int], Iterator[Trial]]
  full: int
  short: int
  unit: str
  cores: int = 1  # that its runs need


FAULTS: list[Fault] = []


def fault(
  name: str, promise: str, *, full: int, short: int = 0, unit: str = '', cores: int = 1
) -> Callable:
  """Registers a function as a row, with its numbers of injections in both forms of the table."""

  def register(inject: Callable) -> Callable:
    FAULTS.append(Fault(name, promise, inject, full, short, unit, cores))
    return inject

  return register


def summary(row: Fault, trials: list[Trial], seconds: float) -> dict[str, Any]:
  """The results of a row."""
  costs = [trial.cost for trial in trials if trial.cost is not None]
  return {
    'fault': row.name,
    'injected': len(trials),
    'promise': row.promise,
    'kept': sum(trial.failure is None for trial in trials),
    'worst': f'{max(costs):.3g} {row.unit}' if costs else '',
    'seconds': round(seconds, 1),
    'broken': [f'{trial.what}: {trial.failure}' for trial in trials if trial.failure is not None],
  }


def markdown(
  rows: Sequence[dict[str, Any]],
  names: Sequence[str] = ('fault', 'injected', 'promise', 'kept', 'worst'),
) -> str:
  """The table in Markdown."""
  lines = ['| ' + ' | '.join(names) + ' |', '| --- ' * len(names) + '|']
  for row in rows:
    values = {**row, 'kept': row.get('unavailable') or row['kept']}
    lines.append('| ' + ' | '.join(str(values[name]) for name in names) + ' |')
  return '\n'.join(lines)
