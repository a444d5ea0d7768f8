"""Refused steps: loss spikes, detected on the devices, and the budget of a run for refusals."""

from collections import deque
from collections.abc import Callable
import dataclasses
from typing import Annotated, NamedTuple

import gin
import jax.numpy as jnp

from valkyrie.config.computation import may_change_on_resume
from valkyrie.config.ranges import Limit, NonNegativeInt, PositiveInt, Range, check_fields
from valkyrie.errors import ConfigurationError, Diverged, check_choice
from valkyrie.types import Array

ACTIONS = ('accept', 'skip', 'rewind')


class RecentLosses(NamedTuple):
  """The losses of the latest steps, as a ring; part of the train state.

  losses: float32 [window], nats a token; refused steps are among them, NaN losses are not.
  count: int32, losses written so far.
  """

  losses: Array
  count: Array


@gin.configurable
@dataclasses.dataclass(frozen=True)
class LossSpikes:
  """The definition of a spike, and the treatment of its step.

  A spike lies more than `deviations` standard deviations above the mean of the last `window` losses
  (the rule of OLMo-core's SkipStepOptimizer); none is detected before `window` losses exist.
  Refused losses are among them, so a lasting level is accepted after about window / deviations^2
  steps. Only the train state decides, so a resumed run decides the same.

  The action 'accept' ignores spikes. 'skip' refuses the step as one with non-finite numbers.
  'rewind' also restores parameters and optimizer from the last checkpoint that was due, while the
  data continue after the spike (PaLM, Chowdhery et al. 2022, section 5.1); it waits for every step.
  """

  action: str = 'accept'
  deviations: Limit = 6.0
  window: Annotated[int, Range('[2, 2147483647]')] = 128

  def __post_init__(self):
    check_choice('LossSpikes.action', self.action, ACTIONS)
    check_fields(self)

  def initial(self) -> RecentLosses | None:
    """No losses yet; None if none are kept."""
    if self.action == 'accept':
      return None
    losses = jnp.zeros(self.window, jnp.float32)
    count = jnp.zeros((), jnp.int32)
    return RecentLosses(losses, count)


def detect(spikes: LossSpikes, recent: RecentLosses, loss: Array) -> tuple[Array, RecentLosses]:
  """(whether a step's loss is a spike, the losses with this one added if it is finite)."""
  losses, count = recent
  mean = jnp.mean(losses)
  deviation = jnp.std(losses)
  highest = mean + spikes.deviations * deviation
  is_full = count >= spikes.window
  is_high = loss > highest
  spiked = is_full & is_high
  finite = jnp.isfinite(loss)
  place = count % spikes.window
  with_loss = losses.at[place].set(loss)
  latest = jnp.where(finite, with_loss, losses)
  is_spike = spiked & finite
  return is_spike, RecentLosses(latest, count + finite)


@may_change_on_resume()
@gin.configurable(denylist=['skipped', 'describe'])  # pyright: ignore  (gin has no types)
@dataclasses.dataclass
class RefusedSteps:
  """Ends a run in which more than `allowed` of any `window` consecutive steps were refused.

  `skipped` steps were refused so far. `describe` names the documents of a step, counted from 1.
  """

  skipped: int
  describe: Callable[[int], str]
  allowed: NonNegativeInt = 10
  window: PositiveInt = 100

  def __post_init__(self):
    if not 0 <= self.allowed < self.window:
      raise ConfigurationError(
        f'RefusedSteps.allowed={self.allowed} must be at least 0 and below RefusedSteps.window='
        f'{self.window}.'
      )
    self._counts = deque([self.skipped], maxlen=self.window + 1)

  def __call__(self, step: int, skipped: int) -> None:
    """Takes the number of all refused steps after `step`; raises Diverged beyond the budget."""
    self._counts.append(skipped)
    refused = skipped - self._counts[0]
    if refused > self.allowed:
      raise Diverged(
        f'{refused} of the last {len(self._counts) - 1} steps were refused, more than '
        f'RefusedSteps.allowed={self.allowed}. The last was step {step}, which read '
        f'{self.describe(step)}. No checkpoint contains an update of a refused step. Look at these '
        'documents, or run the same command again with a lower learning rate and '
        '--allow_changed=configuration.'
      )
