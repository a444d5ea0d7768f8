"""Profiles of chosen steps, by the profiler of jax; TensorBoard and xprof show them."""

from collections.abc import Iterator
import contextlib
import os
import pathlib

import jax

from valkyrie.errors import ConfigurationError


class Profile:
  """Writes the profile of the steps `first` to `last` to model_dir/profile."""

  def __init__(self, model_dir: str | os.PathLike, steps: tuple[int, int] | None):
    """Takes the numbers, from 1, of the first and the last step; None profiles nothing.

    Raises:
      ConfigurationError: they are no range of steps.
    """
    self._place = pathlib.Path(model_dir) / 'profile'
    self._first, self._last = steps or (0, -1)
    self._running = False
    if steps is not None and not 1 <= self._first <= self._last:
      raise ConfigurationError(
        f'train.profile_steps={steps}: give the first and the last step to profile, such as (10, '
        '12). Step 1 is the first.'
      )

  @contextlib.contextmanager
  def step(self, number: int) -> Iterator[None]:
    """The dispatch of step `number`; the end of the last profiled one waits for the devices."""
    if self._first <= number <= self._last and not self._running:
      jax.profiler.start_trace(self._place)
      self._running = True
    yield
    if number == self._last:
      self.close()

  def close(self) -> None:
    """Waits for the devices, and writes a profile that was begun."""
    if self._running:
      self._running = False
      jax.block_until_ready(jax.live_arrays())
      jax.profiler.stop_trace()
