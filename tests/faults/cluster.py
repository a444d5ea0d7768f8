"""A SLURM cluster of one node, this machine, in a folder."""

from collections.abc import Callable, Iterator
import contextlib
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import time

from support.held_ports import held_port

from faults.table import Unavailable

PROGRAMS = ('munged', 'slurmctld', 'slurmd', 'sbatch', 'srun', 'scontrol', 'scancel')
LOST_SECONDS = 10  # of silence, after which a node counts as lost

# A requeued job waits until its old credentials are void (cred_expire, by default two minutes). The
# plugins need neither control groups nor a database.
CONFIGURATION = """
ClusterName=trial
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmdTimeout={lost}
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,bf_interval=2
ReturnToService=2
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={host} NodeAddr=127.0.0.1 CPUs=2
PartitionName=usual Nodes=ALL PriorityTier=1 Default=YES
PartitionName=urgent Nodes=ALL PriorityTier=2
"""


class Cluster:
  """A context manager that starts munged, slurmctld and slurmd, and ends them.

  Attributes:
    environment: the variables with which SLURM's commands find the cluster.

  Raises:
    Unavailable: a program is missing, or the node does not become idle.
  """

  def __init__(self, folder: pathlib.Path):
    """Makes the files of the cluster in an empty folder."""
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
      raise Unavailable(
        f'{", ".join(missing)} not found. On Debian: apt install slurm-wlm munge (as root).'
      )
    self._folder = folder
    self._daemons: dict[str, subprocess.Popen] = {}
    self.environment = {'SLURM_CONF': str(folder / 'slurm.conf')}
    for name in ('state', 'spool'):
      (folder / name).mkdir()
    key = folder / 'munge.key'
    key.touch(0o600)
    key.write_bytes(os.urandom(1024))
    user = subprocess.run(['id', '-un'], capture_output=True, text=True, check=True).stdout.strip()
    host = socket.gethostname().partition('.')[0]
    ports = [held_port(), held_port()]
    text = CONFIGURATION.format(folder=folder, host=host, user=user, ports=ports, lost=LOST_SECONDS)
    (folder / 'slurm.conf').write_text(text)

  def __enter__(self) -> 'Cluster':
    place = self._folder / 'munge'
    with contextlib.ExitStack() as stack:
      stack.callback(self._stop)
      # --force: other users cannot reach the folder, which munged would refuse.
      self._start('munged', '--foreground', '--force', *(
        f'--{name}={place}.{name.partition("-")[0]}'
        for name in ('key-file', 'socket', 'pid-file', 'log-file', 'seed-file')
      ))  # fmt: skip
      until('munged has a socket', place.with_suffix('.socket').exists)
      self._start('slurmctld', '-D')
      self.start_node()
      stack.pop_all()
    return self

  def __exit__(self, *_) -> None:
    self._stop()

  def start_node(self) -> None:
    """Starts slurmd, and waits until the node takes jobs."""
    self._start('slurmd', '-D')
    until('the node is up', lambda: self._state_of_the_node() in ('IDLE', 'MIXED', 'ALLOCATED'))

  def lose_node(self) -> None:
    """Kills slurmd and the jobs of the node, as a power failure does, until SLURM has noticed."""
    self._kill_jobs(self._daemons.pop('slurmd'))
    until('the node is lost', lambda: self._state_of_the_node().startswith('DOWN'))

  def ask(self, *command: str) -> dict[str, str]:
    """Runs a command of SLURM, and returns the NAME=VALUE pairs that it prints."""
    return dict(re.findall(r'(\w+)=(\S*)', self.run(*command, check=False)))

  def run(self, *command: str, check: bool = True) -> str:
    """Runs a command of SLURM, and returns its output."""
    environment = {**os.environ, **self.environment}
    return subprocess.run(
      command, stdout=subprocess.PIPE, text=True, check=check, env=environment
    ).stdout

  def job(self, number: str) -> dict[str, str]:
    """The facts of a job, such as its JobState."""
    return self.ask('scontrol', 'show', 'job', number)

  def processes(self) -> Iterator[tuple[int, list[str], set[str]]]:
    """The (number, command line, environment) of each process of the jobs.

    They know the cluster, as its daemons do, and are in sessions of their own.
    """
    mine = f'SLURM_CONF={self.environment["SLURM_CONF"]}'
    for place in pathlib.Path('/proc').glob('[0-9]*'):
      with contextlib.suppress(OSError):  # it has ended, or belongs to another user
        command, environment = (
          (place / name).read_text(errors='replace').split('\0') for name in ('cmdline', 'environ')
        )
        if mine in environment and os.getsid(int(place.name)) != os.getsid(0):
          yield int(place.name), command, set(environment)

  def _state_of_the_node(self) -> str:
    return self.ask('scontrol', 'show', 'node').get('State', '')

  def _start(self, name: str, *flags: str) -> None:
    with open(self._folder / f'{name}.log', 'ab') as log:
      self._daemons[name] = subprocess.Popen(
        [name, *flags],
        env={**os.environ, **self.environment},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
      )

  def _stop(self) -> None:
    if 'slurmd' in self._daemons:
      self._kill_jobs(self._daemons.pop('slurmd'))
    for daemon in reversed(self._daemons.values()):  # slurmctld needs munged until its end
      daemon.terminate()
      daemon.wait()

  def _kill_jobs(self, slurmd: subprocess.Popen) -> None:
    """Kills slurmd and all processes that it has started, as if at once.

    They are stopped first, so that none reacts to the end of another one. Children, which have
    higher numbers, are killed before their parents: the kernel lets a stopped process go on when
    its parent dies, and srun's watchdog would then cancel the step, even after it was requeued.
    """
    slurmd.kill()
    slurmd.wait()
    for number in (signal.SIGSTOP, signal.SIGKILL):
      for pid in sorted((pid for pid, _, _ in self.processes()), reverse=True):
        with contextlib.suppress(ProcessLookupError):
          os.kill(pid, number)


def until(what: str, condition: Callable[[], object], seconds: float = 300.0) -> None:
  """Waits until a condition holds; raises AssertionError if it does not in time."""
  end = time.monotonic() + seconds
  while not condition():
    if time.monotonic() > end:
      raise AssertionError(f'after {seconds:g} s it is not true that {what}')
    time.sleep(0.2)
