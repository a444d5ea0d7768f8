"""Jobs that SLURM cancels, moves and ends, and jobs that lose a process or their node."""

from collections.abc import Callable, Iterator
import os
import signal
import time

from faults.jobs import PREEMPTED, Jobs
from faults.table import Trial, fault

TASKS = (1, 2)  # of the jobs of most rows
SUPERVISOR, TRAINER = 'valkyrie.distributed.supervisor', 'valkyrie.main'
SLOW = '--gin.Pace.seconds=0.5'
MINUTES = 2  # SLURM's time limit of a job; the launcher's warning leaves one of them
KILL_WAIT = 30  # seconds from SIGTERM to SIGKILL, by SLURM's default
SAVES = 'saves, is queued again, continues bit for bit'


@fault('a job that nothing disturbs', 'COMPLETED, with the states of the run without SLURM', full=2)
def completed(harness: Jobs, times: int) -> Iterator[Trial]:
  for tasks in TASKS[:times]:
    name = harness.new()
    yield Trial(f'tasks: {tasks}', harness.again(name, tasks))
    harness.forget(name)


@fault(
  'scancel',
  'saves, is CANCELLED; the same command continues bit for bit',
  full=2,
  unit=f's until it ended, limit {KILL_WAIT}',
)
def cancelled(harness: Jobs, times: int) -> Iterator[Trial]:
  for tasks in TASKS[:times]:
    name, job = harness.started(SLOW, tasks=tasks)
    began = time.monotonic()
    harness.cluster.run('scancel', job)
    state = harness.finished(job)
    seconds = time.monotonic() - began
    failure = harness.unsaved(name, tasks)
    if not state.startswith('CANCELLED'):
      failure = f'the job is {state}'
    yield Trial(f'tasks: {tasks}', failure or _again(harness, name, tasks), seconds)
    harness.forget(name)


def _again(harness: Jobs, name: str, tasks: int) -> str | None:
  return harness.again(name, tasks) or _twice(harness, name)


def _twice(harness: Jobs, name: str) -> str | None:
  return f'{count} states were computed twice' if (count := harness.repeated(name)) else None


def _moved(harness: Jobs, times: int, move: Callable[[str], object]) -> Iterator[Trial]:
  """Jobs that `move(job)` stops; each must save, and go on under its number."""
  for tasks in TASKS[:times]:
    name, job = harness.started(SLOW, tasks=tasks)
    move(job)
    failure = harness.continued(name, job, tasks) or _twice(harness, name)
    codes = [end['code'] for end in harness.endings(name)]
    if codes != [PREEMPTED] * tasks + [0] * tasks:
      failure = f'the processes ended with {codes}'
    yield Trial(f'tasks: {tasks}', failure)
    harness.forget(name)


@fault('scontrol requeue', SAVES, full=2)
def requeued(harness: Jobs, times: int) -> Iterator[Trial]:
  yield from _moved(harness, times, lambda job: harness.cluster.run('scontrol', 'requeue', job))


@fault('preemption by a job of a partition with a higher priority', SAVES, full=2)
def preempted(harness: Jobs, times: int) -> Iterator[Trial]:
  urgent = ('--partition=urgent', '--exclusive', '--output=/dev/null', '--wrap=sleep 1')
  yield from _moved(harness, times, lambda job: harness.cluster.run('sbatch', *urgent))


@fault(
  'the time limit',
  'saves before it; a job that waited for the end of the first continues bit for bit',
  full=2,
  unit=f's until it ended, limit {60 * MINUTES}',
)
def out_of_time(harness: Jobs, times: int) -> Iterator[Trial]:
  for tasks in TASKS[:times]:
    began = time.monotonic()
    name, first = harness.started(
      '--gin.Pace.seconds=5', tasks=tasks, step=1, options=f'--time={MINUTES}'
    )
    second = harness.submit(name, tasks=tasks, options='--dependency=singleton')
    state = harness.finished(first)
    seconds = time.monotonic() - began
    failure = harness.unsaved(name, tasks)
    if state != f'FAILED {PREEMPTED}:0':
      failure = f'the first job is {state}'
    failure = failure or harness.continued(name, second, tasks) or _twice(harness, name)
    yield Trial(f'tasks: {tasks}', failure, seconds)
    harness.forget(name)


def _kill(harness: Jobs, rank: int, *modules: str) -> None:
  """Kills the processes of a task that run these modules."""
  for pid, command, environment in harness.cluster.processes():
    if f'SLURM_PROCID={rank}' in environment and command[1:2] == ['-m'] and command[2] in modules:
      os.kill(pid, signal.SIGKILL)


@fault('two tasks: kill -9 of one trainer', 'both are restarted, continue bit for bit', full=2)
def trainer_killed(harness: Jobs, times: int) -> Iterator[Trial]:
  for rank in range(times):
    name, job = harness.started(SLOW, tasks=2)
    _kill(harness, rank, TRAINER)
    failure = harness.continued(name, job, 2)
    if 'exit code 137' not in harness.said(name):
      failure = 'it was never killed'
    yield Trial(f'task {rank}', failure)
    harness.forget(name)


@fault(
  'two tasks: kill -9 of one supervisor and its trainer',
  'the job is FAILED, and names the task; the same command continues bit for bit',
  full=2,
  unit='s until it ended',
)
def task_killed(harness: Jobs, times: int) -> Iterator[Trial]:
  for rank in range(times):
    name, job = harness.started(SLOW, tasks=2)
    began = time.monotonic()
    _kill(harness, rank, SUPERVISOR, TRAINER)
    state = harness.finished(job)
    seconds = time.monotonic() - began
    failure = harness.again(name, 2)
    if not state.startswith('FAILED') or f'task {rank}: Killed' not in harness.said(name):
      failure = f'the job is {state}: {harness.said(name)[-800:]}'
    yield Trial(f'task {rank}', failure, seconds)
    harness.forget(name)


@fault('a node that loses its power', 'the job is queued again, continues bit for bit', full=2)
def node_lost(harness: Jobs, times: int) -> Iterator[Trial]:
  for tasks in TASKS[:times]:
    name, job = harness.started(SLOW, tasks=tasks)
    harness.cluster.lose_node()
    harness.cluster.start_node()
    failure = harness.continued(name, job, tasks)
    if harness.cluster.job(job)['Restarts'] != '1':
      failure = 'the job was not queued again'
    yield Trial(f'tasks: {tasks}', failure)
    harness.forget(name)
