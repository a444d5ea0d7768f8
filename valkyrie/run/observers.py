"""Observers of the steps of a run: refused steps, validation, saves and profiles."""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import os
import pathlib
import time
from typing import Any

import jax
import numpy as np

from valkyrie.checkpoint.manager import CheckpointDirectory
from valkyrie.distributed.device_errors import device_error
from valkyrie.errors import ConfigurationError, Diverged, Preempted, StorageError
from valkyrie.monitoring import pictures
from valkyrie.monitoring.json_lines import JsonLines
from valkyrie.monitoring.metrics import Metrics, text_metrics
from valkyrie.monitoring.patience import PATIENCE
from valkyrie.monitoring.progress import describe
from valkyrie.monitoring.training_log import TrainingLog
from valkyrie.monitoring.waiting import doing
from valkyrie.monitoring.writers import RunWriter
from valkyrie.run.evaluator import Evaluator
from valkyrie.run.resume import RunState
from valkyrie.storage import held_folder
from valkyrie.training.spikes import RefusedSteps
from valkyrie.training.train_step import StepMetrics


@dataclasses.dataclass
class Refusals(contextlib.AbstractContextManager['Refusals']):
  """Writes model_dir/refused_steps.jsonl, and ends a run that refuses too many steps.

    {"step": 412, "why": "loss spike", "loss": 9.1, "grad_norm": 3.0, "read": "these documents .."}
    {"step": 412, "rewound_to": 400}

  Only process 0 writes the file. A context manager that closes it.
  """

  model_dir: str | os.PathLike
  budget: RefusedSteps
  say: Callable[[str], None]
  patience: float = PATIENCE

  def __post_init__(self):
    self._skipped = self.budget.skipped
    self._lines = None
    if jax.process_index() == 0:
      path = pathlib.Path(self.model_dir, 'refused_steps.jsonl')
      self._lines = JsonLines(path, self.patience, self.say)

  def __call__(self, step: int, metrics: StepMetrics) -> None:
    """Waits for a step, and reads its metrics; raises Diverged if the budget is spent."""
    before = self._skipped
    self._skipped = int(metrics.skipped)
    if self._skipped > before and self._lines is not None:
      self._write(self._lines, step, metrics)
    self.budget(step, self._skipped)

  def _write(self, lines: JsonLines, step: int, metrics: StepMetrics) -> None:
    """Writes and says why a step is refused."""
    why = 'not finite'
    if bool(metrics.spiked):
      why = 'loss spike'
    total = float(metrics.sums.followed)
    weight = float(metrics.sums.weight)
    text = text_metrics(total, weight, None)
    loss = text['loss']
    lines.write(
      {
        'step': step,
        'why': why,
        'loss': loss,
        'grad_norm': float(metrics.grad_norm),
        'read': self.budget.describe(step),
      }
    )
    self.say(f'step {step} is refused: {why} (loss {loss:.4g})')

  def rewound(self, step: int, goal: int) -> None:
    """Writes that step `step` was rewound to the parameters and optimizer of step `goal`."""
    if self._lines is not None:
      self._lines.write({'step': step, 'rewound_to': goal})
    self.say(f'step {step} is a loss spike: continuing with the parameters of step {goal}')

  def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
    if self._lines is not None:
      self._lines.__exit__(kind, error, traceback)


@dataclasses.dataclass
class Validation:
  """Evaluates the state between steps; an evaluation in progress ends when the run is to stop.

  The losses that are compared are of the quick part; the last step reads the whole split, too.
  """

  evaluator: Evaluator
  run: RunState
  should_stop: Callable[[], bool]
  model_dir: str
  log: TrainingLog
  writer: RunWriter
  say: Callable[[str], None]

  def __call__(self) -> None:
    """Evaluates the state after the last step."""
    with self.log.untimed(), contextlib.suppress(Preempted):
      self.log.flush()
      self._evaluate()

  def _evaluate(self) -> None:
    run = self.run
    step = run.step
    is_last = step == run.lengths.train_steps
    with doing(f'evaluating step {step}', self.say):
      metrics = self.evaluator(run.state.evaluated, whole=is_last, stop=self.should_stop)
    loss = metrics.get('quick_loss', metrics['loss'])
    run.note_loss(loss)
    self.writer.write_scalars(step, metrics)
    if jax.process_index() == 0:
      self.writer.draw(step, lambda: self._draw(metrics))
    split = 'validation'
    if is_last:
      split = 'the whole validation split'
    described = ', '.join(describe(metrics))
    self.say(f'step {step}, {split}: {described}')

  def _draw(self, metrics: Metrics) -> dict[str, np.ndarray]:
    folder = pathlib.Path(self.model_dir)
    picture = pictures.write_loss_by_position(folder, {'validation': metrics})
    return {'validation/loss_by_position': picture[None]}


@dataclasses.dataclass
class Saver:
  """Saves the state of a run between steps, in the background, after the lines of these steps."""

  run: RunState
  directory: CheckpointDirectory
  log: TrainingLog
  say: Callable[[str], None]

  def __post_init__(self):
    self._saved_at = time.perf_counter()

  def __call__(self) -> None:
    """Saves the state after the last step."""
    run = self.run
    with self.log.untimed():
      self.log.flush()
      began = time.perf_counter()
      before = self._saved_at
      with doing(f'saving step {run.step}', self.say):
        self.directory.save(run.step, run.state, run.record())
      self._saved_at = time.perf_counter()
    waited = self._saved_at - began
    since_last = self._saved_at - before
    if waited > max(1, 0.1 * since_last):
      self.say(
        f'the run waited {waited:.1f} s of {since_last:.1f} for the save of step '
        f'{run.step}: a larger checkpoint_every saves less often'
      )

  def retry(self) -> None:
    """Saves again after a save that failed; raises if the directory is lost."""
    if self.directory.is_due(self.run.step):
      self()
    self.directory.check()

  def save_now(self, patiently: bool = True) -> None:
    """Saves the state and waits, unless no step was taken or it is saved already."""
    run = self.run
    if run.step > run.start:
      with doing(f'saving step {run.step}', self.say):
        self.directory.save_now(run.step, run.state, run.record(), patiently)

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
      if jax.process_count() > 1 or device_error(error):  # what the device holds is lost
        raise
      with contextlib.suppress(Exception):  # the state is worth more than a line
        self.log.flush()
      try:
        self.save_now(patiently=False)
        error.add_note('The state before the error was saved.')
      except Exception as second:
        error.add_note(f'The steps since the last checkpoint could not be saved: {second}')
      raise


class Profile:
  """Writes profiles of some steps to model_dir/profile, for TensorBoard and xprof."""

  def __init__(
    self,
    model_dir: str | os.PathLike,
    steps: tuple[int, int] | None,
    every: int | None = None,
    say: Callable[[str], None] = lambda text: None,
  ):
    """Takes the numbers, from 1, of the first and the last step; None profiles nothing.

    With `every`, as many steps are profiled again after every so many, each time into a folder
    that is named after the first of them.
    """
    self._say = say
    self._place = pathlib.Path(model_dir, 'profile')
    self._first, last = steps or (0, -1)
    self._length = last - self._first + 1
    self._every = every
    self._is_running = False
    self._running = contextlib.ExitStack()
    is_valid = 1 <= self._first <= last
    if steps is not None and not is_valid:
      raise ConfigurationError(
        f'train.profile_steps={steps}: give the first and the last step to profile, such as (10, '
        '12). Step 1 is the first.'
      )
    is_apart = every is None or (steps is not None and every > self._length)
    if not is_apart:
      raise ConfigurationError(
        f'train.profile_every={every} repeats the profile of train.profile_steps={steps}. Give '
        'these steps, such as (10, 12), and a larger number than theirs, such as 1000.'
      )

  @contextlib.contextmanager
  def step(self, number: int, untimed: Callable) -> Iterator[None]:
    """Surrounds the dispatch of step `number`; `untimed` surrounds all steps of the profile."""
    steps_since = number - self._first
    if self._every is not None and steps_since >= 0:
      steps_since %= self._every
    is_profiled = 0 <= steps_since < self._length
    if is_profiled and not self._is_running:
      self._is_running = True
      self._running.enter_context(untimed())
      place = self._place
      if self._every is not None:  # a profile replaces one of the same second
        place /= str(number)
      with self._watching():
        jax.profiler.start_trace(held_folder.place(place))
        self._running.callback(self._stop)
    yield
    if steps_since == self._length - 1:
      self.close()

  def _stop(self) -> None:
    jax.block_until_ready(jax.live_arrays())
    with self._watching():
      jax.profiler.stop_trace()

  @contextlib.contextmanager
  def _watching(self) -> Iterator[None]:
    """A context in which the profiler may fail: it only watches the run."""
    try:
      yield
    except (OSError, RuntimeError, ValueError) as error:
      self._say(f'warning: {self._place} cannot be written, the profile is left out: {error}')

  def close(self) -> None:
    """Waits for the devices and writes the profile, if one was started."""
    self._running.close()
    self._is_running = False
