"""Memory of this machine, of this process and of its devices."""

import math
import os
import pathlib
import resource
import sys
from typing import Any

import jax

_PEAK = 'peak_bytes_in_use'
_WORDS = {'bytes_in_use': 'in use', _PEAK: 'peak', 'bytes_limit': 'limit'}


def host_peak() -> int:
  """The most memory that this process has held, in bytes."""
  if (found := of_process('VmHWM')) is not None:
    return found
  # On Linux a child process begins with the peak of its parent here.
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return peak if sys.platform == 'darwin' else 1024 * peak  # elsewhere in KiB


def of_process(field: str) -> int | None:
  """A field of /proc/self/status in bytes; None where it does not exist."""
  return _of_linux('/proc/self/status', field)


def available() -> int | None:
  """The bytes of the machine that processes can still take; None if the system reports none."""
  return _of_linux('/proc/meminfo', 'MemAvailable')


def _of_linux(path: str, field: str) -> int | None:
  file = pathlib.Path(path)
  lines = file.read_text().splitlines() if file.exists() else []
  sizes = [int(line.split()[1]) for line in lines if line.startswith(f'{field}:')]
  return 1024 * sizes[0] if sizes else None


def device_peak() -> int | None:
  """The most memory that a local device has held, in bytes; None if none reports it (a CPU)."""
  stats = [device.memory_stats() or {} for device in jax.local_devices()]
  return max((found[_PEAK] for found in stats if _PEAK in found), default=None)


def lines(when: str = '') -> list[str]:
  """The memory of the process now and at its peak, and of each local device that reports it."""
  size = of_process('VmRSS')
  now = '' if size is None else f'{in_units(size)} in use, '
  found = [f'memory of this process{when}: {now}{in_units(host_peak())} peak']
  for device in jax.local_devices():
    stats = device.memory_stats() or {}
    facts = [f'{in_units(stats[key])} {name}' for key, name in _WORDS.items() if key in stats]
    if facts:
      found.append(f'memory of {device}{when}: {", ".join(facts)}')
  return found


def of_program(program: jax.stages.Compiled) -> str:
  """The memory that a compiled step takes on each device."""
  found: Any = program.memory_analysis()
  if found is None:
    return 'the backend does not say how much memory the program takes'
  new = found.output_size_in_bytes - found.alias_size_in_bytes
  return (
    f'on each device {in_units(found.argument_size_in_bytes)} for the state and the batch, '
    f'{in_units(found.temp_size_in_bytes)} for temporaries, {in_units(new)} for new outputs'
  )


def of_host(program: jax.stages.Compiled) -> int:
  """The bytes of this machine that a compiled step takes in addition to its state and batch."""
  found: Any = program.memory_analysis()
  if found is None or jax.default_backend() != 'cpu':
    return 0
  new = found.output_size_in_bytes - found.alias_size_in_bytes
  return jax.local_device_count() * (found.temp_size_in_bytes + new)


def of_machine() -> str:
  """The memory of the machine, and how much of it is available."""
  total = in_units(os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES'))
  now = available()
  return f'{total} memory' + ('' if now is None else f', {in_units(now)} available')


def in_units(size: float) -> str:
  """'512 B', '1.5 KiB', '2.3 GiB'."""
  units = ('B', 'KiB', 'MiB', 'GiB', 'TiB')
  power = min(len(units) - 1, max(0, int(math.log(size, 1024)))) if size else 0
  return f'{size / 1024**power:.{1 if power else 0}f} {units[power]}'
