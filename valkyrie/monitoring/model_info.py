"""The text of model_info.txt: what the parameters and the optimizer's state weigh, and where."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
import math
from typing import Any, NamedTuple

import jax
import numpy as np

from valkyrie.models.parts import is_of_model
from valkyrie.monitoring.memory import in_units
from valkyrie.types import leaves_by_path

TOLERANCE = 0.02  # as MaxText's `sharding_tolerance`

_COLUMNS = (
  'parameter',
  'shape',
  'dtype',
  'logical axes',
  'mesh axes',
  'bytes',
  'bytes per device',
)


class Weight(NamedTuple):
  """The bytes of an array, over all devices and on each one; elements include padding."""

  elements: int
  whole: int
  per_device: int


def text(
  parameters: Any,
  axes: Any,
  counts: Any,
  optimizer_state: Any,
  remarks: Sequence[str] = (),
) -> str:
  """Totals, and tables of parameters, of modules and of the optimizer's state.

  Args:
    parameters, optimizer_state: arrays or their shapes, with shardings of one mesh.
    axes: the logical axes of each parameter, in the structure of `parameters`.
    counts: the numbers of `Model.counts`, in the same structure.
    remarks: lines that follow the totals.
  """
  leaves = leaves_by_path(parameters)
  axes_of_leaves = jax.tree.structure(parameters).flatten_up_to(axes)
  rows: list[tuple[str, ...]] = [_COLUMNS]
  for (path, leaf), names in zip(leaves.items(), axes_of_leaves, strict=True):
    row = _row(path, leaf, _tuple(names))
    rows.append(row)
  _, *other_columns = _COLUMNS
  states: list[tuple[str, ...]] = [('state of the optimizer', *other_columns)]
  for path, leaf in leaves_by_path(optimizer_state).items():
    row = _row(path, leaf, '-')
    states.append(row)
  modules = _modules(leaves, leaves_by_path(counts))
  lines = [_totals(leaves, counts), *remarks, '']
  lines += _table(rows)
  lines.append('')
  lines += _table(modules)
  lines.append('')
  lines += _table(states)
  lines.append('')
  return '\n'.join(lines)


def replication(parameters: Any, tolerance: float = TOLERANCE) -> list[str]:
  """A line about parameters that every device has whole, if the layout splits some others.

  It is a warning if their share of the bytes is above the tolerance.
  """
  held: dict[str, int] = {}
  total = 0
  for path, leaf in leaves_by_path(parameters).items():
    weight = weigh(leaf)
    total += weight.whole
    if weight.per_device == weight.whole:
      held[path] = weight.whole
  size = sum(held.values())
  if size in (0, total):
    return []
  line = f'{size / total:.2%} of the bytes of parameters are whole on every device'
  if size > tolerance * total:
    largest = max(held, key=lambda path: held[path])
    line = (
      f'warning: {line}, more than {tolerance:.2%} (train.replication_tolerance); the largest is '
      f'{largest}. A rule of Partitioner.axis_rules for one of its logical axes splits it; '
      'model_info.txt has them'
    )
  return [line]


def _totals(leaves: Mapping[str, Any], counts: Any) -> str:
  """The first line."""
  weights = [weigh(leaf) for leaf in leaves.values()]
  held = sum(weight.elements for weight in weights)
  total = sum(weight.whole for weight in weights)
  per_device = sum(weight.per_device for weight in weights)
  whole = _sum(counts)
  model_counts = {}
  for module, module_counts in counts.items():
    if is_of_model(module):
      model_counts[module] = module_counts
  count = _sum(model_counts)
  padding = ''
  if held > whole:
    padding += f' and {held - whole:,} of padding'
  if whole > count:
    padding += f' and {whole - count:,} of the objective'
  first, *_ = leaves.values()
  mesh = first.sharding.mesh
  axis_sizes = [f'{name}={size}' for name, size in mesh.shape.items()]
  mesh_axes = ', '.join(axis_sizes)
  return (
    f'{count:,} parameters in {len(leaves)} arrays{padding}, {total:,} bytes '
    f'({in_units(total)}), {per_device:,} bytes ({in_units(per_device)}) on each of '
    f'{mesh.size} devices (mesh {mesh_axes})'
  )


def _sum(counts: Any) -> int:
  """The sum of the leaves of a pytree."""
  leaves = jax.tree.leaves(counts)
  return sum(leaves)


def _modules(leaves: Mapping[str, Any], counts: Mapping[str, int]) -> list[tuple[str, ...]]:
  """The rows of a table: parameters, without padding, and bytes of each module and those inside."""
  parameters: dict[str, int] = Counter()
  sizes: dict[str, int] = Counter()
  for path, leaf in leaves.items():
    weight = weigh(leaf)
    for module in _modules_around(path):
      parameters[module] += counts[path]
      sizes[module] += weight.whole
  rows: list[tuple[str, ...]] = [('module', 'parameters', 'bytes')]
  for module in sorted(parameters, key=lambda name: name.split('/')):
    count = parameters[module]
    size = sizes[module]
    rows.append((module, f'{count:,}', f'{size:,}'))
  return rows


def _modules_around(path: str) -> list[str]:
  """The modules that contain a parameter, the outermost first."""
  parts = path.split('/')
  modules = []
  for level in range(1, len(parts)):
    module = '/'.join(parts[:level])
    modules.append(module)
  return modules


def weigh(leaf: Any) -> Weight:
  """The bytes of an array, or of its shape with a sharding."""
  width = np.dtype(leaf.dtype).itemsize
  elements = math.prod(leaf.shape)
  shard_shape = leaf.sharding.shard_shape(leaf.shape)
  elements_per_device = math.prod(shard_shape)
  whole = elements * width
  per_device = elements_per_device * width
  return Weight(elements, whole, per_device)


def _row(path: str, leaf: Any, logical_axes: str) -> tuple[str, ...]:
  weight = weigh(leaf)
  dtype = np.dtype(leaf.dtype)
  mesh_axes = leaf.sharding.spec
  return (
    path,
    _tuple(leaf.shape),
    str(dtype),
    logical_axes,
    _tuple(mesh_axes),
    f'{weight.whole:,}',
    f'{weight.per_device:,}',
  )


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
  """The lines of a table whose last two columns are numbers."""
  columns = zip(*rows, strict=True)
  widths = [max(map(len, column)) for column in columns]
  lines = []
  for row in rows:
    cells = []
    for number, (cell, width) in enumerate(zip(row, widths, strict=True)):
      is_number = number >= len(row) - 2
      aligned = cell.rjust(width) if is_number else cell.ljust(width)
      cells.append(aligned)
    lines.append('  '.join(cells))
  return lines


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
