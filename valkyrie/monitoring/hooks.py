"""Periodic actions of a run: logging, evaluation, checkpoints."""

from collections.abc import Mapping
from typing import Any, Protocol

from valkyrie.errors import ConfigurationError


class Hook(Protocol):
  """An action after a step. `step` counts completed steps: it is 1 after the first one."""

  def __call__(self, step: int, state: Any, metrics: Any) -> Mapping[str, float | str] | None:
    """Reads the state and metrics of a step from the devices, and changes neither.

    The numbers and texts that it returns are logged with the next line of training, as
    'hooks/NAME'.
    """


class Every:
  """A hook that calls another hook when a multiple of n was reached or passed since its last call.

  Step numbers may have gaps, e.g. where one call covers several steps. The last step of the run
  always counts, once. A resumed run makes the same calls as an uninterrupted one.
  """

  def __init__(self, n: int, hook: Hook, *, total_steps: int, start_step: int = 0):
    """Starts to count after `start_step`, the number of steps completed by earlier processes."""
    check_every(n)
    self._n, self._hook, self._total_steps, self._seen = n, hook, total_steps, start_step

  def __call__(self, step: int, state: Any, metrics: Any) -> None:
    passed = step // self._n > self._seen // self._n
    ended = self._seen < self._total_steps <= step
    self._seen = max(self._seen, step)
    if passed or ended:
      self._hook(step, state, metrics)


def check_every(n: int) -> None:
  """Raises a ConfigurationError if n is not a valid number of steps between two calls."""
  if n < 1:
    raise ConfigurationError(
      f'An interval is set to every {n} steps. Use at least 1, or more than train_steps for one '
      'call at the end.'
    )
