"""Machines without locks, shared memory, open files or a home, and disks that cannot be read."""

from collections.abc import Iterator
import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys

from faults.file_systems import NO_LOCKS
from faults.harness import Harness, ended, mounted, wait_for
from faults.table import Trial, Unavailable, fault
from valkyrie.data import token_store

STORAGE, CONFIGURATION = 74, 78
BITS = 'bit for bit'


def _refusal(harness: Harness, name: str, code: int, expected: int, words: str) -> str | None:
  """Why an end is not the one that is expected, explained by these words."""
  said = harness.said(name)
  if code != expected or words not in said or 'Traceback' in said:
    return f'exit code {code}: {said[-400:]}'
  return None


def _texts(harness: Harness) -> pathlib.Path:
  """A new folder with two texts."""
  folder = harness.folder / harness.new()
  folder.mkdir()
  for name in ('a', 'b'):
    (folder / f'{name}.txt').write_text(f'The text {name}.')
  return folder


def _builder(
  harness: Harness,
  folder: pathlib.Path,
  *more: str,
  prefix: tuple[str, ...] = (),
  environment: dict[str, str] | None = None,
) -> subprocess.Popen[str]:
  """Starts to build FOLDER/store of the texts in a folder."""
  command = [*prefix, sys.executable, '-m', 'valkyrie.data.build_store', '--task=text']
  command += ['--shards=2', f'--source={folder}/*.txt', f'--output={folder / "store"}']
  command += ['--option=held_out=1e-9', *more]
  world = harness.environment(1, **(environment or {}))
  null, pipe = subprocess.DEVNULL, subprocess.PIPE
  return subprocess.Popen(command, env=world, stdout=null, stderr=pipe, text=True)


def _built(process: subprocess.Popen[str], folder: pathlib.Path, words: str = '') -> str | None:
  """Waits for the end of a build that says `words`; why its store is not right, None if it is."""
  _, said = process.communicate()
  if process.returncode or words not in said:
    return f'exit code {process.returncode}: {said[-400:]}'
  found = token_store.verify(folder / 'store')
  return None if found['documents'] == 2 else f'the store has {found["documents"]} documents'


@fault('no locks: a token store is built', 'is built, and a line says what is missing', full=1)
def build_without_locks(harness: Harness, times: int) -> Iterator[Trial]:
  for _ in range(times):
    folder = _texts(harness)
    world = harness.customized(f'{folder.name}.python', NO_LOCKS)
    process = _builder(harness, folder, environment=world)
    yield Trial('ENOLCK', _built(process, folder, 'has no locks'))
    harness.forget(folder.name)


def _with_shared_memory(command: str) -> tuple[str, ...]:
  """A prefix under which a command has a /dev/shm of its own, changed by a shell command."""
  own = 'mount -t tmpfs -o size=4k tmpfs /dev/shm'
  prefix = ('unshare', '--mount', 'sh', '-c', f'{own} && {command} && exec "$@"', 'sh')
  done = subprocess.run([*prefix, 'true'], capture_output=True, text=True, check=False)
  if done.returncode:
    raise Unavailable(f'a process cannot have a /dev/shm of its own here: {done.stderr.strip()}')
  return prefix


@fault(
  'no room in /dev/shm, or no right to write there',
  f'a run trains {BITS}; a store is built by one process, and two end with 74 and say so',
  full=2,
)
def shared_memory(harness: Harness, times: int) -> Iterator[Trial]:
  commands = ('head -c 4096 /dev/zero > /dev/shm/full', 'mount -o remount,ro /dev/shm')
  for command in commands[:times]:
    name = harness.new()
    prefix = _with_shared_memory(command)
    failure = harness.outcome(name, harness.start(name, prefix=prefix))
    folder = _texts(harness)
    process = _builder(harness, folder, '--processes=2', prefix=prefix)
    _, said = process.communicate()
    if process.returncode != STORAGE or 'build with --processes=1' not in said.lower():
      failure = failure or f'two processes end with {process.returncode}: {said[-400:]}'
    failure = failure or _built(_builder(harness, folder, prefix=prefix), folder)
    yield Trial(command, failure)
    harness.forget(name)
    harness.forget(folder.name)


# The process stops when it is about to make a file whose name has this.
_PAUSED = """
import os, signal, sys
def pause(event, arguments):
  if event == 'open' and 'tokens.npy' in str(arguments[0]):
    os.kill(os.getpid(), signal.SIGSTOP)
sys.addaudithook(pause)
"""


@fault(
  'a builder of a store that is paused',
  'the next one names it, and goes on when it is resumed or ended as the message says',
  full=2,
)
def paused_builder(harness: Harness, times: int) -> Iterator[Trial]:
  for way in ('CONT', 'KILL')[:times]:
    folder = _texts(harness)
    world = harness.customized(f'{folder.name}.python', _PAUSED)
    first = _builder(harness, folder, environment=world)
    _, status = os.waitpid(first.pid, os.WUNTRACED)
    failure = None if os.WIFSTOPPED(status) else 'it was not paused'
    second = _builder(harness, folder)
    assert second.stderr is not None
    waits = next((line for line in second.stderr if 'Waiting to ' in line), '')
    if f'kill -{way} {first.pid}' not in waits:
      failure = failure or f'it says {waits!r}'
    while way == 'CONT' and first.poll() is None:  # it stops at each file
      first.send_signal(signal.SIGCONT)
      with contextlib.suppress(subprocess.TimeoutExpired):
        first.wait(0.1)
    first.kill()
    first.communicate()
    yield Trial(f'kill -{way}', failure or _built(second, folder))
    harness.forget(folder.name)


@fault(
  'ulimit -n 32',
  f'is raised as far as it may be, for a run that trains {BITS}; otherwise ends with 78 at once',
  full=2,
)
def few_files(harness: Harness, times: int) -> Iterator[Trial]:
  for limit in ('ulimit -n 32', 'ulimit -S -n 32')[:times]:
    name = harness.new()
    prefix = ('bash', '-c', f'{limit}; exec "$@"', 'bash')
    process = harness.start(name, prefix=prefix)
    if '-S' in limit:
      failure = harness.outcome(name, process)
    else:
      words = 'This process may open 32 files, and a run needs 64.'
      failure = _refusal(harness, name, ended(process), CONFIGURATION, words)
    yield Trial(limit, failure)
    harness.forget(name)


_HOMELESS = """
import os, pwd
os.environ.pop('HOME', None)
def unknown(number):
  raise KeyError(number)
pwd.getpwuid = unknown
"""


@fault(
  'no HOME, and no entry in the list of users',
  f'ends with 78, makes no folder named ~, and trains {BITS} as the message says',
  full=2,
)
def homeless(harness: Harness, times: int) -> Iterator[Trial]:
  for flag in ('', '--model_dir=~/run')[:times]:
    name = harness.new()
    cwd = harness.folder / f'{name}.cwd'
    cwd.mkdir()
    world = harness.customized(f'{name}.python', _HOMELESS)
    process = harness.start(name, *filter(None, [flag]), environment=world, cwd=cwd)
    failure = _refusal(harness, name, ended(process), CONFIGURATION, 'Set HOME, or write')
    world['VALKYRIE_CACHE'] = str(harness.folder / f'{name}.cache')
    failure = failure or harness.outcome(name, harness.start(name, environment=world, cwd=cwd))
    left = [path.name for path in cwd.iterdir()]
    yield Trial(flag or 'a run', failure or (f'{left} appeared' if left else None))
    harness.forget(name)


# The process cannot read a file whose path ends with this.
_BROKEN = """
import errno, os, sys
def broken(event, arguments):
  if event == 'open' and str(arguments[0]).endswith({file!r}):
    raise OSError(errno.EIO, os.strerror(errno.EIO))
sys.addaudithook(broken)
"""


@fault(
  'an input/output error of the newest step, or of a token store, when it is read',
  f'ends with 74, names the file, and continues {BITS} when the disk works',
  full=2,
)
def broken_reads(harness: Harness, times: int) -> Iterator[Trial]:
  for number in range(times):
    name = harness.new()
    harness.run(name, '--gin.Act.at=14', '--gin.Act.action="kill"', code=-9)
    step = f'checkpoints/{harness.saved(name)[-1]}/record.json'
    file = (step, 'offsets.npy')[number % 2]
    world = harness.customized(f'{name}.python', _BROKEN.format(file=file))
    process = harness.start(name, environment=world)
    failure = _refusal(harness, name, ended(process), STORAGE, 'Input/output error')
    if failure is None and file not in harness.said(name):
      failure = f'the file is not named: {harness.said(name)[-400:]}'
    harness.run(name)
    yield Trial(file, failure or harness.difference(name))
    harness.forget(name)


@fault(
  'checkpoints as a link to another disk, with a damaged newest step',
  f'uses the step before, keeps the damaged one, continues {BITS}',
  full=1,
)
def linked_checkpoints(harness: Harness, times: int) -> Iterator[Trial]:
  for _ in range(times):
    name = harness.new()
    harness.run(name, '--gin.Act.at=14', '--gin.Act.action="kill"', code=-9)
    checkpoints = harness.folder / name / 'checkpoints'
    with mounted(harness.folder / f'{name}.disk') as disk:
      shutil.move(checkpoints, disk)
      checkpoints.symlink_to(disk / 'checkpoints')
      newest = harness.saved(name)[-1]
      record = checkpoints / str(newest) / 'record.json'
      record.write_bytes(record.read_bytes()[:-1])
      damaged = record.read_bytes()
      harness.run(name)
      failure = harness.difference(name)
      kept = [file.read_bytes() for file in disk.rglob('set_aside/**/record.json')]
      if kept != [damaged]:
        failure = failure or 'the damaged step was not kept'
      yield Trial(f'step {newest}', failure)
    harness.forget(name)


# The folder of a run gets another name, and another run its own, before a file of this name is
# opened.
_SWAP = """
import os, sys
left = [1]
def swap(event, arguments):
  if event == 'open' and left and {file!r} in str(arguments[0]):
    left.clear()
    os.rename({run!r}, {run!r} + '.moved')
    os.rename({run!r} + '.other', {run!r})
sys.addaudithook(swap)
"""


def _contents(folder: pathlib.Path) -> dict[str, bytes]:
  files = [path for path in folder.rglob('*') if path.is_file()]
  return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@fault(
  'a run whose folder is swapped for another one while it is evaluated',
  'every file goes into the folder of the run, and nothing changes in the other one',
  full=3,
)
def swapped(harness: Harness, times: int) -> Iterator[Trial]:
  for file in ('eval/.data.json.', 'eval/metrics.jsonl', '.loss_by_position.png.')[:times]:
    name = harness.new()
    run = harness.folder / name
    for copy in (run, f'{run}.other'):
      shutil.copytree(harness.folder / 'reference', copy)
    before = _contents(run)
    world = harness.customized(f'{name}.python', _SWAP.format(file=file, run=str(run)))
    failure = harness.ending(name, harness.start(name, '--run_mode=eval', environment=world))
    moved = pathlib.Path(f'{run}.moved')
    if failure is None and not moved.exists():
      failure = 'it was not swapped'
    if failure is None and _contents(run) != before:
      failure = 'the other folder has changed'
    made = ('eval/data.json', 'eval/metrics.jsonl', 'loss_by_position.png')
    if failure is None and not all((moved / each).stat().st_size for each in made):
      failure = 'a file is empty'
    yield Trial(file, failure)
    harness.forget(name)


@fault(
  'infer --output that is interrupted, or on a full disk',
  'ends with 130 or 74, leaves nothing in the way, and the same command writes it',
  full=2,
)
def cut_output(harness: Harness, times: int) -> Iterator[Trial]:
  for number in range(times):
    name = harness.new()
    prompts = harness.folder / f'{name}.prompts.txt'
    prompts.write_text('abc\n' * 64)
    with mounted(harness.folder / f'{name}.disk', '4k' if number % 2 else '8m') as disk:
      output = disk / 'answers.jsonl'
      run = f'--model_dir={harness.folder / "reference"}'
      flags = (run, '--run_mode=infer', f'--prompts={prompts}', f'--output={output}')
      flags += ('--gin.infer.max_tokens=16',)
      process = harness.start(name, *flags, '--gin.infer.batch_size=1')
      if number % 2 == 0:
        wait_for(lambda disk=disk: [*disk.iterdir()], process)
        process.send_signal(signal.SIGINT)
      failure = harness.ending(name, process, STORAGE if number % 2 else 130)
      left = [path.name for path in disk.iterdir()]
      if left:
        failure = failure or f'{left} are left'
      if number % 2:
        subprocess.run(['mount', '-o', 'remount,size=8m', str(disk)], check=True)
      failure = failure or harness.ending(name, harness.start(name, *flags))
      if failure is None and len(output.read_text().splitlines()) != 64:
        failure = 'answers are missing'
    yield Trial('a full disk' if number % 2 else 'SIGINT', failure)
    harness.forget(name)
