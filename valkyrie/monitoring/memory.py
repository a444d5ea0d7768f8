"""Memory of this machine, of this process and its devices, and the limits of the process."""

from collections.abc import Callable, Iterator
import contextlib
import math
import pathlib
import resource
import sys
from typing import Any, NamedTuple

import jax

from valkyrie.distributed import processes
from valkyrie.errors import ConfigurationError, notes_of

_PEAK = 'peak_bytes_in_use'
_WORDS = {'bytes_in_use': 'in use', _PEAK: 'peak', 'bytes_limit': 'limit'}
_CGROUPS = pathlib.Path('/sys/fs/cgroup')
# The files of a limit and of what is used, in a cgroup of version 2 and of version 1.
_FILES = (('memory.max', 'memory.current'), ('memory.limit_in_bytes', 'memory.usage_in_bytes'))
_CACHE = ('inactive_file', 'total_inactive_file')  # memory that the kernel frees if it is short


def host_peak() -> int:
  """The most memory that this process has held, in bytes."""
  most = of_process('VmHWM')
  if most is not None:
    return most
  # On Linux a child process begins with the peak of its parent here.
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  if sys.platform == 'darwin':
    return peak
  return 1024 * peak  # elsewhere the system counts KiB


def of_process(field: str) -> int | None:
  """A field of /proc/self/status in bytes; None where it does not exist."""
  return _of_linux('/proc/self/status', field)


def available() -> int | None:
  """The bytes of the machine that processes can still take; None if the system reports none."""
  return _of_linux('/proc/meminfo', 'MemAvailable')


def _of_linux(path: str, field: str) -> int | None:
  """A field 'NAME:   SIZE kB' of a file in bytes; None if it is not there."""
  for line in _lines_of(path):
    if line.startswith(f'{field}:'):
      return 1024 * int(line.split()[1])
  return None


def _lines_of(path: str) -> list[str]:
  file = pathlib.Path(path)
  if not file.exists():
    return []
  return file.read_text().splitlines()


def device_peak() -> int | None:
  """The most memory that a local device has held, in bytes; None if none reports it (a CPU)."""
  peaks = []
  for device in jax.local_devices():
    stats = device.memory_stats() or {}
    if _PEAK in stats:
      peaks.append(stats[_PEAK])
  return max(peaks, default=None)


def peaks() -> dict[str, int | None]:
  """The largest peaks of the processes of a run, in bytes, and the numbers of these processes.

  A run of one process names no numbers. A device's peak is None if no device reports it.
  """
  own = {'host_memory_peak': host_peak(), 'device_memory_peak': device_peak()}
  told = processes.latest('memory', own)
  if jax.process_count() == 1:
    return own
  found: dict[str, int | None] = {}
  for name in own:
    sizes = {process: peaks[name] for process, peaks in told.items() if peaks[name] is not None}
    found[name] = None
    if sizes:
      largest = max(sizes, key=lambda process: sizes[process])
      found[name] = sizes[largest]
      found[f'{name}_process'] = largest
  return found


def lines(when: str = '') -> list[str]:
  """The memory of the process at present and at its peak, and of each device that reports it."""
  size = of_process('VmRSS')
  in_use = ''
  if size is not None:
    in_use = f'{in_units(size)} in use, '
  peak = in_units(host_peak())
  texts = [f'memory of this process{when}: {in_use}{peak} peak']
  for device in jax.local_devices():
    stats = device.memory_stats() or {}
    facts = []
    for key, word in _WORDS.items():
      if key in stats:
        amount = in_units(stats[key])
        facts.append(f'{amount} {word}')
    if facts:
      listed = ', '.join(facts)
      texts.append(f'memory of {device}{when}: {listed}')
  if device_peak() is None:
    arrays = in_units(_live_bytes())
    texts.append(f'arrays on the devices{when}: {arrays} (they do not report their memory)')
  return texts


def _live_bytes() -> int:
  """The bytes of all jax arrays on the devices of this process."""
  total = 0
  for array in jax.live_arrays():
    total += sum(shard.data.nbytes for shard in array.addressable_shards)
  return total


def of_program(program: jax.stages.Compiled) -> str:
  """The memory that a compiled step takes on each device."""
  sizes: Any = program.memory_analysis()
  if sizes is None:
    return 'the backend does not say how much memory the program takes'
  new = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
  return (
    f'on each device {in_units(sizes.argument_size_in_bytes)} for the state and the batch, '
    f'{in_units(sizes.temp_size_in_bytes)} for temporaries, {in_units(new)} for new outputs'
  )


def shortage(program: jax.stages.Compiled, devices: int) -> str | None:
  """A warning if a step on so many devices of this host takes more than is left; None if it fits.

  The kernel may kill such a process, and then there is no other message.
  """
  sizes: Any = program.memory_analysis()
  if sizes is None or jax.default_backend() != 'cpu':
    return None
  new = sizes.output_size_in_bytes - sizes.alias_size_in_bytes  # beside state and batch
  needed = devices * (sizes.temp_size_in_bytes + new)
  smallest = room()
  if needed <= smallest.left:
    return None
  return (
    f'warning: a step takes {in_units(needed)} more of memory, but {smallest}: the run may be '
    'killed'
  )


@contextlib.contextmanager
def explained(needs: Callable[[], str]) -> Iterator[None]:
  """Raises a ConfigurationError if memory runs out inside; `needs` returns what a step takes."""
  try:
    yield
  except (MemoryError, jax.errors.JaxRuntimeError) as error:
    first = (str(error) or 'MemoryError').splitlines()[0]
    is_of_jax = isinstance(error, jax.errors.JaxRuntimeError)
    if is_of_jax and 'RESOURCE_EXHAUSTED' not in first:
      raise
    facts = [needs(), *lines(), str(room())]
    known_facts = [fact for fact in facts if fact]
    refused = ConfigurationError(
      f'The memory is too small for this run: {first}\n'
      f'{"; ".join(known_facts)}. Use a smaller batch_size or '
      'chunk_size, or more StepSettings.micro_batches; --run_mode=precompile recommends a change.'
    )
    for note in notes_of(error):
      refused.add_note(note)
    raise refused from error


class Room(NamedTuple):
  """The bytes that this process can still take, and the name of the limit."""

  left: float
  limit: str

  def __str__(self) -> str:
    left = in_units(max(self.left, 0))
    return f'{left} are left of {self.limit}'


def room() -> Room:
  """The smallest room of all limits; infinite where none is known."""
  return min(_rooms(), default=Room(math.inf, 'nothing'))


def _rooms() -> Iterator[Room]:
  free = available()
  if free is not None:
    yield Room(free, 'the memory of the machine')
  most, _ = resource.getrlimit(resource.RLIMIT_AS)
  size = of_process('VmSize')
  if most != resource.RLIM_INFINITY and size is not None:
    yield Room(most - size, f'an address space of {in_units(most)} (ulimit -v)')
  for folder in _cgroups():
    for limit, used in _FILES:
      with contextlib.suppress(OSError, ValueError):  # no such file, or 'max'
        yield _room_of_cgroup(folder, limit, used)


def _room_of_cgroup(folder: pathlib.Path, limit: str, used: str) -> Room:
  """The room below a limit of a cgroup, by the names of its two files."""
  most = int((folder / limit).read_text())
  statistics = {}
  for line in _lines_of(f'{folder}/memory.stat'):
    name, value = line.split()
    statistics[name] = value
  caches = [int(statistics.get(name, 0)) for name in _CACHE]
  cache = max(caches)
  used_bytes = int((folder / used).read_text())
  taken = used_bytes - cache
  return Room(most - taken, f'a cgroup of {in_units(most)}')


def _cgroups() -> Iterator[pathlib.Path]:
  """The folders of the cgroups of this process and of their parents."""
  for line in _lines_of('/proc/self/cgroup'):
    _, controllers, path = line.split(':', 2)
    if controllers and 'memory' not in controllers.split(','):
      continue
    root = _CGROUPS
    if controllers:
      root = _CGROUPS / 'memory'
    folder = root / path.lstrip('/')
    yield folder
    for parent in folder.parents:
      if parent.is_relative_to(root):
        yield parent


def in_units(size: float) -> str:
  """'512 B', '1.5 KiB', '2.3 GiB'."""
  units = ('B', 'KiB', 'MiB', 'GiB', 'TiB')
  if not size:
    return '0 B'
  exact_power = max(0, math.log(size, 1024))
  power = int(min(len(units) - 1, exact_power))
  digits = 1 if power else 0
  scaled = size / 1024**power
  return f'{scaled:.{digits}f} {units[power]}'
