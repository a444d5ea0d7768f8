"""The commands of the launchers, from their dry runs, without a cluster."""

import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from valkyrie.distributed import supervisor
from valkyrie.main import parse_command_line

SCRIPTS = pathlib.Path(__file__).parents[2] / 'scripts'
FLAGS = ['--gin_file=gin/v4_32.gin', '--model_dir=/mnt/a run', "--gin.task='fineweb'"]


def dry_run(name, *arguments, **environment):
  command = [SCRIPTS / name, '--dry_run', *arguments, '--', *FLAGS]
  done = subprocess.run(
    command,
    capture_output=True,
    text=True,
    check=True,
    env={'PATH': '/usr/bin:/bin', **environment},
  )
  assert not done.stderr
  return done.stdout


def check_run(words):
  """Checks that each rank has a supervisor, and gets the flags of the command line."""
  at = words.index('valkyrie.distributed.supervisor')
  assert words[at - 3] != '&&' and words[at - 2 : at + 5] == [
    'python', '-m', 'valkyrie.distributed.supervisor', '--', 'python', '-m', 'valkyrie.main',
  ]  # fmt: skip
  flags, gin_flags = parse_command_line(words[at + 5 :])
  assert (flags.processes, flags.model_dir) == ('auto', '/mnt/a run')
  assert gin_flags == [FLAGS[-1]]


def test_the_tpu_vm_launcher_starts_and_stops_all_hosts():
  start, stop = (
    shlex.split(line)
    for line in dry_run('launch_tpu_vm', 'pod', 'us-central2-b', 'valkyrie').splitlines()
    if not line.startswith('#')
  )
  for words in (start, stop):
    assert words[:8] == [
      'gcloud', 'compute', 'tpus', 'tpu-vm', 'ssh', 'pod', '--zone=us-central2-b', '--worker=all',
    ]  # fmt: skip
  command = start[8].removeprefix('--command=')
  check_run(shlex.split(command))
  # The signal goes to the process number of the shell, which `exec` replaces by the supervisor.
  assert (
    'echo $$ > ~/.valkyrie.pid' in command
    and '&& exec python -m valkyrie.distributed.supervisor' in command
  )
  assert stop[8] == '--command=kill -TERM "$(cat ~/.valkyrie.pid)"'


def test_the_gke_launcher_restarts_after_the_retryable_exit_codes():
  words = shlex.split(dry_run('launch_gke', 'c', 'w', '2xv4-64', 'image', XPK_FLAGS='--zone=z'))
  assert words[:3] == ['xpk', 'workload', 'create']
  options = dict(word.split('=', 1) for word in words[3:])
  assert (options['--cluster'], options['--zone']) == ('c', 'z')
  assert (options['--tpu-type'], options['--num-slices']) == ('v4-64', '2')
  (one,) = (
    word
    for word in shlex.split(dry_run('launch_gke', 'c', 'w', 'v5litepod-16', 'image'))
    if word.startswith('--tpu-type=')
  )
  assert one == '--tpu-type=v5litepod-16'
  codes = options['--restart-on-exit-codes'].split(',')
  assert tuple(map(int, codes)) == supervisor.RETRYABLE
  assert options['--command'].startswith('exec python -m valkyrie.distributed')
  check_run(shlex.split(options['--command']))


def test_the_slurm_launcher_writes_a_job(tmp_path):
  text = dry_run('launch_slurm', '8', '4', SBATCH_FLAGS='--gpus-per-task=1')
  (tmp_path / 'job').write_text(text)
  subprocess.run(['bash', '-n', tmp_path / 'job'], check=True)
  lines = text.splitlines()
  options = {line.removeprefix('#SBATCH ') for line in lines if line.startswith('#SBATCH')}
  assert options >= {'--nodes=8', '--ntasks-per-node=4', '--signal=TERM@60', '--gpus-per-task=1'}
  assert options >= {'--requeue', '--open-mode=append'}
  words = shlex.split(lines[-1])
  assert words[:4] == ['exec', 'srun', '--kill-on-bad-exit=0', '--wait=60']
  assert words[4] == '${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}'
  check_run(words)


def test_the_trial_of_the_slurm_launcher_says_what_it_needs(tmp_path):
  done = subprocess.run(
    [sys.executable, '-m', 'faults.slurm_trial'],
    capture_output=True,
    text=True,
    check=False,
    env={'PATH': str(tmp_path), 'PYTHONPATH': f'{SCRIPTS.parent}/tests:{SCRIPTS}/experiments'},
  )
  assert done.returncode == 2 and 'apt install slurm-wlm munge' in done.stderr
  assert 'slurmctld' in done.stderr and 'Traceback' not in done.stderr


def test_the_flags_for_gpus_are_known_and_yield_to_those_set_before():
  """XLA ends a process that has an unknown flag, also one without a GPU."""
  program = (
    'import jax, os; jax.devices(); print(os.environ["XLA_FLAGS"], os.environ["NCCL_DEBUG"])'
  )
  done = subprocess.run(
    ['bash', '-c', f"source {SCRIPTS}/gpu_environment && exec {sys.executable} -c '{program}'"],
    capture_output=True,
    text=True,
    check=False,
    env={'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': '--xla_gpu_autotune_level=0', 'NCCL_DEBUG': 'INFO'},
  )
  *flags, debug = done.stdout.split()
  assert done.returncode == 0 and debug == 'INFO', done.stderr
  assert len(flags) > 1 and flags[-1] == '--xla_gpu_autotune_level=0'


@pytest.mark.parametrize('name', ['launch_tpu_vm', 'launch_gke', 'launch_slurm'])
def test_missing_arguments_are_a_usage_error(name):
  done = subprocess.run([SCRIPTS / name, '--dry_run'], capture_output=True, text=True, check=False)
  assert done.returncode == 2 and f'scripts/{name}' in done.stderr


@pytest.mark.parametrize('name', ['compare', 'report', 'supervise'])
def test_a_script_finds_the_environment_of_its_clone(tmp_path, name):
  """None is active: `python` is the system's, which has no packages, or is missing."""
  shutil.copytree(SCRIPTS, tmp_path / 'scripts')
  system = tmp_path / 'system'
  system.mkdir()
  (system / 'python').write_text('#!/bin/sh\nexit 1\n')
  (system / 'python').chmod(0o755)

  def started(path):
    command = ['bash', tmp_path / 'scripts' / name, '--flag']
    environment = {'PATH': f'{path}:/usr/bin:/bin'}
    return subprocess.run(
      command, capture_output=True, text=True, check=False, env=environment, cwd=system
    )

  done = started(system)
  assert done.returncode == 1
  assert f'make one by `bash scripts/quickstart` in {tmp_path}' in done.stderr
  environment = tmp_path / '.venv/bin'
  environment.mkdir(parents=True)
  (environment / 'python').write_text('#!/bin/sh\necho of the clone "$@"\n')
  (environment / 'python').chmod(0o755)
  assert re.fullmatch(r'of the clone -m valkyrie\.[\w.]+ --flag\n', started(system).stdout)
  (system / 'python').write_text('#!/bin/sh\necho active "$@"\n')
  assert started(system).stdout.splitlines()[-1].startswith('active -m valkyrie.')
