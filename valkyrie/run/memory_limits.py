"""The memory limits of this process: of the machine, its cgroup and its address space."""

from collections.abc import Callable, Iterator
import contextlib
import math
import pathlib
import resource
from typing import NamedTuple

import jax

from valkyrie.errors import ConfigurationError
from valkyrie.monitoring import memory

_CGROUPS = pathlib.Path('/sys/fs/cgroup')
# The files of a limit and of what is used, in a cgroup of version 2 and of version 1.
_FILES = (('memory.max', 'memory.current'), ('memory.limit_in_bytes', 'memory.usage_in_bytes'))
_CACHE = ('inactive_file', 'total_inactive_file')  # what the kernel frees when memory is short


class Room(NamedTuple):
  """The bytes that this process can still take, and the name of the limit."""

  left: float
  limit: str


def room() -> Room:
  """The smallest room of all limits; infinite where none is known."""
  return min(_rooms(), default=Room(math.inf, 'nothing'))


def _rooms() -> Iterator[Room]:
  if (available := memory.available()) is not None:
    yield Room(available, 'the memory of the machine')
  most, size = resource.getrlimit(resource.RLIMIT_AS)[0], memory.of_process('VmSize')
  if most != resource.RLIM_INFINITY and size is not None:
    yield Room(most - size, f'an address space of {memory.in_units(most)} (ulimit -v)')
  for folder in _cgroups():
    for limit, used in _FILES:
      with contextlib.suppress(OSError, ValueError):  # no such file, or 'max'
        most = int((folder / limit).read_text())
        taken = int((folder / used).read_text()) - _cache(folder)
        yield Room(most - taken, f'a cgroup of {memory.in_units(most)}')


def _cgroups() -> Iterator[pathlib.Path]:
  """The folders of the cgroups of this process and of their parents."""
  found = pathlib.Path('/proc/self/cgroup')
  for line in found.read_text().splitlines() if found.exists() else ():
    _, controllers, path = line.split(':', 2)
    if controllers and 'memory' not in controllers.split(','):
      continue
    root = _CGROUPS / 'memory' if controllers else _CGROUPS
    inside = root / path.lstrip('/')
    yield from (inside, *(folder for folder in inside.parents if folder.is_relative_to(root)))


def _cache(folder: pathlib.Path) -> int:
  lines = [line.split() for line in (folder / 'memory.stat').read_text().splitlines()]
  return max((int(value) for name, value in lines if name in _CACHE), default=0)


def shortage(program: jax.stages.Compiled) -> str | None:
  """A warning if a compiled step takes more memory of the host than is left; None if it fits.

  The kernel may kill such a process, and then there is no other message.
  """
  needed, left = memory.of_host(program), room()
  if needed <= left.left:
    return None
  return (
    f'warning: a step takes {memory.in_units(needed)} more of memory, but '
    f'{memory.in_units(max(left.left, 0))} are left of {left.limit}: the run may be killed'
  )


@contextlib.contextmanager
def explained(needs: Callable[[], str]) -> Iterator[None]:
  """Raises a ConfigurationError if memory runs out inside; `needs` returns what a step takes."""
  try:
    yield
  except (MemoryError, jax.errors.JaxRuntimeError) as error:
    first = (str(error) or 'MemoryError').splitlines()[0]
    if isinstance(error, jax.errors.JaxRuntimeError) and 'RESOURCE_EXHAUSTED' not in first:
      raise
    left = room()
    about = '; '.join(filter(None, (needs(), *memory.lines())))
    refused = ConfigurationError(
      f'The memory is too small for this run: {first}\n{about}; '
      f'{memory.in_units(max(left.left, 0))} left of {left.limit}. Use a smaller batch_size or '
      'chunk_size, or more StepSettings.micro_batches; --run_mode=precompile recommends a change.'
    )
    for note in getattr(error, '__notes__', ()):
      if 'JAX_TRACEBACK_FILTERING' not in note:  # no traceback is printed
        refused.add_note(note)
    raise refused from error
