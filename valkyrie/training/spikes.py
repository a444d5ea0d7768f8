"""Loss spikes: their detection on the devices, and the treatment of their steps."""

import dataclasses
from typing import NamedTuple

import gin
import jax.numpy as jnp

from valkyrie.errors import ConfigurationError
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
  steps. The decision depends only on the train state, so a resumed run decides alike.

  Attributes:
    action: 'accept' ignores spikes. 'skip' refuses the step as one with non-finite numbers.
      'rewind' also restores parameters and optimizer from the last checkpoint that was due, while
      the data continue after the spike (PaLM, Chowdhery et al. 2022, section 5.1); it waits for
      every step.
    deviations: the threshold, in standard deviations.
    window: the number of losses before that a loss is compared with.
  """

  action: str = 'accept'
  deviations: float = 6.0
  window: int = 128

  def __post_init__(self):
    if self.action not in ACTIONS:
      raise ConfigurationError(
        f'LossSpikes.action={self.action!r} is unknown. Use one of {", ".join(ACTIONS)}.'
      )
    if self.deviations <= 0 or self.window < 2:
      raise ConfigurationError(
        f'LossSpikes.deviations={self.deviations} must be above 0, and LossSpikes.window='
        f'{self.window} at least 2.'
      )

  def initial(self) -> RecentLosses | None:
    """No losses yet; None if none are kept."""
    if self.action == 'accept':
      return None
    return RecentLosses(jnp.zeros(self.window, jnp.float32), jnp.zeros((), jnp.int32))


def detect(spikes: LossSpikes, recent: RecentLosses, loss: Array) -> tuple[Array, RecentLosses]:
  """(whether a step's loss is a spike, the losses with this one added if it is finite)."""
  losses, count = recent
  mean, deviation = jnp.mean(losses), jnp.std(losses)
  spiked = (count >= spikes.window) & (loss > mean + spikes.deviations * deviation)
  finite = jnp.isfinite(loss)
  now = losses.at[count % spikes.window].set(loss)
  return spiked & finite, RecentLosses(jnp.where(finite, now, losses), count + finite)
