"""Checkpoints: what a run has learned and where it stood, kept on disk by Orbax.

    model_dir/checkpoints/<step>/state             the train state, every leaf in its own dtype
    model_dir/checkpoints/<step>/record.json       feed position, fingerprints, phase, versions
    model_dir/checkpoints/<step>/manifest.sha256   the hash of every file; without it nothing counts
    model_dir/set_aside/<step>                     steps that were found damaged

Orbax writes and reads arrays, but does not see when a bit of them has changed, when a directory is
empty, or when a stored dtype is not the one asked for. What is whole, which step counts and which
ones stay is therefore decided here.

Of several processes, which must see the same directory, each writes the parts of the arrays that
its devices hold; the first does all else, and tells the others how that went.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import shutil
from typing import Any

import gin
import jax

from valkyrie.checkpoint import manifest, steps
from valkyrie.checkpoint.model_dir import Lease, lease_holder, local_path, writable_directory
from valkyrie.checkpoint.state_check import not_finite
from valkyrie.checkpoint.state_files import StateFiles, as_storage_error
from valkyrie.config.computation import may_change_on_resume
from valkyrie.distributed import heartbeat, processes
from valkyrie.errors import ConfigurationError, Diverged, StorageError


@may_change_on_resume()
@gin.configurable
@dataclasses.dataclass(frozen=True)
class Checkpoints:
  """Which checkpoints of a run stay; the others are deleted once a newer one is whole.

  Attributes:
    keep: the newest steps stay, so many.
    keep_period: steps that are a multiple of it stay; None means none do for that.
    keep_best: the steps with the lowest validation loss stay, so many, where one was measured.
  """

  keep: int = 3
  keep_period: int | None = None
  keep_best: int = 0

  def __post_init__(self):
    if self.keep < 1:
      raise ConfigurationError(f'Checkpoints.keep={self.keep} would keep nothing; give 1 or more.')
    if self.keep_period is not None and self.keep_period < 1:
      raise ConfigurationError(
        f'Checkpoints.keep_period={self.keep_period} is not a number of steps; give 1 or more.'
      )
    if self.keep_best < 0:
      raise ConfigurationError(
        f'Checkpoints.keep_best={self.keep_best} is negative; give 0 or more.'
      )

  def kept(self, saved: Sequence[int], losses: Mapping[int, float]) -> set[int]:
    """Those of the `saved` steps that stay; `losses` has the validation loss of some of them."""
    newest = sorted(saved)[-self.keep :]
    best = sorted(losses, key=lambda step: (losses[step], step))[: self.keep_best]
    periodic = [step for step in saved if self.keep_period and step % self.keep_period == 0]
    return {*newest, *best, *periodic}

  def open(self, model_dir: str | os.PathLike, read_only: bool = False) -> 'CheckpointDirectory':
    """Opens the checkpoints of a run; call it before anything compiles.

    Args:
      model_dir: the directory of the run; made, absolute, tried out and locked unless `read_only`.
      read_only: for evaluation and inference: nothing on disk is changed.

    Raises:
      StorageError: where model_dir cannot be used, or holds steps of which none is whole.
    """
    return CheckpointDirectory(model_dir, self, read_only)


class CheckpointDirectory:
  """The checkpoints of one run. A context manager, which waits for the save under way."""

  def __init__(self, model_dir: str | os.PathLike, options: Checkpoints, read_only: bool):
    root = local_path(model_dir) if read_only else writable_directory(model_dir)
    self.directory = root / 'checkpoints'
    self._options = options
    self._writes_files = not read_only and jax.process_index() == 0
    self._read_only = read_only
    self._lease = Lease(root) if self._writes_files else None
    try:
      newest = self._tidied(root) if jax.process_index() == 0 else None
      of_first = processes.exchange('checkpoints', json.dumps([newest, lease_holder(root)]))[0]
      self._newest, holder = json.loads(of_first)
      if not read_only and lease_holder(root) != holder:
        raise StorageError(
          f'Process {jax.process_index()} does not see in {root} what process 0 writes there. All '
          'processes need the same directory: name a --model_dir on storage that they share.'
        )
    except BaseException:
      self._release()
      raise
    self._files = StateFiles()
    self._thread = ThreadPoolExecutor(1, thread_name_prefix='commit')
    self._under_way: Future[None] | None = None

  def _tidied(self, root: pathlib.Path) -> int | None:
    """Reads every file of the newest step, and clears away what is not whole; the step that is."""
    with as_storage_error(f'{self.directory} cannot be opened'):
      newest, damaged = steps.newest_whole(self.directory)
      if damaged and newest is None:
        raise StorageError(_none_is_whole(self.directory, damaged))
      if self._writes_files:
        self.directory.mkdir(exist_ok=True)
        steps.clear_litter(self.directory)
        steps.set_aside(self.directory, damaged, root / 'set_aside')
    return newest

  def latest_step(self) -> int | None:
    """The newest step that is whole on disk; a save under way does not count yet."""
    return self._newest

  def describe_newest(self) -> str:
    """The newest step that is whole on disk, in words."""
    return f'{self.directory / str(self._newest)}' if self._newest is not None else 'none yet'

  def save(self, step: int, state: Any, record: dict[str, Any]) -> None:
    """Copies the state off the devices, then writes and hashes it behind the caller's back.

    Args:
      step: of the train state; must be later than every one saved before.
      state: a pytree of jax arrays; may be donated as soon as this returns.
      record: what else a resumed run needs to know, as JSON can hold it. 'validation_loss' is
        what `Checkpoints.keep_best` compares.

    Raises:
      Diverged: where the state is not finite.
      StorageError: where this save cannot start, or the one before it failed on its way.
    """
    self._begin(step, state, record)
    heartbeat.beat(stage='step')  # what hangs from now on is no save

  def _begin(self, step: int, state: Any, record: dict[str, Any]) -> None:
    if self._read_only:
      raise StorageError(f'{self.directory} was opened to read only; nothing was saved.')
    heartbeat.beat(stage='save')
    self.wait()
    if self._newest is not None and step <= self._newest:
      raise StorageError(
        f'Step {step} cannot be saved in {self.directory}: step {self._newest} is there already, '
        'and a run only goes forward. Nothing was written. To train again from an earlier step, '
        'move the later ones out of the directory, or name another --model_dir.'
      )
    if spoilt := not_finite(state):
      raise Diverged(
        f'The state after step {step} holds numbers that are not finite, in '
        f'{", ".join(spoilt[:5])}; it was not saved. The newest checkpoint is of step '
        f'{self._newest}.'
      )
    place = steps.unfinished(self.directory, step)
    try:
      with as_storage_error(f'Step {step} could not be saved in {self.directory}'):
        if self._writes_files:
          steps.begin(self.directory, step)
        self._files.write(place / 'state', state)
    except BaseException:
      self._clear(place)
      raise
    self._under_way = self._thread.submit(self._commit, step, record)

  def save_now(self, step: int, state: Any, record: dict[str, Any]) -> None:
    """Saves and waits until it is on disk, unless that step was saved already; raises as `save`."""
    self.wait()
    if self._newest != step:
      self._begin(step, state, record)
      self._collect()

  def _commit(self, step: int, record: dict[str, Any]) -> None:
    place = steps.unfinished(self.directory, step)
    try:
      self._files.wait()
      if self._writes_files:
        (place / 'record.json').write_text(json.dumps(record, indent=2))
        steps.finish(self.directory, step)
        with contextlib.suppress(OSError):  # a save that failed may have written on, and may still
          steps.clear_litter(self.directory)
    except BaseException:
      self._clear(place)
      raise
    processes.exchange('saved', str(step))  # no process counts a step that the first has not named
    self._newest = step
    heartbeat.beat(saved=step)
    if self._writes_files:
      saved = steps.find(self.directory)
      stay = self._options.kept(saved, self._validation_losses(saved))
      steps.delete(self.directory, [step for step in saved if step not in stay])

  def _clear(self, place: pathlib.Path) -> None:
    # Orbax may still be writing there, and would raise again in whatever it does next.
    with contextlib.suppress(Exception):
      self._files.wait()
    if self._writes_files:
      shutil.rmtree(place, ignore_errors=True)

  def _validation_losses(self, saved: Sequence[int]) -> dict[int, float]:
    losses = {}
    for step in saved:
      with contextlib.suppress(OSError, ValueError):  # damaged since: it is not among the best
        losses[step] = self._read_record(step).get('validation_loss')
    return {step: loss for step, loss in losses.items() if loss is not None and math.isfinite(loss)}

  def _read_record(self, step: int) -> dict[str, Any]:
    return json.loads((self.directory / str(step) / 'record.json').read_text())

  def latest_record(self) -> dict[str, Any] | None:
    """The record of the newest whole step alone; None where this run never saved one.

    Raises:
      StorageError: where it cannot be read.
    """
    if self._newest is None:
      return None
    with as_storage_error(f'The record of step {self._newest} in {self.directory} cannot be read'):
      return self._read_record(self._newest)

  def nearest_whole(self, goal: int) -> int | None:
    """Step `goal`, else the first whole one after it, else the last one before; None without any.

    Raises:
      StorageError: no step that is there is whole.
    """
    self.wait()
    nearest = self._search(goal) if jax.process_index() == 0 else None
    return json.loads(processes.exchange('nearest', json.dumps(nearest))[0])

  def _search(self, goal: int) -> int | None:
    with as_storage_error(f'{self.directory} cannot be read'):
      found = steps.find(self.directory)
      damaged = {}
      for step in sorted(found, key=lambda step: (step < goal, abs(step - goal))):
        wrong = manifest.damage(self.directory / str(step), step)
        if wrong is None:
          return step
        damaged[step] = wrong
    if damaged:
      raise StorageError(_none_is_whole(self.directory, damaged))
    return None

  def restore(
    self, target: Any, partial: bool = False, step: int | None = None
  ) -> tuple[Any, dict[str, Any]] | None:
    """Reads the newest whole step, or `step`; None where this run never saved one.

    Args:
      target: what to expect: a pytree of jax.ShapeDtypeStruct with shardings, which may be other
        ones than the state was saved with.
      partial: `target` is a dict of some of the state's fields; the others stay unread.
      step: one that was found whole; None is the newest.

    Returns:
      (state, record): the state in the structure of `target`, bit for bit as it was saved.

    Raises:
      ConfigurationError: where names, shapes or dtypes differ: a checkpoint of another model.
      StorageError: where the files cannot be read.
    """
    self.wait()
    step = self._newest if step is None else step
    if step is None:
      return None
    place = self.directory / str(step)
    state = self._files.read(place / 'state', target, partial)
    with as_storage_error(f'{place} is what was saved, but cannot be read'):
      return state, self._read_record(step)

  def check(self) -> None:
    """Raises StorageError where the save under way has failed; does not wait for it."""
    if self._under_way is not None and self._under_way.done():
      self._collect()

  def wait(self) -> None:
    """Returns when no save is under way; raises StorageError, once, where the last one failed."""
    if self._under_way is not None:
      heartbeat.beat(stage='save')
    self._collect()

  def _collect(self) -> None:
    under_way, self._under_way = self._under_way, None
    if under_way is not None:
      with as_storage_error(
        f'The last save in {self.directory} failed; the steps before it are as they were. Make '
        'room there, or repair what is named here, and run the same command again'
      ):
        under_way.result()

  def close(self) -> None:
    """Waits for the save under way and gives the directory free; raises as `wait` does."""
    try:
      self.wait()
    finally:
      self._thread.shutdown()
      self._files.close()
      self._release()

  def _release(self) -> None:
    if self._lease is not None:
      self._lease.release()

  def __enter__(self) -> 'CheckpointDirectory':
    return self

  def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
    try:
      self.close()
    except StorageError as failure:
      if error is None:
        raise
      error.add_note(str(failure))  # the first error is the one to see


def _none_is_whole(directory: os.PathLike, damaged: Mapping[int, str]) -> str:
  found = '\n'.join(f'  step {step}: {wrong}' for step, wrong in damaged.items())
  return (
    f'{directory} holds steps, but none of them is whole, so there is nothing to go on from:\n'
    f'{found}\nNothing was changed. Restore the directory from a copy, move it away to start '
    'afresh, or name another --model_dir.'
  )
