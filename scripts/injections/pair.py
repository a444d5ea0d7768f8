"""Two processes that train as one, each on a core."""

from collections.abc import Sequence
import functools
import socket
import subprocess
import sys

from injections.laboratory import CORES, Laboratory, ended, keep_to

BOTH = (0, 1)
NOTHING = ((), ())  # for each of both
DEADLINE = 5  # seconds in which a step of a supervised one must give a sign of life
_SUPERVISE = (
  sys.executable, '-m', 'valkyrie.distributed.supervisor',
  f'--step_seconds={DEADLINE}', '--pause_seconds=1',
  '--',
)  # fmt: skip


class Pair:
  """A run of two processes, of each of which the hashes of what it holds are kept."""

  def __init__(self, lab: Laboratory):
    self.lab = lab
    self.name = lab.new()

  def start(
    self,
    *flags: str,
    alone: Sequence[Sequence[str]] = NOTHING,
    each: Sequence[dict] = ({}, {}),
    supervised: bool = False,
  ) -> list[subprocess.Popen]:
    """Starts both: with flags for both and `alone` for each, and options `each`."""
    address = _free_address()
    return [
      self.lab.start(
        self.of(process),
        f'--model_dir={self.lab.folder / self.name}',
        f'--coordinator={address}',
        '--processes=2',
        f'--process={process}',
        '--join_seconds=60',
        *flags,
        *alone[process],
        partition='zero1',
        prefix=_SUPERVISE if supervised else (),
        preexec_fn=functools.partial(keep_to, CORES[process % len(CORES)]),
        **each[process],
      )
      for process in BOTH
    ]

  def run(self, *flags: str, **options) -> None:
    """Runs both to their end."""
    found = [ended(process) for process in self.start(*flags, **options)]
    if any(found):
      raise AssertionError(f'exit codes {found}, expected 0: {self.said()[-800:]}')

  def of(self, process: int) -> str:
    """The name of what one of the two leaves."""
    return f'{self.name}.{process}'

  def said(self, process: int | None = None) -> str:
    """What one of them has said, or both."""
    return ''.join(self.lab.said(self.of(n)) for n in (BOTH if process is None else [process]))

  def difference(self, whole: bool = True) -> str | None:
    """What differs from the pair that nothing was done to; None where nothing does."""
    for process, hashes in zip(BOTH, expected(self.lab), strict=True):
      if found := self.lab.difference(self.of(process), whole, hashes):
        return f'process {process}: {found}'
    return None

  def forget(self) -> None:
    """Deletes what is left of it."""
    self.lab.forget(self.name)


def _free_address() -> str:
  with socket.socket() as one:
    one.bind(('127.0.0.1', 0))
    return f'127.0.0.1:{one.getsockname()[1]}'


@functools.cache
def expected(lab: Laboratory) -> list[dict[int, str]]:
  """Of each of a pair that nothing was done to, {step: hash}."""
  pair = Pair(lab)
  pair.run()
  return [dict(lab.hashes(pair.of(process))) for process in BOTH]
