"""Failed saves: dropped, reported, and repeated at a later step on which all processes agree."""

from collections.abc import Callable
from concurrent.futures import Future
import math
import time

from valkyrie.distributed import heartbeat, processes
from valkyrie.errors import StorageError

_FIRST_PAUSE = 10.0  # seconds, doubled after each further failure
_LONGEST_PAUSE = 300.0


class FailedSaves:
  """The saves that have failed since the last one that succeeded."""

  def __init__(self, patience: float, place: str, say: Callable[[str], None]):
    """Failures are reported by `say`, and end the run after `patience` seconds."""
    self._patience, self._place, self._say = patience, place, say
    self._since: float | None = None
    self._count = 0
    self._last = ''  # the message of the last failure
    self._again_at: int | None = None  # the first step to save again
    # Of the training loop: its last step, its first step and time, and what it waits for.
    self._step = 0
    self._first: tuple[int, float] | None = None
    self._agreement: Future[None] | None = None

  @property
  def pause(self) -> float:
    """Seconds until the next save."""
    return min(_FIRST_PAUSE * 2 ** (self._count - 1), _LONGEST_PAUSE)

  def is_due(self, step: int) -> bool:
    """Whether to save step `step` in place of one that failed; call it after each step."""
    self._step = step
    self._first = self._first or (step, time.monotonic())
    if self._agreement is not None:
      self._agreement.result()
    return self._again_at is not None and step >= self._again_at

  def is_too_early(self, step: int) -> bool:
    return self._again_at is not None and step < self._again_at

  def try_again(self) -> None:
    """Records that a save begins: no other is due unless it fails."""
    self._again_at = None

  def forget(self) -> None:
    """Records that a save has succeeded."""
    self._since, self._count, self._last = None, 0, ''

  def check(self) -> None:
    """Raises a StorageError if the last save has failed; for the end of a run."""
    if self._last:
      raise StorageError(f'The last save has failed: {self._last}')

  def add(self, step: int, reason: str) -> None:
    """Records that the save of `step` has failed; all processes call it in the same order.

    The training loops of the processes are at different steps. Each process sends the step that it
    has finished, and waits after the next one until all know the largest: the next save follows it.
    Raises a StorageError if saves have failed for longer than `patience`.
    """
    now = time.monotonic()
    self._since = now if self._since is None else self._since
    self._count += 1
    # The loop writes its step before it reads the agreement: one of both sees the other.
    agreement = self._agreement = Future[None]()
    failed_for = now - self._since
    first, began = self._first or (self._step, now)
    pause = math.ceil(self.pause * (self._step - first) / max(now - began, 1e-9)) or 1  # in steps
    mine = self._step, pause, failed_for >= self._patience
    try:
      steps, pauses, over = zip(*processes.exchange('failed', mine), strict=True)
    except BaseException as error:
      agreement.set_exception(error)  # which ends the loop, too
      raise
    self._again_at = max(steps) + 1 + pauses[0]
    agreement.set_result(None)
    message = self._last = f'step {step} could not be saved in {self._place}: {reason}'
    if over[0]:
      heartbeat.beat(transient=True)
      raise StorageError(
        f'{message}. Saves have failed for {failed_for:.0f} s '
        f'(Checkpoints.patience={self._patience:g}); the steps before are unchanged. Make room '
        'there, or repair the cause, and run the same command again.'
      )
    self._say(
      f'{message}; the steps before are unchanged. The next save follows in about '
      f'{self.pause:.0f} s, after step {self._again_at} or at the end. If saves fail for '
      f'{self._patience - failed_for:.0f} s more, the run ends'
    )
