"""Failed saves: dropped, reported, and repeated at a later step on which all processes agree."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
import errno
import math
import os
import time

from valkyrie.distributed import heartbeat, processes
from valkyrie.errors import StorageError

_FULL = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))
_FIRST_PAUSE = 10.0  # seconds, doubled after each further failure
_LONGEST_PAUSE = 300.0


def first(problems: Sequence[str]) -> str:
  """The first problem of a process; '' if there is none."""
  return next(filter(None, problems), '')


def is_full(problems: Sequence[str]) -> bool:
  """Whether a problem of a process is that its disk is full."""
  text = '\n'.join(problems)
  return any(reason in text for reason in _FULL)


class FailedSaves:
  """The saves that have failed since the last one that succeeded."""

  def __init__(self, patience: float, place: str, say: Callable[[str], None]):
    """Failures are reported by `say`, and end the run after `patience` seconds."""
    self._patience = patience
    self._place = place
    self._say = say
    self._since: float | None = None
    self._count = 0
    self._last = ''  # the message of the last failure
    self._again_at: int | None = None  # the first step to save again
    self._step = 0  # the last step of the training loop
    self._first_step = 0  # of the training loop, and the time of its end
    self._first_time: float | None = None
    self._agreement: Future[None] | None = None  # the training loop waits for it

  @property
  def pause(self) -> float:
    """Seconds until the next save."""
    pause = _FIRST_PAUSE * 2 ** (self._count - 1)
    return min(pause, _LONGEST_PAUSE)

  def is_due(self, step: int) -> bool:
    """Whether to save step `step` in place of one that failed; call it after each step."""
    self._step = step
    if self._first_time is None:
      self._first_step = step
      self._first_time = time.monotonic()
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
    self._since = None
    self._count = 0
    self._last = ''

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
    time_now = time.monotonic()
    if self._since is None:
      self._since = time_now
    self._count += 1
    # The loop writes its step before it reads the agreement: one of both sees the other.
    agreement = Future[None]()
    self._agreement = agreement
    failed_for = time_now - self._since
    report = (self._step, self._pause_in_steps(time_now), failed_for >= self._patience)
    try:
      reports = processes.exchange('failed', report)
    except BaseException as error:
      agreement.set_exception(error)  # which ends the loop, too
      raise
    last_step = max(finished for finished, _, _ in reports)
    _, pause, is_over = reports[0]  # process 0 decides, since clocks differ
    self._again_at = last_step + 1 + pause
    agreement.set_result(None)
    message = f'step {step} could not be saved in {self._place}: {reason}'
    self._last = message
    if is_over:
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

  def _pause_in_steps(self, time_now: float) -> int:
    """The steps that the training loop takes in `pause` seconds, at least 1."""
    if self._first_time is None:
      return 1
    steps = self._step - self._first_step
    seconds = max(time_now - self._first_time, 1e-9)
    return math.ceil(self.pause * steps / seconds) or 1
