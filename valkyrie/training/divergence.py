"""When the steps that are refused for numbers that are not finite have become too many."""

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
      describe: says what a step has read, given its number counted from 1.
      allowed: refused steps that are put up with.
      window: among so many.
    """
    if not 0 <= allowed < window:
      raise ConfigurationError(
        f'RefusedSteps.allowed={allowed} of RefusedSteps.window={window} steps can never be '
        'passed, or always is; give 0 <= allowed < window.'
      )
    self._describe = describe
    self._allowed = allowed
    self._counts = deque([skipped], maxlen=window + 1)

  def __call__(self, step: int, skipped: int) -> None:
    """Counts step number `step`, after which `skipped` steps have been refused in all.

    Raises:
      Diverged: the budget is spent; names the documents that this step has read.
    """
    self._counts.append(skipped)
    refused = skipped - self._counts[0]
    if refused > self._allowed:
      raise Diverged(
        f'{refused} of the last {len(self._counts) - 1} steps gave numbers that are not finite, '
        f'and RefusedSteps.allowed = {self._allowed}. The last was step {step}, which read '
        f'{self._describe(step)}. The checkpoints are from before, or hold the parameters as they '
        'were before those steps. Lower learning_rate, or look at these documents.'
      )
