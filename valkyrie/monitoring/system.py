"""The system of a run, in the first lines of its log."""

import os
import platform

import jax

from valkyrie.monitoring.memory import available, in_units
from valkyrie.packages import compilers, versions


def lines() -> list[str]:
  """Lines with the versions, devices, processors and memory of this process."""
  packages = []
  for name, version in versions().items():
    packages.append(f'{name} {version}')
  processors = os.cpu_count()
  if hasattr(os, 'sched_getaffinity'):  # in a container a process may use fewer than exist
    processors = len(os.sched_getaffinity(0))
  bytes_of_memory = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
  total = in_units(bytes_of_memory)
  system = f'{platform.platform()}, {processors} processors, {total} memory'
  free = available()
  if free is not None:
    system += f', {in_units(free)} available'
  devices = jax.devices()
  word = 'devices'
  if len(devices) == 1:
    word = 'device'
  described = [
    ', '.join(packages),
    system,
    f'{word}: {len(devices)} x {devices[0].platform} ({devices[0].device_kind}), '
    f'{jax.local_device_count()} local, process {jax.process_index()} of {jax.process_count()}',
  ]
  compiler = _compiler_version()
  if compiler:
    described.append(f'compiler: {compiler}')
  return described


def _compiler_version() -> str:
  """The plugin that compiles for the devices, as it names itself, with its date; '' on a CPU."""
  device = jax.devices()[0]
  if device.platform == 'cpu':
    return ''
  named = ' '.join(device.client.platform_version.split())
  found = [f'{package} {version}' for package, version in compilers(device.platform).items()]
  return ', '.join([named, *found])
