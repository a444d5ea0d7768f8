"""Checkpoints of a training run: when they are saved, and what they record."""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
from typing import Any

import jax

from valkyrie.checkpoint.manager import CheckpointDirectory
from valkyrie.errors import Diverged, StorageError
from valkyrie.run.trainer import Trainer
from valkyrie.run.validation import Validation
from valkyrie.training.train_step import StepMetrics, TrainState


@dataclasses.dataclass
class Saver:
  """A hook that saves the state of a run in the background.

  Attributes:
    flushes: each waits for the steps done, and writes their lines: a step that is saved has them.
  """

  trainer: Trainer
  directory: CheckpointDirectory
  validation: Validation
  flushes: Sequence[Callable[[], None]]

  def __call__(self, step: int, state: TrainState, metrics: StepMetrics) -> None:
    """Saves the state after `step`, counted from 1."""
    del metrics
    self.flush()
    self.directory.save(step, state, self._record())

  def retry(self, step: int, state: TrainState, metrics: StepMetrics) -> None:
    """A hook that saves again after a save that failed, and raises if the directory is lost."""
    if self.directory.is_due(step):
      self(step, state, metrics)
    self.directory.check()

  def flush(self) -> None:
    """Calls all `flushes`."""
    for flush in self.flushes:
      flush()

  def save_now(self, patiently: bool = True) -> None:
    """Saves the state and waits, unless no step was taken or it is saved already."""
    trainer = self.trainer
    if trainer.step > trainer.start:
      self.directory.save_now(trainer.step, trainer.state, self._record(), patiently)

  @contextlib.contextmanager
  def saving_on_error(self) -> Iterator[None]:
    """Saves the state after an unforeseen error inside, which stays the one that is raised.

    With several processes nothing is saved: a save needs all, and the others see no error.
    """
    try:
      yield
    except (Diverged, StorageError):
      raise
    except Exception as error:
      if jax.process_count() > 1:
        raise
      with contextlib.suppress(Exception):  # the state is worth more than a line
        self.flush()
      try:
        self.save_now(patiently=False)
        error.add_note('The state before the error was saved.')
      except Exception as second:
        error.add_note(f'The steps since the last checkpoint could not be saved: {second}')
      raise

  def _record(self) -> dict[str, Any]:
    step, validation = self.trainer.step, self.validation
    return {
      **self.trainer.record(),
      'lowest': validation.lowest,
      'validation_loss': validation.losses.get(step),
    }
