"""Checkpoints: what a run has learned and where it stood, kept on disk by Orbax.

    model_dir/checkpoints/<step>/state    the train state, every leaf in its own dtype
    model_dir/checkpoints/<step>/record   JSON: feed position, fingerprints, phase, versions
    model_dir/set_aside/<step>            steps that were found damaged: moved, never deleted

Orbax by itself takes an empty directory called 9 for the newest step, saves nothing at a step that
is not its newest and only returns False, and casts a stored array to whatever dtype is asked for.
Here a step counts only if it is whole, and each of those is an error with a message.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import errno
import logging
import os
import pathlib
import tempfile
from typing import Any

import gin
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy

from valkyrie.errors import ConfigurationError, StorageError

# A rename into place is the last thing that a save does, so that a step whose name is a number and
# which holds these is whole.
_PARTS = ('_CHECKPOINT_METADATA', 'state/_METADATA', 'record/metadata')
_DIFFERENCES_SHOWN = 5


@gin.configurable
@dataclasses.dataclass(frozen=True)
class Checkpoints:
  """How many checkpoints a run keeps.

  Attributes:
    keep: the newest steps that stay; older ones are deleted once a newer one is whole.
    keep_period: steps that are a multiple of it stay for ever; None means none do.
  """

  keep: int = 3
  keep_period: int | None = None

  def __post_init__(self):
    if self.keep < 1:
      raise ConfigurationError(f'Checkpoints.keep={self.keep} would keep nothing; give 1 or more.')
    if self.keep_period is not None and self.keep_period < 1:
      raise ConfigurationError(
        f'Checkpoints.keep_period={self.keep_period} is not a number of steps; give 1 or more.'
      )

  def open(self, model_dir: str | os.PathLike, read_only: bool = False) -> 'CheckpointDirectory':
    """Opens the checkpoints of a run; call it before anything compiles.

    Args:
      model_dir: the directory of the run; made, absolute and tried out unless `read_only`.
      read_only: for evaluation and inference: nothing on disk is changed.

    Raises:
      StorageError: where model_dir cannot be used, or holds steps of which none is whole.
    """
    return CheckpointDirectory(model_dir, self, read_only)


class CheckpointDirectory:
  """The checkpoints of one run. A context manager, which waits for the save under way."""

  def __init__(self, model_dir: str | os.PathLike, options: Checkpoints, read_only: bool):
    root = _local_path(model_dir) if read_only else writable_directory(model_dir)
    self.directory = root / 'checkpoints'
    self._read_only = read_only
    _quiet_orbax()
    whole, damaged = _find_steps(self.directory)
    if damaged and not whole:
      raise StorageError(
        f'{self.directory} holds the steps {_list(damaged)}, but none of them is whole, so '
        'there is nothing to go on from. Restore the directory from a copy, move it away to start '
        'afresh, or name another --model_dir.'
      )
    if damaged and not read_only and jax.process_index() == 0:
      _set_aside(self.directory, damaged, root / 'set_aside')
    self._newest = max(whole, default=-1)
    policies: list[preservation_policy.PreservationPolicy] = [
      preservation_policy.LatestN(options.keep)
    ]
    if options.keep_period is not None:
      policies.append(preservation_policy.EveryNSteps(options.keep_period))
    with _as_storage_error(f'{self.directory} cannot be opened'):
      if not read_only:
        self.directory.mkdir(exist_ok=True)
      self._manager = ocp.CheckpointManager(
        self.directory,
        options=ocp.CheckpointManagerOptions(
          preservation_policy=preservation_policy.AnyPreservationPolicy(policies),
          cleanup_tmp_directories=not read_only,
          create=not read_only,
        ),
        handler_registry=ocp.handlers.create_default_handler_registry(
          state=ocp.PyTreeCheckpointHandler(), record=ocp.JsonCheckpointHandler()
        ),
      )

  def latest_step(self) -> int | None:
    """The newest step that is whole on disk; a save under way does not count yet."""
    return max(_find_steps(self.directory)[0], default=None)

  def save(self, step: int, state: Any, record: dict[str, Any]) -> None:
    """Copies the state off the devices, then writes it behind the caller's back.

    Args:
      step: of the train state; must be later than every one saved before.
      state: a pytree of jax arrays; may be donated as soon as this returns.
      record: what else a resumed run needs to know, as JSON can hold it.

    Raises:
      StorageError: where this save cannot start, or the one before it failed on its way.
    """
    if self._read_only:
      raise StorageError(f'{self.directory} was opened to read only; nothing was saved.')
    self.wait()
    if step <= self._newest:
      raise StorageError(
        f'Step {step} cannot be saved in {self.directory}: step {self._newest} is there already, '
        'and a run only goes forward. Nothing was written. To train again from an earlier step, '
        'move the later ones out of the directory, or name another --model_dir.'
      )
    with _as_storage_error(f'Step {step} could not be saved in {self.directory}'):
      saved = self._manager.save(
        step,
        args=ocp.args.Composite(
          state=ocp.args.PyTreeSave(_without_empty_arrays(state)), record=ocp.args.JsonSave(record)
        ),
        force=True,  # when to save is the caller's decision
      )
      if not saved:
        raise OSError(errno.EIO, 'Orbax declined to save, and says no more')
    self._newest = step

  def latest_record(self) -> dict[str, Any] | None:
    """The record of the newest whole step alone; None where this run never saved one.

    Raises:
      StorageError: where it cannot be read.
    """
    step = self.latest_step()
    if step is None:
      return None
    with _as_storage_error(f'The record in {self.directory / str(step)} cannot be read'):
      self._manager.reload()
      arguments = ocp.args.Composite(record=ocp.args.JsonRestore())
      return self._manager.restore(step, args=arguments)['record']

  def restore(self, target: Any, partial: bool = False) -> tuple[Any, dict[str, Any]] | None:
    """Reads the newest whole step; None where this run never saved one.

    Args:
      target: what to expect: a pytree of jax.ShapeDtypeStruct with shardings, which may be other
        ones than the state was saved with.
      partial: `target` is a dict of some of the state's fields; the others stay unread.

    Returns:
      (state, record): the state in the structure of `target`, bit for bit as it was saved.

    Raises:
      ConfigurationError: where names, shapes or dtypes differ: a checkpoint of another model.
      StorageError: where the files cannot be read.
    """
    self.wait()
    step = self.latest_step()
    if step is None:
      return None
    place = self.directory / str(step)
    unreadable = (
      f'{place} cannot be read; move it out of the directory to go on from an earlier one'
    )
    with _as_storage_error(unreadable):
      self._manager.reload()
      stored = self._manager.item_metadata(step)['state'].tree
    item = _without_empty_arrays(target)
    _check_same_model(place, stored, item, partial)
    with _as_storage_error(unreadable):
      restored = self._manager.restore(
        step,
        args=ocp.args.Composite(
          state=ocp.args.PyTreeRestore(
            item=item,
            restore_args=ocp.checkpoint_utils.construct_restore_args(item),
            partial_restore=partial,
          ),
          record=ocp.args.JsonRestore(),
        ),
      )
    state = jax.tree.map(
      lambda leaf, found: found if leaf.size else jnp.zeros_like(leaf), target, restored['state']
    )
    return state, restored['record']

  def wait(self) -> None:
    """Returns when no save is under way; raises StorageError where the last one failed."""
    with _as_storage_error(
      f'The last save in {self.directory} failed; the steps before it are as they were. Make room '
      'there, or repair what is named here, and run the same command again'
    ):
      self._manager.wait_until_finished()

  def close(self) -> None:
    """Waits for the save under way and ends Orbax's threads; raises as `wait` does."""
    try:
      self.wait()
    finally:
      self._manager.close()

  def __enter__(self) -> 'CheckpointDirectory':
    return self

  def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
    try:
      self.close()
    except StorageError as failure:
      if error is None:
        raise
      error.add_note(str(failure))  # the first error is the one to see


def writable_directory(path: str | os.PathLike) -> pathlib.Path:
  """Makes a directory and writes in it once; returns its absolute path.

  Raises:
    StorageError: saying what stands in the way.
  """
  directory = _local_path(path)
  try:
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=directory) as trial:
      trial.write(bytes(4096))
      trial.flush()
      os.fsync(trial.fileno())
  except OSError as error:
    reason = error.strerror or str(error)
    if isinstance(error, FileExistsError | NotADirectoryError):
      reason = 'there is a file of that name, or above it'
    raise StorageError(
      f'--model_dir={os.fspath(path)} must be a directory that can be written, but {directory} '
      f'cannot: {reason}. Nothing was changed. Name another --model_dir, or make room there.'
    ) from error
  return directory


def _local_path(path: str | os.PathLike) -> pathlib.Path:
  if '://' in os.fspath(path):
    raise StorageError(
      f'--model_dir={os.fspath(path)} is the address of a bucket, and a run needs a directory: '
      'mount the bucket (for instance with gcsfuse) and give the path where it is mounted.'
    )
  return pathlib.Path(os.path.abspath(os.path.expanduser(path)))


def _find_steps(directory: pathlib.Path) -> tuple[list[int], list[int]]:
  """(steps that are whole, steps that are not) of a directory which need not exist."""
  whole, damaged = [], []
  if directory.is_dir():
    for place in directory.iterdir():
      if place.name.isdecimal() and place.name == str(int(place.name)):
        is_whole = all((place / part).is_file() for part in _PARTS)
        (whole if is_whole else damaged).append(int(place.name))
  return sorted(whole), sorted(damaged)


def _set_aside(directory: pathlib.Path, steps: list[int], refuge: pathlib.Path) -> None:
  with _as_storage_error(f'The damaged steps of {directory} cannot be moved to {refuge}'):
    refuge.mkdir(exist_ok=True)
    for step in steps:
      goal, copies = refuge / str(step), 0
      while goal.exists():
        copies += 1
        goal = refuge / f'{step}.{copies}'
      (directory / str(step)).rename(goal)
      logging.warning('Step %d in %s is not whole; it was moved to %s', step, directory, goal)


def _without_empty_arrays(tree: Any) -> Any:
  """None in the place of arrays without elements, which Orbax refuses to save."""
  return jax.tree.map(lambda leaf: leaf if leaf.size else None, tree)


def _check_same_model(place: pathlib.Path, stored: Any, target: Any, partial: bool) -> None:
  if partial:
    stored = {field: tree for field, tree in stored.items() if field in target}
  found, expected = _describe(stored), _describe(target)
  different = [path for path in found | expected if found.get(path) != expected.get(path)]
  if not different:
    return
  lines = [
    f'  {path}: found {found.get(path, "nothing")}, expected {expected.get(path, "nothing")}'
    for path in different[:_DIFFERENCES_SHOWN]
  ]
  if len(different) > len(lines):
    lines.append(f'  and {len(different) - len(lines)} more')
  raise ConfigurationError(
    f'{place} is a checkpoint of another model; these leaves differ:\n' + '\n'.join(lines) + '\n'
    'Nothing was changed. Use another --model_dir, or the gin file that it was trained with.'
  )


def _describe(tree: Any) -> dict[str, str]:
  """{'params/mlp/w': 'float32[4, 8]', ...}, a container that holds no array being 'empty'."""

  def is_empty(node):
    return node is None or (isinstance(node, dict | list | tuple) and not node)

  leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_empty)[0]
  return {
    jax.tree_util.keystr(path, simple=True, separator='/'): 'empty'
    if is_empty(leaf)
    else f'{np.dtype(leaf.dtype).name}{list(leaf.shape)}'
    for path, leaf in leaves
  }


@contextlib.contextmanager
def _as_storage_error(message: str) -> Iterator[None]:
  try:
    yield
  except (OSError, ValueError, RuntimeError) as error:  # tensorstore's errors are ValueErrors
    raise StorageError(f'{message}: {error}') from error


def _list(steps: list[int]) -> str:
  return ', '.join(map(str, steps))


def _quiet_orbax() -> None:
  """Lets only Orbax's warnings into a run's log.

  It tells of each save in a dozen lines, and prints four stacks for an error that it also raises.
  """
  logger = logging.getLogger('absl')
  if _is_worth_showing not in logger.filters:
    logger.addFilter(_is_worth_showing)


def _is_worth_showing(record: logging.LogRecord) -> bool:
  return record.levelno == logging.WARNING or '/orbax/' not in record.pathname
