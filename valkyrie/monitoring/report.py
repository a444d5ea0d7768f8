"""Description of the model and the system: model_info.txt and the first lines of a run."""

from collections.abc import Iterable, Sequence
import math
import os
import platform
from typing import Any

import jax
import numpy as np

from valkyrie.models.parts import is_of_model
from valkyrie.monitoring.memory import available, in_units
from valkyrie.packages import versions
from valkyrie.types import leaves_by_path

_COLUMNS = (
  'parameter',
  'shape',
  'dtype',
  'logical axes',
  'mesh axes',
  'bytes',
  'bytes per device',
)


def model_info(parameters: Any, axes: Any, counts: Any) -> str:
  """The text of model_info.txt: totals and a table of all parameters, with shardings of one mesh.

  `axes` are the logical axes of each parameter, and `counts` the numbers of `Model.counts`, in the
  same structure.
  """
  rows: list[tuple[str, ...]] = [_COLUMNS]
  held = 0  # elements, with padding
  total = 0  # bytes
  total_per_device = 0
  leaves = leaves_by_path(parameters)
  axes_of_leaves = jax.tree.structure(parameters).flatten_up_to(axes)
  for (path, leaf), names in zip(leaves.items(), axes_of_leaves, strict=True):
    dtype = np.dtype(leaf.dtype)
    elements = math.prod(leaf.shape)
    elements_per_device = math.prod(leaf.sharding.shard_shape(leaf.shape))
    size = elements * dtype.itemsize
    per_device = elements_per_device * dtype.itemsize
    row = (
      path,
      _tuple(leaf.shape),
      str(dtype),
      _tuple(names),
      _tuple(tuple(leaf.sharding.spec)),
      f'{size:,}',
      f'{per_device:,}',
    )
    rows.append(row)
    held += elements
    total += size
    total_per_device += per_device
  whole = sum(jax.tree.leaves(counts))
  model_counts = {}
  for module, count in counts.items():
    if is_of_model(module):
      model_counts[module] = count
  count = sum(jax.tree.leaves(model_counts))
  padding = ''
  if held > whole:
    padding += f' and {held - whole:,} of padding'
  if whole > count:
    padding += f' and {whole - count:,} of the objective'
  mesh = next(iter(leaves.values())).sharding.mesh
  axis_sizes = [f'{name}={size}' for name, size in mesh.shape.items()]
  mesh_axes = ', '.join(axis_sizes)
  totals = (
    f'{count:,} parameters in {len(rows) - 1} arrays{padding}, {total:,} bytes '
    f'({in_units(total)}), {total_per_device:,} bytes ({in_units(total_per_device)}) on each of '
    f'{mesh.size} devices (mesh {mesh_axes})'
  )
  lines = [totals, '']
  lines += _table(rows)
  lines.append('')
  return '\n'.join(lines)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
  """The lines of a table whose last two columns are numbers."""
  columns = zip(*rows, strict=True)
  widths = [max(map(len, column)) for column in columns]
  lines = []
  for row in rows:
    cells = []
    for number, (cell, width) in enumerate(zip(row, widths, strict=True)):
      is_number = number >= len(row) - 2
      cells.append(cell.rjust(width) if is_number else cell.ljust(width))
    lines.append('  '.join(cells))
  return lines


def system_lines() -> list[str]:
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
  return [
    ', '.join(packages),
    system,
    f'{word}: {len(devices)} x {devices[0].platform} ({devices[0].device_kind}), '
    f'{jax.local_device_count()} local, process {jax.process_index()} of {jax.process_count()}',
  ]


def _tuple(values: Iterable[Any]) -> str:
  """'(layers,-,data+model)' for ('layers', None, ('data', 'model')), without spaces for `cut`."""
  texts = []
  for value in values:
    if value is None:
      texts.append('-')
    elif isinstance(value, tuple):
      texts.append('+'.join(value))
    else:
      texts.append(str(value))
  return f'({",".join(texts)})'
