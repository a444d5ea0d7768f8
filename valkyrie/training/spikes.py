"""Losses that stand out from those of the steps before them, and what is done about such a step."""

import dataclasses
from typing import NamedTuple

import gin
import jax.numpy as jnp

from valkyrie.errors import ConfigurationError
from valkyrie.types import Array

ACTIONS = ('accept', 'skip', 'rewind')


class RecentLosses(NamedTuple):
  """The losses of the latest steps, as a ring; part of the train state.

  losses: float32 [window], nats a token; refused steps are among them, those of NaN are not.
  count: int32, losses that were ever written.
  """

  losses: Array
  count: Array


@gin.configurable
@dataclasses.dataclass(frozen=True)
class LossSpikes:
  """When a loss is a spike, and what becomes of its step.

  A spike lies more than `deviations` standard deviations above the mean of the last `window` losses
  (the rule of OLMo-core's SkipStepOptimizer); nothing is one before so many were seen. Refused
  losses count among them, so a level that stays is accepted after about window / deviations^2
  steps. The train state alone decides, on the devices: a resumed run decides as it would have.

  Attributes:
    action: 'accept' trains on. 'skip' refuses the step like one whose numbers are not finite.
      'rewind' also takes parameters and optimizer back to the last checkpoint that was due, while
      the data go on behind the spike (PaLM, Chowdhery et al. 2022, section 5.1); it waits for every
      step.
    deviations: how far a loss must stand out.
    window: the losses that it is compared with.
  """

  action: str = 'accept'
  deviations: float = 6.0
  window: int = 128

  def __post_init__(self):
    if self.action not in ACTIONS:
      raise ConfigurationError(
        f'LossSpikes.action is {self.action!r}, expected one of {", ".join(ACTIONS)}.'
      )
    if self.deviations <= 0 or self.window < 2:
      raise ConfigurationError(
        f'LossSpikes.deviations={self.deviations} and LossSpikes.window={self.window} say of no '
        'loss that it stands out; give more than 0, and a window of at least 2.'
      )

  def initial(self) -> RecentLosses | None:
    """No losses yet; None where none are to be kept."""
    if self.action == 'accept':
      return None
    return RecentLosses(jnp.zeros(self.window, jnp.float32), jnp.zeros((), jnp.int32))


def judge(spikes: LossSpikes, recent: RecentLosses, loss: Array) -> tuple[Array, RecentLosses]:
  """Whether a step's loss is a spike, and the losses with this one among them, if it is finite."""
  losses, count = recent
  mean, deviation = jnp.mean(losses), jnp.std(losses)
  spiked = (count >= spikes.window) & (loss > mean + spikes.deviations * deviation)
  finite = jnp.isfinite(loss)
  now = losses.at[count % spikes.window].set(loss)
  return spiked & finite, RecentLosses(jnp.where(finite, now, losses), count + finite)
