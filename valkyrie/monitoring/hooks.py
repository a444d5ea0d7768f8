"""What happens every so many steps: logging, evaluation, checkpoints."""

from typing import Any, Protocol

from valkyrie.errors import ConfigurationError


class Hook(Protocol):
  """Called after a step; `step` counts the steps that are done, so the first call has step 1."""

  def __call__(self, step: int, state: Any, metrics: Any) -> None:
    """Reads the state and metrics of a step, both still on the devices, and changes neither."""
    ...


class Every:
  """A hook that calls another one whenever a multiple of n was reached or passed since last time.

  Steps may skip numbers, as they do where a call covers several. The last step of the run always
  counts, once, and a resumed run does what an uninterrupted one would have done.
  """

  def __init__(self, n: int, hook: Hook, *, total_steps: int, start_step: int = 0):
    """Starts counting after `start_step`, the steps that were done before this process began."""
    check_every(n)
    self._n, self._hook, self._total_steps, self._seen = n, hook, total_steps, start_step

  def __call__(self, step: int, state: Any, metrics: Any) -> None:
    """Calls the hook if it is due."""
    passed = step // self._n > self._seen // self._n
    ended = self._seen < self._total_steps <= step
    self._seen = max(self._seen, step)
    if passed or ended:
      self._hook(step, state, metrics)


def check_every(n: int) -> None:
  """Raises a ConfigurationError where something is to happen every n steps, and n is none."""
  if n < 1:
    raise ConfigurationError(
      f'Something is to happen every {n} steps; give at least 1, or more than train_steps for once '
      'at the end.'
    )
