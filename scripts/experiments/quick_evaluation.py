"""An evaluator for runs whose validation split is longer than their training.

Its gin file needs --gin_allow_import=scripts and the two lines

    import scripts.experiments.quick_evaluation
    train.evaluator = @QuickEvaluator
"""

from typing import Any

import gin

from valkyrie.monitoring.metrics import Metrics
from valkyrie.run.evaluator import Evaluator
from valkyrie.types import Params


@gin.configurable
class QuickEvaluator(Evaluator):
  """Reads `Evaluator.chunks` chunks of each row, after the last step, too."""

  def __call__(self, params: Params, *, whole: bool, **options: Any) -> Metrics:
    del whole
    return super().__call__(params, whole=False, **options)
