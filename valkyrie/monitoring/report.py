"""Description of the model and the system: model_info.txt and the first lines of a run."""

from collections.abc import Iterable
import math
import os
import platform
from typing import Any

import jax
import numpy as np

from valkyrie.checkpoint.compatibility import versions
from valkyrie.models.parts import is_of_model
from valkyrie.monitoring.memory import available, in_units
from valkyrie.types import leaves_by_path


def model_info(parameters: Any, axes: Any, counts: Any) -> str:
  """The text of model_info.txt: totals and a table of all parameters, with shardings of one mesh.

  `axes` are the logical axes of each, and `counts` of `Model.counts`, in the same structure.
  """
  rows = [('parameter', 'shape', 'dtype', 'logical axes', 'mesh axes', 'bytes', 'bytes per device')]
  held = total = total_per_device = 0
  leaves = leaves_by_path(parameters)
  axes_of_leaves = jax.tree.structure(parameters).flatten_up_to(axes)
  for (path, leaf), names in zip(leaves.items(), axes_of_leaves, strict=True):
    dtype = np.dtype(leaf.dtype)
    size = math.prod(leaf.shape) * dtype.itemsize
    per_device = math.prod(leaf.sharding.shard_shape(leaf.shape)) * dtype.itemsize
    logical, mesh_axes = _tuple(names), _tuple(tuple(leaf.sharding.spec))
    about = path, _tuple(leaf.shape), str(dtype), logical, mesh_axes
    rows.append((*about, f'{size:,}', f'{per_device:,}'))
    held += math.prod(leaf.shape)
    total += size
    total_per_device += per_device
  mesh, whole = next(iter(leaves.values())).sharding.mesh, sum(jax.tree.leaves(counts))
  count = sum(jax.tree.leaves({m: of for m, of in counts.items() if is_of_model(m)}))
  padding = f' and {held - whole:,} of padding' if held > whole else ''
  padding += f' and {whole - count:,} of the objective' if whole > count else ''
  mesh_axes = ', '.join(f'{name}={size}' for name, size in mesh.shape.items())
  totals = (
    f'{count:,} parameters in {len(rows) - 1} arrays{padding}, {total:,} bytes '
    f'({in_units(total)}), {total_per_device:,} bytes ({in_units(total_per_device)}) on each of '
    f'{mesh.size} devices (mesh {mesh_axes})'
  )
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  sides = ['<'] * (len(widths) - 2) + ['>'] * 2  # the last two columns are numbers
  template = '  '.join(f'{{:{side}{width}}}' for side, width in zip(sides, widths, strict=True))
  return '\n'.join([totals, '', *(template.format(*row) for row in rows), ''])


def system_lines() -> list[str]:
  """Lines with the versions, devices, processors and memory of this process."""
  devices = jax.devices()
  # In a container a process may use fewer processors than exist.
  own = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()
  total = in_units(os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES'))
  free = available()
  return [
    ', '.join(f'{name} {version}' for name, version in versions().items()),
    f'{platform.platform()}, {own} processors, {total} memory'
    + ('' if free is None else f', {in_units(free)} available'),
    f'{"device" if len(devices) == 1 else "devices"}: {len(devices)} x {devices[0].platform} '
    f'({devices[0].device_kind}), {jax.local_device_count()} local, process '
    f'{jax.process_index()} of {jax.process_count()}',
  ]


def _tuple(values: Iterable[Any]) -> str:
  """'(layers,-,data+model)' for ('layers', None, ('data', 'model')), without spaces for `cut`."""
  texts = ['+'.join(v) if isinstance(v, tuple) else '-' if v is None else str(v) for v in values]
  return f'({",".join(texts)})'
