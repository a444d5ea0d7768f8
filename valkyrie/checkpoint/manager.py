"""Checkpoints of a run: saves in the background, verified steps, and a retention policy.

    model_dir/checkpoints/<step>/state             the train state, every leaf in its own dtype
    model_dir/checkpoints/<step>/record.json       configuration, feed position, mesh, versions, ...
    model_dir/checkpoints/<step>/manifest.sha256   hashes of all files, see `manifest`

Orbax writes and reads the arrays, but does not detect a changed bit or another dtype. This
module therefore verifies steps, and selects those to read and to keep. Several processes must see
the same directory: each writes the shards of its devices, process 0 all other files.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
import contextlib
import dataclasses
import json
import os
import time
from typing import Any

import gin
import jax

from valkyrie.checkpoint import chosen_steps, failed_saves, manifest, state_files
from valkyrie.checkpoint.chosen_steps import BEST, LATEST
from valkyrie.checkpoint.steps import Lock, steps_of
from valkyrie.config.computation import may_change_on_resume
from valkyrie.config.ranges import NonNegativeInt, PositiveInt, Seconds, check_fields
from valkyrie.distributed import heartbeat, processes
from valkyrie.errors import (
  ConfigurationError,
  Diverged,
  StorageError,
  end_after,
  first_of,
  reason_of,
)

_SHOWN = 5  # names beside the steps


@may_change_on_resume()
@gin.configurable
@dataclasses.dataclass(frozen=True)
class Checkpoints:
  """The retention policy of a run's checkpoints; others are deleted after the next save.

  Attributes:
    keep: number of newest steps to keep.
    keep_period: multiples of it are kept; None keeps none.
    keep_best: number of steps with the lowest validation loss to keep.
    patience: seconds for which saves may fail, one after the other, before the run ends.
  """

  keep: PositiveInt = 3
  keep_period: PositiveInt | None = None
  keep_best: NonNegativeInt = 0
  patience: Seconds = 3600.0

  def __post_init__(self):
    check_fields(self)

  def open(
    self, model_dir: str | os.PathLike, say: Callable[[str], None] = lambda text: None
  ) -> 'CheckpointDirectory':
    """Creates, tests and locks the directory of a run; call it before compilation.

    `say` prints a line after each save, from a thread. Raises a StorageError if model_dir cannot be
    used, or all its steps are damaged.
    """
    return CheckpointDirectory(model_dir, self, None, say)


def open_to_read(model_dir: str | os.PathLike, step: str = LATEST) -> 'CheckpointDirectory':
  """Opens a run for evaluation and inference; changes nothing on disk.

  The `step` then acts as the newest: a number, 'latest', or 'best', the kept step with the lowest
  validation loss.

  Raises:
    ConfigurationError: the run has no such step.
    StorageError: the step, or every step, is damaged.
  """
  if step not in (LATEST, BEST) and not step.isdecimal():
    raise ConfigurationError(f"The step is {step!r}. Use a number, '{LATEST}' or '{BEST}'.")
  return CheckpointDirectory(model_dir, Checkpoints(), step, lambda text: None)


class CheckpointDirectory(contextlib.AbstractContextManager['CheckpointDirectory']):
  """The checkpoints of one run. A context manager, which waits for the running save."""

  def __init__(
    self,
    model_dir: str | os.PathLike,
    options: Checkpoints,
    step: str | None,  # the step to read; None opens the run to write
    say: Callable[[str], None],
  ):
    self._say = say
    self._options = options
    self._read_only = step is not None
    self._steps = steps_of(model_dir)
    self.directory = self._steps.place
    self._has_room = self._read_only or self._steps.check_writable()
    self._failed = failed_saves.FailedSaves(options.patience, str(self.directory), say)
    self._running_save: Future[None] | None = None
    self._lock: Lock | None = None  # the run's lock, in the process that writes more than arrays
    self._known: set[int] = set()  # the steps that were here at first, or saved since
    self._reported: set[str] = set()  # problems of deletions
    with contextlib.ExitStack() as stack:  # frees the lock if an error follows
      if not self._read_only and jax.process_index() == 0:
        self._lock = self._steps.lock()
        stack.callback(self._lock.release)
      self._files = state_files.StateFiles()
      stack.callback(self._files.close)
      newest = self._recover(step or LATEST) if jax.process_index() == 0 else None
      answers = processes.exchange('checkpoints', [newest, self._steps.holder()])
      self._newest, holder = answers[0]
      if not self._read_only and self._steps.holder() != holder:
        raise StorageError(
          f'Process {jax.process_index()} does not see the files of process 0 in {model_dir}. All '
          'processes need the same directory. Name a --model_dir on storage that they share.'
        )
      self._thread = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix='commit'))
      self._resources = stack.pop_all()

  def _recover(self, step: str) -> int | None:
    """Finds the step to read; the trainer also sets aside damaged steps and deletes litter."""
    with state_files.checkpoint_errors(f'{self.directory} cannot be opened'):
      order = chosen_steps.in_order_of_preference(self._steps, step)
      newest, damaged = chosen_steps.first_valid(self._steps, order, once=self._read_only)
      if self._lock:
        self._steps.open()
        self._steps.set_aside(damaged)
        self._known.update(filter(self._steps.is_saved, self._steps.find()))
        self._report(self._steps.delete(()))
        strangers = self._steps.others()
        if strangers:
          self._say(
            f'{self.directory} has {", ".join(first_of(strangers, _SHOWN))}, which no save of this '
            'version has made: they stay. A version before 0.3 may have left STEP.unfinished and '
            'STEP.deleted: delete them by hand if you do not need them'
          )
    return newest

  def make_room(self) -> None:
    """Deletes what `Checkpoints` no longer keeps, before anything waits for room on the disk.

    The caller has made sure that this run continues the run that saved the steps. Raises a
    StorageError if the disk was full, and still is.
    """
    self._change(self._delete_old)
    if all(processes.exchange('room', self._has_room)):
      return
    self._has_room = self._steps.check_writable()
    if not self._has_room:
      raise StorageError(
        f'There is no room in {self.directory}, and Checkpoints.keep={self._options.keep} keeps '
        'its steps. Nothing was written. Make room there, or lower Checkpoints.keep.'
      )

  def _delete_old(self, coming: int = 0) -> None:
    """Deletes the steps that are not kept when so many more are `coming`."""
    superseded = self._superseded(coming)
    if superseded:
      self._report(self._steps.delete(superseded))

  def latest_step(self) -> int | None:
    """The newest valid step on disk, without a running save."""
    return self._newest

  def describe_newest(self) -> str:
    """The path of the newest valid step, for messages."""
    return 'none yet' if self._newest is None else str(self._steps.path(self._newest))

  def is_due(self, step: int) -> bool:
    """Whether to save `step` in place of one that failed; all processes call it after each step."""
    return self._failed.is_due(step)

  def save(self, step: int, state: Any, record: dict[str, Any]) -> None:
    """Copies the state to the host, then writes and hashes it in the background.

    If this fails, it logs a line, and `is_due` asks for another save; until then it does nothing.

    Args:
      step: larger than every saved one.
      state: a pytree of jax arrays; may be donated as soon as this returns.
      record: JSON values for a resumed run. `Checkpoints.keep_best` compares 'validation_loss'.

    Raises:
      Diverged: the state is not finite.
      StorageError: the directory is no longer this run's, the step exists already, or saves have
        failed for longer than `Checkpoints.patience`.
    """
    began = time.perf_counter()
    heartbeat.beat(stage='save')
    self.wait()
    if not self._failed.is_too_early(step):
      self._begin(step, state, record, began)
    heartbeat.beat(stage='step')  # the run no longer waits for the save

  def _begin(self, step: int, state: Any, record: dict[str, Any], began: float) -> None:
    if self._read_only:
      raise StorageError(
        f'{self.directory} was opened to be read. Nothing was saved. Open it with '
        'Checkpoints().open.'
      )
    if self._newest is not None and step <= self._newest:
      raise StorageError(
        f'Step {step} cannot be saved in {self.directory}: step {self._newest} is there already, '
        'and the steps of a run only increase. Nothing was written. To train again from an earlier '
        'step, move the later ones out of the directory, or name another --model_dir.'
      )
    paths = state_files.not_finite(state)
    if paths:
      raise Diverged(
        f'The state after step {step} is not finite in {", ".join(paths[:5])}. It was not saved. '
        f'The newest checkpoint: {self.describe_newest()}. Run the same command again with a lower '
        'learning rate and --allow_changed=configuration.'
      )
    self._failed.try_again()
    problems = processes.exchange('begun', self._change(self._prepare, step))
    problem = failed_saves.first(problems)
    if not problem:  # after a problem Orbax would wait for process 0
      place = self._steps.unfinished(step) / 'state'
      problem = state_files.problem_of(self._files.write, place, state)
    waited = time.perf_counter() - began
    self._running_save = self._thread.submit(self._commit, step, record, problem, began, waited)

  def _prepare(self, step: int) -> None:
    self._delete_old()  # after `Checkpoints` was lowered, perhaps since the disk is full
    if not self._has_room and self._superseded(coming=1) and self._newest_is_valid():
      self._say(
        f'the disk of {self.directory} is full: the steps that step {step} replaces '
        f'(Checkpoints.keep={self._options.keep}) are deleted before it is written'
      )
      self._delete_old(coming=1)
    self._steps.begin(step)

  def _newest_is_valid(self) -> bool:
    if self._newest is None:
      return False
    files = self._steps.files(self._newest)
    return manifest.damage(files, self._newest) is None

  def save_now(self, step: int, state: Any, record: dict[str, Any], patiently: bool = True) -> None:
    """Saves a step, unless it is saved, and waits until it is on disk; raises as `save`.

    If not `patiently`, a save that fails is not repeated, and raises.
    """
    self.wait()
    while self._newest != step:
      heartbeat.beat(stage='save')
      self._begin(step, state, record, time.perf_counter())
      self._collect()
      if self._newest != step:
        if not patiently:
          raise StorageError(f'Step {step} could not be saved in {self.directory}.')
        time.sleep(self._failed.pause)

  def _commit(
    self, step: int, record: dict[str, Any], problem: str, began: float, waited: float
  ) -> None:
    """Waits for the arrays, then makes the step valid, unless a `problem` has prevented it."""
    problem = problem or state_files.problem_of(self._files.finish)
    problems = processes.exchange('written', problem)
    if not any(problems):  # a step is valid after process 0 has renamed it
      content = json.dumps(record, indent=2).encode()
      problems = processes.exchange('saved', self._change(self._steps.finish, step, content))
    if any(problems):
      with contextlib.suppress(Exception):  # Orbax may still write; its next call would raise this
        self._files.wait()
      self._change(self._steps.discard, step)
      self._has_room = not failed_saves.is_full(problems)
      self._failed.add(step, failed_saves.first(problems))
      return
    self._has_room = True
    self._failed.forget()
    self._newest = step
    self._known.add(step)
    heartbeat.beat(saved=step)
    if self._lock:
      took = time.perf_counter() - began
      try:
        size = self._steps.files(step).size() / 2**20
        self._say(
          f'saved step {step}: {size:,.1f} MiB in {took:.1f} s; the run waited {waited:.2f} s'
        )
        self._report(self._steps.delete(self._superseded()))
      except OSError as error:  # not a reason to end a run that has saved
        self._say(f'{self.directory} cannot be read after step {step}: {reason_of(error)}')

  def _change(self, change: Callable[..., None], *arguments: Any) -> str:
    """Lets the process with the lock change the steps; returns as `_problem`, raises as `save`."""
    if self._lock is None:
      return ''
    return state_files.problem_of(self._lock.check) or state_files.problem_of(change, *arguments)

  def _superseded(self, coming: int = 0) -> list[int]:
    """The steps that are not kept when so many more are `coming`; never the newest one."""
    options = self._options
    saved = [step for step in self._steps.find() if step in self._known]
    keep = options.keep - coming
    return chosen_steps.superseded(self._steps, saved, keep, options.keep_period, options.keep_best)

  def _report(self, problems: Sequence[str]) -> None:
    """Reports each problem of a deletion once: what stays does not harm the run."""
    for problem in problems:
      if problem not in self._reported:
        self._reported.add(problem)
        self._say(f'{problem}; it stays, and each save tries again')

  def latest_record(self) -> dict[str, Any] | None:
    """The record of the newest valid step, or None; raises StorageError if it cannot be read."""
    if self._newest is None:
      return None
    return chosen_steps.record(self._steps, self._newest)

  def nearest_valid(self, goal: int) -> int | None:
    """Step `goal`, or else the first valid one after it, or else the last one before it.

    None if there is no step; raises StorageError if all steps are damaged.
    """
    self.wait()
    nearest = None
    if jax.process_index() == 0:
      with state_files.checkpoint_errors(f'{self.directory} cannot be read'):
        saved = self._steps.find()
        order = sorted(saved, key=lambda step: (step < goal, abs(step - goal)))
        nearest, _ = chosen_steps.first_valid(self._steps, order)
    return processes.exchange('nearest', nearest)[0]

  def restore(self, target: Any, partial: bool = False, step: int | None = None) -> Any:
    """Reads the newest valid step, or the valid `step`: the state bit for bit.

    Args:
      target: a pytree of jax.ShapeDtypeStruct; its shardings may differ from the saved ones.
      partial: `target` is a dict of some fields of the state; the others are not read.

    Raises:
      ConfigurationError: there is no step, or names, shapes or dtypes differ: a checkpoint of
        another model.
      StorageError: the files cannot be read.
    """
    self.wait()
    return self._files.read(self._place_of_state(step), target, partial)

  def differences(self, target: Any, partial: bool = False) -> list[str]:
    """A line for each of the first arrays for which `restore` would refuse the target."""
    self.wait()
    return self._files.differences(self._place_of_state(), target, partial)

  def restore_evaluated(self, target: Any = None, lazily: bool = False) -> Any:
    """As `restore`, the parameters that evaluations use: the average, if there is one.

    A target may lack what terms of the objective have added, such as a teacher. With `lazily` the
    arrays are `StoredArray`s. Without a target: {module: {name: array}} of any model, on the host.
    """
    self.wait()
    place = self._place_of_state()
    field = 'average' if 'average' in self._files.fields(place) else 'params'
    if target is None and not lazily:
      return self._files.read_to_host(place, field)
    read = self._files.arrays if lazily else self._files.read
    fields = {field: target or self._files.shapes(place, field)}
    return read(place, fields, partial=True)[field]

  def _place_of_state(self, step: int | None = None) -> Any:
    if step is None:
      step = self._newest
    if step is None:
      raise ConfigurationError(f'{self.directory} has no checkpoint. Train there first.')
    return self._steps.path(step) / 'state'

  def check(self) -> None:
    """Raises as `save` does if the running save has failed; does not wait for it."""
    if self._running_save is not None and self._running_save.done():
      self._collect()

  def wait(self) -> None:
    """Waits for the running save; raises as `save` does."""
    if self._running_save is not None:
      heartbeat.beat(stage='save')
    self._collect()

  def _collect(self) -> None:
    save = self._running_save
    self._running_save = None
    if save is not None:
      with state_files.checkpoint_errors(f'The last save in {self.directory} failed'):
        save.result()

  def close(self) -> None:
    """Waits for the running save and frees the lock; raises a StorageError if it has failed."""
    with self._resources:
      self.wait()
      self._failed.check()

  def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
    end_after(self.close, error)
