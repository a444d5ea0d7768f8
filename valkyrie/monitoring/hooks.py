"""Actions at some steps of a run: hooks, and profiles."""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import os
import pathlib
from typing import Any, Protocol

import jax

from valkyrie.errors import ConfigurationError


class Hook(Protocol):
  """An action after a step. `step` counts completed steps: it is 1 after the first one."""

  def __call__(self, step: int, state: Any, metrics: Any) -> Mapping[str, float | str] | None:
    """Reads the state and metrics of a step from the devices, and changes neither.

    The numbers and texts that it returns are logged with the next line of training, as
    'hooks/NAME'. If a hook has the method `pauses(step)`, the speed leaves out the calls for which
    it returns True.
    """


class Every:
  """A hook that calls another hook when a multiple of n was reached or passed since its last call.

  The hook is also called once after the last step of the run. A run that resumes after `start_step`
  steps makes the same calls as an uninterrupted one.
  """

  def __init__(self, n: int, hook: Hook, *, total_steps: int, start_step: int = 0):
    check_every(n)
    self._n, self._hook, self._total_steps, self._seen = n, hook, total_steps, start_step

  def pauses(self, step: int) -> bool:
    """Whether the other hook is called after this step."""
    passed = step // self._n > self._seen // self._n
    return passed or self._seen < self._total_steps <= step

  def __call__(self, step: int, state: Any, metrics: Any) -> None:
    is_due = self.pauses(step)
    self._seen = max(self._seen, step)
    if is_due:
      self._hook(step, state, metrics)


def check_every(n: int) -> None:
  """Raises a ConfigurationError if n is not a valid number of steps between two calls."""
  if n < 1:
    raise ConfigurationError(
      f'An interval is set to every {n} steps. Use at least 1, or more than train_steps for one '
      'call at the end.'
    )


class Profile:
  """Writes a profile of some steps to model_dir/profile, for TensorBoard and xprof."""

  def __init__(self, model_dir: str | os.PathLike, steps: tuple[int, int] | None):
    """Takes the numbers, from 1, of the first and the last step; None profiles nothing."""
    self._place = pathlib.Path(model_dir) / 'profile'
    self._first, self._last = steps or (0, -1)
    self._is_running, self._running = False, contextlib.ExitStack()
    if steps is not None and not 1 <= self._first <= self._last:
      raise ConfigurationError(
        f'train.profile_steps={steps}: give the first and the last step to profile, such as (10, '
        '12). Step 1 is the first.'
      )

  @contextlib.contextmanager
  def step(self, number: int, untimed: Callable) -> Iterator[None]:
    """Surrounds the dispatch of step `number`; `untimed` surrounds all steps of the profile."""
    if self._first <= number <= self._last and not self._is_running:
      self._is_running = True
      self._running.enter_context(untimed())
      jax.profiler.start_trace(self._place)
      self._running.callback(jax.profiler.stop_trace)
      self._running.callback(lambda: jax.block_until_ready(jax.live_arrays()))
    yield
    if number == self._last:
      self.close()

  def close(self) -> None:
    """Waits for the devices and writes the profile, if one was started."""
    self._running.close()
