"""Which device holds what: a mesh, rules from parameter paths to axes, and the jit that obeys them.

Two ordered tables, both in gin. The first names the axes of a parameter by its path; the second
says over which mesh axis a logical axis is split:

    parameter_axes = (('mlp/out$', ('layers', 'mlp', 'embed')), ...)
    axis_rules     = (('batch', 'data'), ('embed', 'data'), ...)
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import contextvars
import math
import re
from typing import Any

import gin
import jax
from jax.sharding import NamedSharding, PartitionSpec

from valkyrie.errors import ConfigurationError
from valkyrie.sharding.mesh import make_mesh
from valkyrie.types import Array, Batch, Params

Axes = tuple[str | None, ...]

_current: contextvars.ContextVar['Partitioner | None'] = contextvars.ContextVar(
  'partitioner', default=None
)


def current() -> 'Partitioner | None':
  """The partitioner inside whose `partition` this is traced, if any."""
  return _current.get()


def constrain(x: Array, *axes: str | None) -> Array:
  """Pins an activation to the layout of its logical axes, inside a `Partitioner.partition`."""
  partitioner = _current.get()
  if partitioner is None:
    return x
  return jax.lax.with_sharding_constraint(x, partitioner.sharding(axes))


def path_of(key_path: Sequence[Any]) -> str:
  """'params/model/embedding' for the key path of a leaf, as `jax.tree_util` gives it."""
  return jax.tree_util.keystr(tuple(key_path), simple=True, separator='/')


@gin.configurable
class Partitioner:
  """Lays a train state out over a mesh of devices."""

  def __init__(
    self,
    mesh: Sequence[tuple[str, int]],
    parameter_axes: Sequence[tuple[str, Axes]],
    axis_rules: Sequence[tuple[str, str | tuple[str, ...] | None]],
    local: bool = True,
  ):
    """Builds the mesh.

    Args:
      mesh: (axis name, devices along it), outermost first; -1 once takes all that are left. A mesh
        of one device is always possible; any other takes all devices.
      parameter_axes: (regular expression, logical axes), the first match in a path counts.
      axis_rules: (logical axis, mesh axis or axes); an axis without a rule is not split.
      local: each device computes on its own, with all weights, which are gathered once a step; the
        mesh splits rows ('batch') and chunks ('time'). False: the rules split every operation, and
        XLA's partitioner moves what it needs when it needs it.

    Raises:
      ConfigurationError: where the devices cannot form the mesh, or a rule names an unknown axis,
        or one that such a layout cannot split.
    """
    self.mesh = make_mesh(mesh)
    self.local = local
    self.parameter_axes = tuple((_expression(pattern), axes) for pattern, axes in parameter_axes)
    self.axis_rules = dict(axis_rules)
    for logical, axes in self.axis_rules.items():
      unknown = set(as_tuple(axes)) - set(self.mesh.axis_names)
      if unknown:
        raise ConfigurationError(
          f'Partitioner.axis_rules splits {logical!r} over {sorted(unknown)}, but the mesh has the '
          f'axes {self.mesh.axis_names}. Name one of them, or leave the rule out.'
        )
    self._check_local()

  def _check_local(self) -> None:
    rows, time = self.axes_of('batch'), self.axes_of('time')
    if not self.local and time:
      raise ConfigurationError(
        f"Partitioner.axis_rules splits 'time' over {time}, which only a layout with "
        'Partitioner.local = True can: XLA alone would gather every key of a chunk for attention. '
        'See gin/partition/context.gin.'
      )
    if twice := set(rows) & set(time):
      raise ConfigurationError(
        f"Partitioner.axis_rules splits both 'batch' and 'time' over {sorted(twice)}: name each "
        'mesh axis once.'
      )
    idle = [a for a, n in self.mesh.shape.items() if n > 1 and a not in (*rows, *time)]
    if self.local and idle:
      raise ConfigurationError(
        f"Partitioner.axis_rules splits neither 'batch' nor 'time' over {idle} of the mesh "
        f'{dict(self.mesh.shape)}, so those devices would all do the same. Name them in a rule, or '
        'set Partitioner.local = False where the weights are split over them.'
      )

  def axes_of(self, logical: str) -> tuple[str, ...]:
    """The mesh axes over which a logical axis is split, outermost first."""
    return as_tuple(self.axis_rules.get(logical))

  def sharding(self, axes: Sequence[str | None]) -> NamedSharding:
    """The layout of an array with these logical axes."""
    split = [self.axis_rules.get(axis) if axis else None for axis in axes]
    return NamedSharding(self.mesh, PartitionSpec(*split))

  def batch_sharding(self) -> NamedSharding:
    """The layout of a batch's arrays [B, N·C]: rows are split, and whole on what splits time.

    A device's stretch of each chunk is not one stretch of the batch; it takes them where it reads.
    """
    return self.sharding(('batch', None))

  def check_batch(self, batch_size: int, *chunk_sizes: int) -> None:
    """Raises a ConfigurationError where rows or chunks do not divide over the devices."""
    for name, axis, sizes in (
      ('batch_size', 'batch', (batch_size,)),
      ('chunk_size', 'time', chunk_sizes),
    ):
      parts = self._parts(self.axes_of(axis))
      for size in sizes:
        if size < 1 or size % parts:
          below = max(size, 0) // parts * parts
          above = below + parts
          raise ConfigurationError(
            f'{name}={size} cannot be divided over {parts} devices. '
            + (f'The nearest that can are {below} and {above}.' if below else f'Use {above}.')
          )
    if jax.process_count() > 1 and not self.rows(batch_size):
      raise ConfigurationError(
        f'The mesh {dict(self.mesh.shape)} leaves process {jax.process_index()} of '
        f'{jax.process_count()} without a device. Start fewer processes, or choose a layout that '
        'takes all devices, such as gin/partition/zero1.gin.'
      )

  def logical_axes(self, path: str, shape: Sequence[int]) -> Axes:
    """The logical axes of a leaf of the train state.

    Raises:
      ConfigurationError: where no rule matches, or the one that does has another rank.
    """
    if not shape or path.startswith('recent/'):
      return (None,) * len(shape)
    if '/planner/' in path and path.startswith('carry/'):
      return ('batch',) + (None,) * (len(shape) - 1)
    if path.startswith('carry/'):
      return ('layers', 'batch') + (None,) * (len(shape) - 2)
    for pattern, axes in self.parameter_axes:
      if pattern.search(path):
        if len(axes) == len(shape):
          return tuple(axes)
        if path.startswith('optimizer_state/'):
          return (None,) * len(shape)  # a factored moment, smaller than its parameter
        raise ConfigurationError(
          f'Partitioner.parameter_axes gives {path} the axes {axes}, but its shape is '
          f'{tuple(shape)}. Give the rule {pattern.pattern!r} {len(shape)} axes.'
        )
    name = path.rsplit('/', 1)[-1]
    raise ConfigurationError(
      f'Partitioner.parameter_axes has no rule for {path} of shape {tuple(shape)}. Add one, such '
      f"as ('{name}$', {(None,) * len(shape)}), which splits it nowhere."
    )

  def state_shardings(self, abstract_state: Any) -> Any:
    """The layout of every leaf of a train state, from its shapes."""

    def of_leaf(key_path, leaf):
      path = path_of(key_path)
      sharding = self.sharding(self.logical_axes(path, leaf.shape))
      for size, axes in zip(leaf.shape, sharding.spec, strict=True):
        if size % self._parts(axes):
          raise ConfigurationError(
            f'{path} of shape {tuple(leaf.shape)} cannot be split over {sharding.spec}: {size} is '
            f'not a multiple of {self._parts(axes)} devices.'
          )
      return sharding

    return jax.tree_util.tree_map_with_path(of_leaf, abstract_state)

  def layouts(self, params: Params) -> dict[str, tuple[Axes, PartitionSpec]]:
    """For each parameter's path, its logical axes and the mesh axes over which they are split."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    axes = {path_of(path): self.logical_axes(path_of(path), leaf.shape) for path, leaf in leaves}
    return {path: (names, self.sharding(names).spec) for path, names in axes.items()}

  def specs(self, name: str, tree: Any) -> Any:
    """The mesh axes of each leaf of the field `name` of a train state, as PartitionSpecs."""
    return jax.tree.map(lambda leaf: leaf.spec, self.state_shardings({name: tree})[name])

  def whole(self, tree: Any) -> Any:
    """Gathers a tree of traced arrays onto every device."""
    return jax.lax.with_sharding_constraint(tree, NamedSharding(self.mesh, PartitionSpec()))

  def on_each_device(self, fn: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """`fn` of what each device holds, which may speak to the others by the names of mesh axes."""

    def within(*args):
      token = _current.set(None)  # nothing is to be constrained there
      try:
        return fn(*args)
      finally:
        _current.reset(token)

    return jax.shard_map(
      within, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )

  def rows(self, batch_size: int) -> list[int]:
    """The rows, by number, of which a device of this process holds a part."""
    parts = self.batch_sharding().addressable_devices_indices_map((batch_size, 1)).values()
    return sorted({row for part in parts if part for row in range(batch_size)[part[0]]})

  def place_batch(self, batch: Batch, batch_size: int | None = None) -> Batch:
    """Puts on this process's devices what they hold of a batch.

    Args:
      batch: arrays of the host: `rows(batch_size)` of the batch, each in its whole length.
      batch_size: B; None where `batch` is all of it.

    Returns:
      The batch [B, T], laid out over the devices of all processes.
    """
    sharding = self.batch_sharding()
    held = None if batch_size is None else self.rows(batch_size)

    def place(x):
      def part(index):
        of_device = range(shape[0])[index[0]]
        first = of_device.start if held is None else held.index(of_device.start)
        return x[first : first + len(of_device), index[1]]

      shape = (len(x) if batch_size is None else batch_size, x.shape[1])
      return jax.make_array_from_callback(shape, sharding, part)

    return jax.tree.map(place, batch)

  def _parts(self, axes: str | tuple[str, ...] | None) -> int:
    return math.prod(self.mesh.shape[axis] for axis in as_tuple(axes))

  def partition(self, fn: Callable, **jit_options: Any) -> Callable:
    """`jax.jit` on this mesh, in which `constrain` knows these rules."""

    def within(*args):
      with self._as_current():
        return fn(*args)

    return jax.jit(within, **jit_options)

  @contextlib.contextmanager
  def _as_current(self) -> Iterator[None]:
    token = _current.set(self)
    try:
      yield
    finally:
      _current.reset(token)


def as_tuple(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
  """The mesh axes that one entry of a PartitionSpec, or of a rule, names."""
  return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def _expression(pattern: str) -> re.Pattern[str]:
  try:
    return re.compile(pattern)
  except re.error as error:
    raise ConfigurationError(
      f'Partitioner.parameter_axes: {pattern!r} is no regular expression: {error}.'
    ) from error
