"""Writes the steps of one run: every process its arrays, the one with the lock all other files."""

from collections.abc import Callable, Sequence
import contextlib
import json
from typing import Any

from valkyrie.checkpoint.literal_path import without_descriptors
from valkyrie.checkpoint.state_files import StateFiles
from valkyrie.checkpoint.steps import Lock, Steps
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
    steps: Steps,
    files: StateFiles,
    lock: Lock | None,
    say: Callable[[str], None],
  ):
    """Writes to `steps`; `say` prints a line about a step that cannot be deleted."""
    self.lock = lock
    self._steps, self._files, self._say = steps, files, say
    self._own: set[int] = set()  # the steps that were here at first, or saved since
    self._reported: set[str] = set()

  def open(self) -> None:
    """Makes the directory, and deletes what earlier runs have not finished."""
    self._steps.open()
    self._own.update(self._steps.find())
    self._report(self._steps.clear_litter())

  def begin(self, step: int) -> str:
    """Makes the directory of a step."""
    if not self.lock:
      return ''
    self.lock.check()
    return _problem(self._steps.begin, step)

  def write(self, step: int, state: Any) -> str:
    """Copies the arrays of a step to the host, and starts to write them."""
    return _problem(self._write, step, state)

  def _write(self, step: int, state: Any) -> None:
    self._files.write(self._place(step), state)

  def _place(self, step: int) -> Any:
    return self._steps.unfinished(step) / 'state'

  def complete(self, step: int) -> str:
    """Waits for the arrays of a step, and opens them."""
    return _problem(self._files.wait) or _problem(self._files.check_written, self._place(step))

  def finish(self, step: int, record: dict[str, Any]) -> str:
    """Gives a complete step its name."""
    if not self.lock:
      return ''
    self.lock.check()
    problem = _problem(self._steps.finish, step, json.dumps(record, indent=2).encode())
    if not problem:
      self._own.add(step)
    return problem

  def discard(self, step: int) -> None:
    """Deletes what a failed save has written."""
    # Orbax may still write there; without the wait its error would appear in its next call.
    with contextlib.suppress(Exception):
      self._files.wait()
    if self.lock and self.lock.is_in_place:
      self._steps.discard(step)

  def saved(self) -> list[int]:
    """The steps of this run."""
    return [step for step in self._steps.find() if step in self._own]

  def delete(self, numbers: Sequence[int]) -> None:
    """Deletes steps, and what failed saves and deletions have left."""
    self._report(self._steps.delete(numbers) + self._steps.clear_litter())

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
    return without_descriptors(reason_of(error))
  return ''
