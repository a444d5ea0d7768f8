"""Checkpoints of a run: saves in the background, verified steps, and a retention policy.

    model_dir/checkpoints/<step>/state             the train state, every leaf in its own dtype
    model_dir/checkpoints/<step>/record.json       configuration, feed position, mesh, versions, ...
    model_dir/checkpoints/<step>/manifest.sha256   hashes of all files; a step without it is damaged
    model_dir/set_aside/<step>                     damaged steps

Orbax writes and reads the arrays, but does not detect a changed bit, an empty directory or another
dtype. This module therefore verifies steps, and selects the steps to read and to keep.

Several processes must see the same directory. Each writes the shards of its devices; process 0
writes all other files, and sends the others its result.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import shutil
import time
from typing import Any

import gin
import jax

from valkyrie.checkpoint import steps
from valkyrie.checkpoint.model_dir import TrainerLock, local_path, lock_holder, writable_directory
from valkyrie.checkpoint.state_check import not_finite
from valkyrie.checkpoint.state_files import StateFiles, checkpoint_errors
from valkyrie.config.computation import may_change_on_resume
from valkyrie.distributed import heartbeat, processes
from valkyrie.errors import ConfigurationError, Diverged, StorageError

LATEST, BEST = 'latest', 'best'  # steps to read, beside numbers


@may_change_on_resume()
@gin.configurable
@dataclasses.dataclass(frozen=True)
class Checkpoints:
  """The retention policy of a run's checkpoints; others are deleted after the next save.

  Attributes:
    keep: number of newest steps to keep.
    keep_period: steps that are a multiple of it are kept; None keeps none of them.
    keep_best: number of steps with the lowest validation loss to keep.
  """

  keep: int = 3
  keep_period: int | None = None
  keep_best: int = 0

  def __post_init__(self):
    bad_period = self.keep_period is not None and self.keep_period < 1
    if self.keep < 1 or bad_period or self.keep_best < 0:
      raise ConfigurationError(
        f'Checkpoints has keep={self.keep}, keep_period={self.keep_period} and '
        f'keep_best={self.keep_best}. Use a keep and keep_period of 1 or more, and a keep_best of '
        '0 or more.'
      )

  def kept(self, saved: Sequence[int], losses: Mapping[int, float]) -> set[int]:
    """The steps to keep, of `saved`; `losses` has the validation loss of some of them."""
    newest = sorted(saved)[-self.keep :]
    best = sorted(losses, key=lambda step: (losses[step], step))[: self.keep_best]
    periodic = [step for step in saved if self.keep_period and step % self.keep_period == 0]
    return {*newest, *best, *periodic}

  def open(
    self, model_dir: str | os.PathLike, say: Callable[[str], None] = lambda text: None
  ) -> 'CheckpointDirectory':
    """Opens the checkpoints of a run; call it before compilation, since it may fail.

    Args:
      model_dir: the directory of the run; made, tested and locked.
      say: prints a line after each save, from a thread.

    Raises:
      StorageError: model_dir cannot be used, or all its steps are damaged.
    """
    return CheckpointDirectory(model_dir, self, None, say)


def open_to_read(model_dir: str | os.PathLike, step: str = LATEST) -> 'CheckpointDirectory':
  """Opens a run for evaluation and inference: nothing on disk is changed.

  Args:
    model_dir: the directory of the run.
    step: the number of a step, which is then taken for the newest; 'latest'; or 'best', the step
      with the lowest validation loss of those that are kept.

  Raises:
    ConfigurationError: the run has no such step.
    StorageError: the step, or every step, is damaged.
  """
  if step not in (LATEST, BEST) and not step.isdecimal():
    raise ConfigurationError(f"The step is {step!r}. Use a number, '{LATEST}' or '{BEST}'.")
  return CheckpointDirectory(model_dir, Checkpoints(), step, lambda text: None)


class CheckpointDirectory:
  """The checkpoints of one run. A context manager, which waits for the running save."""

  def __init__(
    self,
    model_dir: str | os.PathLike,
    options: Checkpoints,
    step: str | None,
    say: Callable[[str], None],
  ):
    """Opens a run to write, or to read a step; see `Checkpoints.open` and `open_to_read`."""
    self._say = say
    read_only = step is not None
    root = local_path(model_dir) if read_only else writable_directory(model_dir)
    self.directory = root / 'checkpoints'
    self._options = options
    self._read_only = read_only
    self._running_save: Future[None] | None = None
    self._lock: TrainerLock | None = None  # of the process that writes files beside the arrays
    self._own: set[int] = set()  # the steps that were here at first, or saved since
    self._reported: set[str] = set()
    with contextlib.ExitStack() as stack:  # frees the lock if an error follows
      if not read_only and jax.process_index() == 0:
        self._lock = TrainerLock(root)
        stack.callback(self._lock.release)
      newest = self._recover(root, step) if jax.process_index() == 0 else None
      of_first = processes.exchange('checkpoints', json.dumps([newest, lock_holder(root)]))[0]
      self._newest, holder = json.loads(of_first)
      if not read_only and lock_holder(root) != holder:
        raise StorageError(
          f'Process {jax.process_index()} does not see the files of process 0 in {root}. All '
          'processes need the same directory. Name a --model_dir on storage that they share.'
        )
      self._files = StateFiles()
      stack.callback(self._files.close)
      self._thread = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix='commit'))
      self._resources = stack.pop_all()

  def _recover(self, root: pathlib.Path, step: str | None) -> int | None:
    """Finds the newest valid step, or that to read; sets others aside, deletes unfinished ones."""
    with checkpoint_errors(f'{self.directory} cannot be opened'):
      found = steps.find(self.directory)
      self._own.update(found)
      order = self._to_read(step, found)
      newest, damaged = steps.first_valid(self.directory, order)
      if self._lock:
        self.directory.mkdir(exist_ok=True)
        self._report(steps.clear_litter(self.directory))
        steps.set_aside(self.directory, damaged, root / 'set_aside')
    return newest

  def _to_read(self, step: str | None, found: list[int]) -> list[int]:
    """The steps in the order in which they are preferred."""
    if step in (None, LATEST):
      return found[::-1]
    if step == BEST:
      losses = self._validation_losses(found)
      chosen = sorted(losses, key=lambda saved: (losses[saved], saved))
    else:
      chosen = [saved for saved in found if str(saved) == step]
    if not chosen:
      missing = 'step with a validation loss' if step == BEST else f'step {step}'
      raise ConfigurationError(
        f'{self.directory} has no {missing}. It has {", ".join(map(str, found)) or "no steps"}.'
      )
    return chosen

  def latest_step(self) -> int | None:
    """The newest valid step on disk; a running save does not count yet."""
    return self._newest

  def describe_newest(self) -> str:
    """The path of the newest valid step, for messages."""
    return str(self.directory / str(self._newest)) if self._newest is not None else 'none yet'

  def save(self, step: int, state: Any, record: dict[str, Any]) -> None:
    """Copies the state to the host, then writes and hashes it in the background.

    Args:
      step: the number of the train state; must be larger than every saved one.
      state: a pytree of jax arrays; may be donated as soon as this returns.
      record: JSON values for a resumed run. `Checkpoints.keep_best` compares 'validation_loss'.

    Raises:
      Diverged: the state is not finite.
      StorageError: this save cannot start, or the one before it has failed.
    """
    self._begin(step, state, record)
    heartbeat.beat(stage='step')  # the run no longer waits for the save

  def _begin(self, step: int, state: Any, record: dict[str, Any]) -> None:
    if self._read_only:
      raise StorageError(f'{self.directory} was opened read-only. Nothing was saved.')
    heartbeat.beat(stage='save')
    began = time.perf_counter()
    self.wait()
    if self._newest is not None and step <= self._newest:
      raise StorageError(
        f'Step {step} cannot be saved in {self.directory}: step {self._newest} is there already, '
        'and the steps of a run only increase. Nothing was written. To train again from an earlier '
        'step, move the later ones out of the directory, or name another --model_dir.'
      )
    if paths := not_finite(state):
      raise Diverged(
        f'The state after step {step} is not finite in {", ".join(paths[:5])}. It was not saved. '
        f'The newest checkpoint is step {self._newest}.'
      )
    message = f'Step {step} could not be saved in {self.directory}'
    with checkpoint_errors(message), self._unfinished(step) as place:
      if self._lock:
        self._lock.check()
        steps.begin(self.directory, step)
      self._files.write(place / 'state', state)
    waited = time.perf_counter() - began
    self._running_save = self._thread.submit(self._commit, step, record, began, waited)

  def save_now(self, step: int, state: Any, record: dict[str, Any]) -> None:
    """Saves a step, unless it is saved, and waits until it is on disk; raises as `save` does."""
    self.wait()
    if self._newest != step:
      self._begin(step, state, record)
      self._collect()

  def _commit(self, step: int, record: dict[str, Any], began: float, waited: float) -> None:
    with self._unfinished(step) as place:
      self._files.wait()
      if self._lock:
        self._lock.check()
        (place / 'record.json').write_text(json.dumps(record, indent=2))
        steps.finish(self.directory, step)
        self._own.add(step)
        self._report(steps.clear_litter(self.directory))  # a failed save may have left files
    processes.exchange('saved', str(step))  # the step counts after process 0 has renamed it
    self._newest = step
    heartbeat.beat(saved=step)
    if self._lock:
      size = sum(file.stat().st_size for file in (self.directory / str(step)).rglob('*'))
      self._say(
        f'saved step {step}: {size / 2**20:,.1f} MiB in {time.perf_counter() - began:.1f} s, of '
        f'which the run waited {waited:.2f} s'
      )
      saved = [step for step in steps.find(self.directory) if step in self._own]
      stay = self._options.kept(saved, self._validation_losses(saved))
      self._report(steps.delete(self.directory, [step for step in saved if step not in stay]))

  @contextlib.contextmanager
  def _unfinished(self, step: int) -> Iterator[pathlib.Path]:
    """The directory of a step that is being written; an error deletes it."""
    place = steps.unfinished(self.directory, step)
    try:
      yield place
    except BaseException:
      # Orbax may still write there; without the wait its error would appear in its next call.
      with contextlib.suppress(Exception):
        self._files.wait()
      if self._lock and self._lock.is_in_place:
        shutil.rmtree(place, ignore_errors=True)
      raise

  def _report(self, problems: Sequence[str]) -> None:
    """Says, once, what cannot be deleted: it does no harm."""
    for problem in problems:
      if problem not in self._reported:
        self._reported.add(problem)
        self._say(f'{problem}; it stays, and each save tries again')

  def _validation_losses(self, saved: Sequence[int]) -> dict[int, float]:
    losses = {}
    for step in saved:
      with contextlib.suppress(StorageError):  # a record that was damaged meanwhile
        losses[step] = self._read_record(step).get('validation_loss')
    return {step: loss for step, loss in losses.items() if loss is not None and math.isfinite(loss)}

  def _read_record(self, step: int) -> dict[str, Any]:
    with checkpoint_errors(f'The record of step {step} in {self.directory} cannot be read'):
      return json.loads((self.directory / str(step) / 'record.json').read_text())

  def latest_record(self) -> dict[str, Any] | None:
    """The record of the newest valid step, or None; raises StorageError if it cannot be read."""
    return None if self._newest is None else self._read_record(self._newest)

  def nearest_valid(self, goal: int) -> int | None:
    """Step `goal`, or else the first valid one after it, or else the last one before it.

    None if there is no step; raises StorageError if all steps are damaged.
    """
    self.wait()
    nearest = None
    if jax.process_index() == 0:
      with checkpoint_errors(f'{self.directory} cannot be read'):
        found = steps.find(self.directory)
        order = sorted(found, key=lambda step: (step < goal, abs(step - goal)))
        nearest, _ = steps.first_valid(self.directory, order)
    return json.loads(processes.exchange('nearest', json.dumps(nearest))[0])

  def restore(self, target: Any, partial: bool = False, step: int | None = None) -> Any:
    """Reads the newest valid step, or `step`: the state bit for bit, in the structure of `target`.

    Args:
      target: a pytree of jax.ShapeDtypeStruct; its shardings may differ from those of the save.
      partial: `target` is a dict of some fields of the state; the others are not read.
      step: a valid step; None is the newest.

    Raises:
      ConfigurationError: there is no step, or names, shapes or dtypes differ: a checkpoint of
        another model.
      StorageError: the files cannot be read.
    """
    self.wait()
    return self._files.read(self._place_of_state(step), target, partial)

  def restore_evaluated(self, target: Any) -> Any:
    """Reads the parameters that evaluations use: the average, if there is one; as `restore`."""
    self.wait()
    field = self._evaluated_field()
    return self.restore({field: target}, partial=True)[field]

  def _evaluated_field(self) -> str:
    return 'average' if 'average' in self._files.fields(self._place_of_state()) else 'params'

  def _place_of_state(self, step: int | None = None) -> pathlib.Path:
    step = self._newest if step is None else step
    if step is None:
      raise ConfigurationError(f'{self.directory} has no checkpoint. Train there first.')
    return self.directory / str(step) / 'state'

  def newest_params(self) -> tuple[dict[str, Any], Any]:
    """The record of the newest valid step, and the parameters that evaluations use.

    They are {module: {name: array}}, on the host.

    Raises:
      ConfigurationError: there is no step.
      StorageError: the files cannot be read.
    """
    place, record = self._place_of_state(), self.latest_record()
    assert record is not None, 'there is a step'
    return record, self._files.read_to_host(place, self._evaluated_field())

  def check(self) -> None:
    """Raises StorageError if the running save has failed; does not wait for it."""
    if self._running_save is not None and self._running_save.done():
      self._collect()

  def wait(self) -> None:
    """Waits for the running save; raises StorageError, once, if it has failed."""
    if self._running_save is not None:
      heartbeat.beat(stage='save')
    self._collect()

  def _collect(self) -> None:
    save, self._running_save = self._running_save, None
    if save is not None:
      with checkpoint_errors(
        f'The last save in {self.directory} failed, and the steps before it are unchanged',
        'Make room there, or repair the cause, and run the same command again.',
      ):
        save.result()

  def close(self) -> None:
    """Waits for the running save and frees the lock; raises as `wait` does."""
    with self._resources:
      self.wait()

  def __enter__(self) -> 'CheckpointDirectory':
    return self

  def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
    try:
      self.close()
    except StorageError as failure:
      if error is None:
        raise
      error.add_note(str(failure))  # the first error is the cause
