"""Back to an earlier checkpoint where the loss spikes, and past the batches in between."""

from collections.abc import Callable

import jax

from valkyrie.checkpoint.manager import CheckpointDirectory
from valkyrie.training.train_step import StepMetrics, TrainState


class Rewind:
  """Gives a state that a spike was refused of the parameters and optimizer of an earlier step.

  That is the last one before the spike at which a checkpoint was due, or the initial state where
  none was: where a run was stopped in between changes nothing. The step, and with it the feed's
  position and the learning rate, go on behind the spike, and no row remembers anything.
  """

  def __init__(
    self,
    saved: CheckpointDirectory,
    abstract: TrainState,
    make_initial: Callable[[], TrainState],
    checkpoint_every: int,
    rewound: Callable[[int, int], None],
  ):
    """Goes back within `saved`; tells `rewound` of the step of the spike and of the earlier one."""
    self._saved = saved
    self._abstract = abstract
    self._make_initial = make_initial
    self._every = checkpoint_every
    self._rewound = rewound

  def __call__(self, step: int, state: TrainState, metrics: StepMetrics) -> TrainState:
    """The state to go on with after `step`, counted from 1; waits for that step.

    Raises:
      StorageError: there are checkpoints, but none can be read.
    """
    if not bool(metrics.spiked):
      return state
    for leaf in jax.tree.leaves((state.params, state.optimizer_state)):
      leaf.delete()  # or there would be no room for two of them
    due = (step - 1) // self._every * self._every
    found = self._saved.nearest_valid(due) if due else None
    if found is None:
      initial = self._make_initial()
      params, optimizer_state = initial.params, initial.optimizer_state
    else:
      target = {'params': self._abstract.params, 'optimizer_state': self._abstract.optimizer_state}
      restored = self._saved.restore(target, partial=True, step=found)
      assert restored is not None, 'it was just found'
      params, optimizer_state = restored[0]['params'], restored[0]['optimizer_state']
    self._rewound(step, found or 0)
    return state._replace(params=params, optimizer_state=optimizer_state)
