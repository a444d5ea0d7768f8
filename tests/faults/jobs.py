"""Runs as SLURM jobs of scripts/launch_slurm, of one task or two."""

import functools
import os
import pathlib
import subprocess
import sys

from faults.cluster import Cluster, until
from faults.harness import ROOT, Harness
from faults.pair import expected
from valkyrie.errors import Preempted

PREEMPTED, COMPLETED = Preempted.exit_code, 'COMPLETED 0:0'
_ENDED = ('COMPLETED', 'FAILED', 'CANCELLED', 'TIMEOUT', 'NODE_FAIL')


class Jobs(Harness):
  """A harness whose runs can be jobs of a cluster. Their tasks append to the same files."""

  def __init__(self, folder: pathlib.Path, seed: int, cluster: Cluster):
    super().__init__(folder, seed)
    self.cluster = cluster

  def submit(self, name: str, *flags: str, tasks: int, options: str = '') -> str:
    """Submits run `name` by scripts/launch_slurm, and returns the number of the job."""
    _, _, _, *arguments = self.command(name, *flags, partition='zero1' if tasks > 1 else 'single')
    path = f'{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ["PATH"]}'
    environment = {
      **self.environment(),
      **self.cluster.environment,
      'PATH': path,
      'SBATCH_FLAGS': f'--output={self.folder / name}.log {options}',
    }
    done = subprocess.run(
      [ROOT / 'scripts' / 'launch_slurm', '1', str(tasks), '--', *arguments],
      cwd=ROOT,
      env=environment,
      stdout=subprocess.PIPE,
      text=True,
      check=True,
    )
    return done.stdout.split()[-1]

  def started(self, *flags: str, tasks: int, step: int = 6, options: str = '') -> tuple[str, str]:
    """Submits a new run, and waits for one of its steps: (its name, the number of the job)."""
    name = self.new()
    job = self.submit(name, *flags, tasks=tasks, options=options)

    def reached():
      if (state := self.state(job)).startswith(_ENDED):
        raise AssertionError(f'the job is {state}: {self.said(name)[-800:]}')
      return self.newest(name) >= step

    until(f'step {step} is done', reached)
    return name, job

  def newest(self, name: str) -> int:
    """The newest step that a run has made."""
    return max(dict(self.hashes(name)), default=0)

  def state(self, job: str) -> str:
    """The state of a job and its exit code, such as `COMPLETED`."""
    facts = self.cluster.job(job)
    return f'{facts["JobState"]} {facts["ExitCode"]}'

  def finished(self, job: str) -> str:
    """The state of a job at its end."""
    until('the job has ended', lambda: self.state(job).startswith(_ENDED))
    return self.state(job)

  def continued(self, name: str, job: str, tasks: int) -> str | None:
    """Why a job did not end as the undisturbed run does; None if its states are the same bits."""
    if (state := self.finished(job)) != COMPLETED:
      return f'the job is {state}: {self.said(name)[-800:]}'
    found, whole = set(self.hashes(name)), undisturbed(self, tasks)
    if strange := sorted(found - whole):
      return f'the state after step {strange[0][0]} differs'
    if missing := sorted(whole - found):
      return f'step {missing[0][0]} is missing'
    return None

  def again(self, name: str, tasks: int) -> str | None:
    """Submits a run again; `continued` of that job."""
    return self.continued(name, self.submit(name, tasks=tasks), tasks)

  def repeated(self, name: str) -> int:
    """The number of states that a run has computed twice."""
    return len(self.hashes(name)) - len(set(self.hashes(name)))

  def unsaved(self, name: str, tasks: int) -> str | None:
    """Why the processes of a run did not stop as asked; None if they have, and saved its step."""
    codes = [end['code'] for end in self.endings(name)]
    if codes != [PREEMPTED] * tasks:
      return f'the processes ended with {codes}'
    saved, made = max(self.saved(name), default=0), self.newest(name)
    return None if saved == made else f'step {made} was made, but {saved} is saved'


@functools.cache
def undisturbed(harness: Jobs, tasks: int) -> set[tuple[int, str]]:
  """The (step, hash) of all processes of an undisturbed run without SLURM."""
  runs = [harness.expected] if tasks == 1 else expected(harness)
  return {state for run in runs for state in run.items()}
