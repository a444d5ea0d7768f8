"""Writes the steps of one run: every process its arrays, the one with the lock all other files."""

from collections.abc import Callable, Sequence
import contextlib
import json
import pathlib
import shutil
from typing import Any

from valkyrie.checkpoint import steps
from valkyrie.checkpoint.model_dir import TrainerLock
from valkyrie.checkpoint.state_files import StateFiles
from valkyrie.errors import reason_of


class StepWriter:
  """Writes one step at a time, and deletes steps.

  What fails is returned as a text, '' for nothing, since all processes have to agree on it. A
  StorageError is raised if the directory is no longer that of the run; nothing is written then.

  Attributes:
    lock: the lock of the run, in the process that writes more than arrays; None in others.
  """

  def __init__(
    self,
    directory: pathlib.Path,
    files: StateFiles,
    lock: TrainerLock | None,
    say: Callable[[str], None],
  ):
    """Writes into `directory`; `say` prints a line about a step that cannot be deleted."""
    self.lock = lock
    self._directory, self._files, self._say = directory, files, say
    self._own: set[int] = set()  # the steps that were here at first, or saved since
    self._reported: set[str] = set()

  def open(self) -> None:
    """Makes the directory, and deletes what earlier runs have not finished."""
    self._directory.mkdir(exist_ok=True)
    self._own.update(steps.find(self._directory))
    self._report(steps.clear_litter(self._directory))

  def begin(self, step: int) -> str:
    """Makes the directory of a step."""
    if not self.lock:
      return ''
    self.lock.check()
    return _problem(steps.begin, self._directory, step)

  def write(self, step: int, state: Any) -> str:
    """Copies the arrays of a step to the host, and starts to write them."""
    return _problem(self._files.write, steps.unfinished(self._directory, step) / 'state', state)

  def finish(self, step: int, record: dict[str, Any]) -> str:
    """Waits for the arrays of a step, and gives it its name."""
    problem = _problem(self._files.wait)
    if problem or not self.lock:
      return problem
    self.lock.check()
    return _problem(self._name, step, record)

  def _name(self, step: int, record: dict[str, Any]) -> None:
    place = steps.unfinished(self._directory, step)
    (place / 'record.json').write_text(json.dumps(record, indent=2))
    steps.finish(self._directory, step)
    self._own.add(step)

  def discard(self, step: int) -> None:
    """Deletes what a failed save has written."""
    # Orbax may still write there; without the wait its error would appear in its next call.
    with contextlib.suppress(Exception):
      self._files.wait()
    if self.lock and self.lock.is_in_place:
      shutil.rmtree(steps.unfinished(self._directory, step), ignore_errors=True)

  def saved(self) -> list[int]:
    """The steps of this run."""
    return [step for step in steps.find(self._directory) if step in self._own]

  def delete(self, numbers: Sequence[int]) -> None:
    """Deletes steps, and what failed saves and deletions have left."""
    self._report(steps.delete(self._directory, numbers) + steps.clear_litter(self._directory))

  def _report(self, problems: Sequence[str]) -> None:
    """Says, once, what cannot be deleted: it does no harm."""
    for problem in problems:
      if problem not in self._reported:
        self._reported.add(problem)
        self._say(f'{problem}; it stays, and each save tries again')


def _problem(write: Callable[..., None], *arguments: Any) -> str:
  """Why `write` fails, or ''. Tensorstore reports errors of files as the last two types."""
  try:
    write(*arguments)
  except (OSError, ValueError, RuntimeError) as error:
    return reason_of(error)
  return ''
