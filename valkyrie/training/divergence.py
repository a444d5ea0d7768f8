"""The budget of refused steps."""

from collections import deque
from collections.abc import Callable

import gin

from valkyrie.config.computation import may_change_on_resume
from valkyrie.errors import ConfigurationError, Diverged


@may_change_on_resume()
@gin.configurable
class RefusedSteps:
  """Ends a run in which more than `allowed` of any `window` consecutive steps were refused."""

  def __init__(
    self, skipped: int, describe: Callable[[int], str], allowed: int = 10, window: int = 100
  ):
    """Starts counting.

    Args:
      skipped: steps that were refused so far.
      describe: names the documents of a step, given its number counted from 1.
      allowed: the most refused steps in the window.
      window: consecutive steps.
    """
    if not 0 <= allowed < window:
      raise ConfigurationError(
        f'RefusedSteps.allowed={allowed} must be at least 0 and below RefusedSteps.window={window}.'
      )
    self._describe = describe
    self._allowed = allowed
    self._counts = deque([skipped], maxlen=window + 1)

  def __call__(self, step: int, skipped: int) -> None:
    """Counts step number `step`; `skipped` is the number of all refused steps after it.

    Raises:
      Diverged: the budget is exceeded; names the documents of this step.
    """
    self._counts.append(skipped)
    refused = skipped - self._counts[0]
    if refused > self._allowed:
      raise Diverged(
        f'{refused} of the last {len(self._counts) - 1} steps were refused, more than '
        f'RefusedSteps.allowed={self._allowed}. The last was step {step}, which read '
        f'{self._describe(step)}. No checkpoint contains an update of a refused step. Lower '
        'learning_rate, or look at these documents.'
      )
