"""Partitioner: a mesh, rules from logical axes to mesh axes, and the jit that obeys them.

Every array of a train state has logical axes, which its module declares (see `models.layers`).
"""

from collections.abc import Callable, Sequence
import math
from typing import Any

import gin
import jax
from jax.sharding import NamedSharding, PartitionSpec

from valkyrie.config.computation import may_change_on_resume
from valkyrie.config.ranges import NonNegativeInt, PositiveInt
from valkyrie.config.suggest import did_you_mean
from valkyrie.errors import ConfigurationError, regular_expression
from valkyrie.sharding import ambient
from valkyrie.sharding.mesh import SLICE, make_mesh
from valkyrie.types import Array, Axes, Batch, leaf_path

# The logical axes of Valkyrie's own arrays and activations; a user's module may declare others.
LOGICAL_AXES = (
  'batch', 'time', 'activation', 'layers', 'embed', 'heads', 'mlp', 'state', 'vocabulary',
  'ngrams', 'norm',
)  # fmt: skip


def current_partitioner() -> 'Partitioner | None':
  """The partitioner whose `jit` traces the caller, if any."""
  return ambient.current().partitioner


def constrain(x: Array, *axes: str | None) -> Array:
  """Constrains an activation to the sharding of its logical axes, inside a `Partitioner.jit`."""
  partitioner = current_partitioner()
  if partitioner is None:
    return x
  sharding = partitioner.sharding(axes)
  return jax.lax.with_sharding_constraint(x, sharding)


@may_change_on_resume('devices')  # a checkpoint records the mesh and the kind of device
@gin.configurable
class Partitioner:
  """The sharding of a train state over a mesh of devices."""

  def __init__(
    self,
    mesh: Sequence[tuple[str, int]],
    axis_rules: Sequence[tuple[str, str | tuple[str, ...] | None]] = (),
    parameter_axes: Sequence[tuple[str, Axes]] = (),
    manual: bool = True,
    gather_layers: bool = False,
    slices: PositiveInt = 1,
    devices: Sequence[NonNegativeInt] | None = None,
  ):
    """Builds the mesh.

    Args:
      mesh: its axes, as `make_mesh` takes them.
      axis_rules: (logical axis, mesh axis or axes), such as ('embed', 'data'); an axis without a
        rule is not split.
      parameter_axes: (regular expression, logical axes), such as ('my_mixer/weight$', ('layers',
        'embed')): the first match in a parameter's path replaces the axes that its module declares.
      manual: all mesh axes are manual: the step is one `shard_map`, in which each device computes
        with all weights, gathered once a step. The rules then split rows ('batch') and chunks
        ('time'). False: products are split as in `split_products`, and XLA's partitioner splits
        all other operations by the rules, and inserts their communication.
      gather_layers: in a manual layout: the weights of layers stay split, and each layer gathers
        its own where it runs, see `layer_weights`.
      slices: groups of devices that only the data-center network joins. Each has the whole mesh,
        all weights by its rules, and its own rows; the outermost mesh axis 'slice' joins them.
      devices: the numbers of the devices to use, in the order of `jax.devices()`; None takes all.

    Raises a ConfigurationError if the devices cannot form the mesh, or a rule names an unknown axis
    or one that such a layout cannot split.
    """
    self.mesh = make_mesh(mesh, slices, devices)
    self.manual = manual
    self.gather_layers = gather_layers
    self.axis_rules = dict(axis_rules)
    if len(self.axis_rules) < len(axis_rules):
      raise ConfigurationError(
        f'Partitioner.axis_rules={axis_rules} has two rules for one logical axis. Remove one, or '
        "give the axis both mesh axes in one rule, such as ('embed', ('data', 'time'))."
      )
    if slices > 1:
      self.axis_rules['batch'] = (SLICE, *self.axes_of('batch'))
    parameter_rules = []
    for pattern, axes in parameter_axes:
      expression = regular_expression('Partitioner.parameter_axes', pattern)
      parameter_rules.append((expression, axes))
    self._parameter_axes = tuple(parameter_rules)
    for logical, axes in self.axis_rules.items():
      unknown = set(as_tuple(axes)) - set(self.mesh.axis_names)
      if unknown:
        raise ConfigurationError(
          f'Partitioner.axis_rules splits {logical!r} over {sorted(unknown)}, but the mesh has the '
          f'axes {self.mesh.axis_names}. Name one, or remove the rule.'
        )
    self._check_layout()

  def _check_layout(self) -> None:
    rows = self.axes_of('batch')
    time = self.axes_of('time')
    if not self.manual and time:
      raise ConfigurationError(
        f"Partitioner.axis_rules splits 'time' over {time}, which needs Partitioner.manual = True: "
        'XLA alone would gather every key of a chunk for attention. See gin/partition/context.gin.'
      )
    shared = set(rows) & set(time)
    if shared:
      raise ConfigurationError(
        f"Partitioner.axis_rules splits both 'batch' and 'time' over {sorted(shared)}. Name each "
        'mesh axis once.'
      )
    axes_in_use = []
    for axis, size in self.mesh.shape.items():
      if size > 1:
        axes_in_use.append(axis)
    idle = [axis for axis in axes_in_use if axis not in (*rows, *time)]
    if self.manual and idle:
      raise ConfigurationError(
        f"Partitioner.axis_rules splits neither 'batch' nor 'time' over {idle} of the mesh "
        f'{dict(self.mesh.shape)}, so the devices along it would repeat the same work. Name it in '
        'a rule, or set Partitioner.manual = False if weights are split over it.'
      )
    if self.gather_layers and not self.manual:
      raise ConfigurationError(
        'Partitioner.gather_layers = True needs Partitioner.manual = True: without it XLA gathers '
        'weights by itself. Remove one of the two bindings.'
      )
    split = self._split_weight_axes()
    mesh_axes = {self.axes_of(name) for name in split}
    splits_layers = bool(self.axes_of('layers'))
    is_uniform = len(mesh_axes) == 1 and not splits_layers
    if self.gather_layers and not is_uniform:
      listed = ', '.join(map(repr, split)) or 'none'
      raise ConfigurationError(
        f'Partitioner.gather_layers = True needs all weights split over the same mesh axes, but '
        f"axis_rules split {listed}. Use only the rule of 'embed', as "
        'gin/partition/context_fsdp.gin.'
      )

  def _split_weight_axes(self) -> list[str]:
    """The logical axes of parameters that are split."""
    of_weights = [name for name in self.axis_rules if name not in ('batch', 'time')]
    return [name for name in of_weights if self.axes_of(name)]

  def weight_axes(self) -> tuple[str, ...]:
    """The mesh axes over which the weights of layers stay split; empty unless `gather_layers`."""
    if not self.gather_layers:
      return ()
    first, *_ = self._split_weight_axes()
    return self.axes_of(first)

  @property
  def computation(self) -> tuple[Any, ...]:
    """What tells layouts apart, which several bindings can give; equal on one device."""
    if self.mesh.size == 1:
      return ()
    rules = {name: self.axes_of(name) for name in self.axis_rules}
    overrides = [(pattern.pattern, axes) for pattern, axes in self._parameter_axes]
    return dict(self.mesh.shape), rules, overrides, self.manual, self.gather_layers

  def axes_of(self, logical: str) -> tuple[str, ...]:
    """The mesh axes over which a logical axis is split, outermost first."""
    return as_tuple(self.axis_rules.get(logical))

  def check_rules(self, axes: Any) -> None:
    """Raises a ConfigurationError for a rule of a logical axis that nothing has.

    `axes` are the logical axes of all arrays of a train state, a pytree.
    """
    known = {*LOGICAL_AXES, *jax.tree.leaves(axes)}
    for name in self.axis_rules:
      if name not in known:
        raise ConfigurationError(
          f'Partitioner.axis_rules splits {name!r}, but no array of this model has that logical '
          f'axis. The model has {", ".join(sorted(known))}.{did_you_mean(name, known)}'
        )

  def sharding(self, axes: Sequence[str | None]) -> NamedSharding:
    """The sharding of an array with these logical axes."""
    split = [self.axis_rules.get(axis or '') for axis in axes]
    spec = PartitionSpec(*split)
    return NamedSharding(self.mesh, spec)

  def shardings(self, shapes: Any, axes: Any) -> Any:
    """The sharding of every leaf of a pytree of arrays or shapes, from the logical axes of each.

    Raises a ConfigurationError if a dimension does not divide over the devices of its mesh axes.
    """

    def of_leaf(key_path, leaf, axes):
      sharding = self.sharding(axes)
      for size, axis, split in zip(leaf.shape, axes, sharding.spec, strict=True):
        sizes = [self.mesh.shape[name] for name in as_tuple(split)]
        parts = math.prod(sizes)
        if size % parts:
          named = 'the size'
          if axis == 'time':
            named = 'FullAttention.max_context'
          raise ConfigurationError(
            f'{leaf_path(key_path)} of shape {tuple(leaf.shape)} cannot be split over '
            f'{sharding.spec}: {size} is not a multiple of {parts} devices. Change {named} to '
            f'{_nearest(size, parts)}, or Partitioner.axis_rules.'
          )
      return sharding

    return jax.tree_util.tree_map_with_path(of_leaf, shapes, axes)

  def parameter_axes(self, path: str, declared: Axes | None, shape: Sequence[int]) -> Axes:
    """The logical axes of a parameter: of the first matching rule, else declared, else no axes.

    Raises a ConfigurationError if the matching rule has another rank than the parameter.
    """
    for pattern, axes in self._parameter_axes:
      if pattern.search(path):
        if len(axes) != len(shape):
          raise ConfigurationError(
            f'Partitioner.parameter_axes gives {path} the axes {axes}, but its shape is '
            f'{tuple(shape)}. Give the rule {pattern.pattern!r} {len(shape)} axes.'
          )
        return tuple(axes)
    if declared is None:
      return (None,) * len(shape)
    return declared

  def batch_sharding(self) -> NamedSharding:
    """The sharding of a batch's arrays [B, N·C]: by rows, whole along mesh axes that split time.

    A device's pieces of the chunks are not contiguous in a row; the step slices them.
    """
    return self.sharding(('batch', None))

  def parts_of(self, axis: str) -> int:
    """The number of parts into which a logical axis is split."""
    sizes = [self.mesh.shape[name] for name in self.axes_of(axis)]
    return math.prod(sizes)

  def check_batch(
    self,
    batch_size: int,
    *chunk_sizes: int,
    owner: str = '',
    feed: str = '',
  ) -> None:
    """Raises a ConfigurationError if rows or chunks do not divide over the devices.

    `owner` precedes the names of both in the message, such as 'Evaluator.', and `feed` is the name
    of the feed that has the same rows.
    """
    also = ''
    if feed:
      also = f', also for {feed}.batch_size'
    _check_divides(f'{owner}batch_size', batch_size, self.parts_of('batch'), also)
    for chunk_size in chunk_sizes:
      _check_divides(f'{owner}chunk_size', chunk_size, self.parts_of('time'))
    if jax.process_count() > 1 and not self.local_rows(batch_size):
      raise ConfigurationError(
        f'The mesh {dict(self.mesh.shape)} leaves process {jax.process_index()} of '
        f'{jax.process_count()} without a device. Start fewer processes, or include a layout that '
        'takes all devices, such as gin/partition/zero1.gin, with devices of each process in '
        'Partitioner.devices, if that is set.'
      )

  def local_rows(self, batch_size: int) -> list[int]:
    """The numbers of the rows that devices of this process hold, wholly or in part."""
    sharding = self.batch_sharding()
    by_device = sharding.addressable_devices_indices_map((batch_size, 1))
    rows = set()
    all_rows = range(batch_size)
    for index in by_device.values():
      if index:
        part, *_ = index
        rows.update(all_rows[part])
    return sorted(rows)

  def place_batch(self, batch: Batch, batch_size: int | None = None) -> Batch:
    """Copies a batch of the host to the devices of this process.

    It has the rows `local_rows(batch_size)`, each in its whole length, or all rows without a size.
    The result is the batch [B, T], sharded over the devices of all processes.
    """
    if batch_size is None:
      batch_size = len(batch.inputs)
      held = range(batch_size)
    else:
      held = self.local_rows(batch_size)
    rows = range(batch_size)
    sharding = self.batch_sharding()

    def place(x):
      def part(index):
        row_part, time_part = index
        rows_of_device = rows[row_part]
        first = held.index(rows_of_device.start)
        last = first + len(rows_of_device)
        return x[first:last, time_part]

      shape = (len(rows), x.shape[1])
      return jax.make_array_from_callback(shape, sharding, part)

    return jax.tree.map(place, batch)

  def jit(self, fn: Callable, **options: Any) -> Callable:
    """`jax.jit` on this mesh, inside which `constrain` applies these rules."""
    on_this_mesh = ambient.within(partitioner=self)
    return jax.jit(on_this_mesh(fn), **options)

  def shard_map(self, fn: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """`jax.shard_map` over all mesh axes, inside which `constrain` does nothing."""
    without_partitioner = ambient.within(partitioner=None)
    body = without_partitioner(fn)
    return jax.shard_map(
      body,
      mesh=self.mesh,
      in_specs=in_specs,
      out_specs=out_specs,
      check_vma=False,
    )


def as_tuple(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
  """The mesh axes that one entry of a PartitionSpec, or of a rule, names."""
  if axes is None:
    return ()
  if isinstance(axes, str):
    return (axes,)
  return tuple(axes)


def _check_divides(name: str, size: int, parts: int, also: str = '') -> None:
  """Raises a ConfigurationError unless a size divides into so many parts, one or more."""
  if size < 1:
    raise ConfigurationError(f'{name}={size} must be at least 1. Use {parts}.')
  if size % parts:
    raise ConfigurationError(
      f'{name}={size} does not divide over {parts} devices. Use {_nearest(size, parts)}{also}.'
    )


def _nearest(size: int, parts: int) -> str:
  """The sizes beside one that does not divide into so many parts, for a message."""
  below = size // parts * parts
  if below:
    return f'{below} or {below + parts}'
  return f'{parts}'
