"""Runs of two processes, each on its own core."""

from collections.abc import Sequence
import functools
import subprocess
import sys

from support.held_ports import held_port

from faults.harness import CORES, Harness, ended, keep_to

BOTH = (0, 1)
NO_FLAGS = ((), ())  # of each process
DEADLINE = 5  # seconds between heartbeats in a step, under a supervisor
_SUPERVISE = (
  sys.executable, '-m', 'valkyrie.distributed.supervisor',
  f'--step_seconds={DEADLINE}', '--pause_seconds=1',
  '--',
)  # fmt: skip


class Pair:
  """A run of two processes, with the hashes of the shards of each."""

  def __init__(self, harness: Harness):
    self.harness = harness
    self.name = harness.new()

  def start(
    self,
    *flags: str,
    alone: Sequence[Sequence[str]] = NO_FLAGS,
    each: Sequence[dict] = ({}, {}),
    supervised: bool = False,
  ) -> list[subprocess.Popen]:
    """Starts both processes.

    Args:
      flags: flags of both.
      alone: flags of each.
      each: options of `Harness.start` of each.
      supervised: whether each has a supervisor.
    """
    address = f'127.0.0.1:{held_port()}'
    return [
      self.harness.start(
        self.of(process),
        f'--model_dir={self.harness.folder / self.name}',
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
    """Runs both processes to their end."""
    codes = [ended(process) for process in self.start(*flags, **options)]
    if any(codes):
      raise AssertionError(f'exit codes {codes}, expected 0: {self.said()[-800:]}')

  def of(self, process: int) -> str:
    """The name of the files of a process."""
    return f'{self.name}.{process}'

  def said(self, process: int | None = None) -> str:
    """The output of one process, or of both."""
    return ''.join(self.harness.said(self.of(n)) for n in (BOTH if process is None else [process]))

  def difference(self, whole: bool = True) -> str | None:
    """The first difference from an undisturbed pair; None if all states are bit-identical."""
    for process, hashes in zip(BOTH, expected(self.harness), strict=True):
      if failure := self.harness.difference(self.of(process), whole, hashes):
        return f'process {process}: {failure}'
    return None

  def forget(self) -> None:
    """Deletes the files of the pair."""
    self.harness.forget(self.name)


@functools.cache
def expected(harness: Harness) -> list[dict[int, str]]:
  """{step: hash} of each process of an undisturbed pair."""
  pair = Pair(harness)
  pair.run()
  return [dict(harness.hashes(pair.of(process))) for process in BOTH]
