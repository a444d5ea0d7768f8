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
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from valkyrie.errors import ConfigurationError
from valkyrie.types import Array, Batch, Params

Axes = tuple[str | None, ...]

_current: contextvars.ContextVar['Partitioner | None'] = contextvars.ContextVar(
  'partitioner', default=None
)
_devices: contextvars.ContextVar[Sequence[jax.Device] | None] = contextvars.ContextVar(
  'devices', default=None
)


@contextlib.contextmanager
def on_devices(devices: Sequence[jax.Device]) -> Iterator[None]:
  """Within it, a mesh is made of these devices, which may be those of a machine far away."""
  token = _devices.set(tuple(devices))
  try:
    yield
  finally:
    _devices.reset(token)


def all_devices() -> Sequence[jax.Device]:
  """The devices that a mesh is made of: those of `on_devices`, or all that this process sees."""
  devices = _devices.get()
  return jax.devices() if devices is None else devices


def platform() -> str:
  """'cpu', 'gpu' or 'tpu': what a program is made for, wherever it is compiled."""
  devices = _devices.get()
  return jax.default_backend() if devices is None else devices[0].platform


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
  ):
    """Builds the mesh.

    Args:
      mesh: (axis name, devices along it), outermost first; -1 once takes all that are left. A mesh
        of one device is always possible; any other takes all devices.
      parameter_axes: (regular expression, logical axes), the first match in a path counts.
      axis_rules: (logical axis, mesh axis or axes); an axis without a rule is not split.

    Raises:
      ConfigurationError: where the devices cannot form the mesh, or a rule names an unknown axis.
    """
    self.mesh = _make_mesh(mesh)
    self.parameter_axes = tuple((re.compile(pattern), axes) for pattern, axes in parameter_axes)
    self.axis_rules = dict(axis_rules)
    for logical, axes in self.axis_rules.items():
      unknown = set(_as_tuple(axes)) - set(self.mesh.axis_names)
      if unknown:
        raise ConfigurationError(
          f'Partitioner.axis_rules splits {logical!r} over {sorted(unknown)}, but the mesh has the '
          f'axes {self.mesh.axis_names}. Name one of them, or leave the rule out.'
        )

  def sharding(self, axes: Sequence[str | None]) -> NamedSharding:
    """The layout of an array with these logical axes."""
    split = [self.axis_rules.get(axis) if axis else None for axis in axes]
    return NamedSharding(self.mesh, PartitionSpec(*split))

  def batch_sharding(self) -> NamedSharding:
    """The layout of a batch's arrays [B, T]."""
    return self.sharding(('batch', 'time'))

  def check_batch(self, batch_size: int) -> None:
    """Raises a ConfigurationError where the rows do not divide over the devices."""
    parts = self._parts(self.axis_rules.get('batch'))
    if batch_size % parts:
      below, above = batch_size // parts * parts, (batch_size // parts + 1) * parts
      raise ConfigurationError(
        f'batch_size={batch_size} rows cannot be divided over {parts} devices. '
        + (f'The nearest that can are {below} and {above}.' if below else f'Use {above}.')
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

  def place_batch(self, batch: Batch) -> Batch:
    """Puts this process's rows on its devices, as part of the global batch."""
    sharding = self.batch_sharding()
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x), batch)

  def _parts(self, axes: str | tuple[str, ...] | None) -> int:
    return math.prod(self.mesh.shape[axis] for axis in _as_tuple(axes))

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


def _as_tuple(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
  return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def _make_mesh(axes: Sequence[tuple[str, int]]) -> Mesh:
  devices = all_devices()
  names = [name for name, _ in axes]
  sizes = [size for _, size in axes]
  fixed = math.prod(size for size in sizes if size != -1)
  if sizes == [1] * len(sizes):
    devices = devices[:1]
  if sizes.count(-1) == 1 and len(devices) % fixed == 0:
    sizes[sizes.index(-1)] = len(devices) // fixed
  if math.prod(sizes) != len(devices) or -1 in sizes:
    wanted = ' x '.join(f'{name}={size}' for name, size in axes)
    raise ConfigurationError(
      f'The mesh {wanted} needs {fixed} devices, but there are {len(devices)} '
      f'({devices[0].device_kind}). Run it where there are {fixed}, or choose a layout that fits, '
      'such as gin/partition/data.gin, which takes whatever there is.'
    )
  # On a TPU each axis of the mesh lies along axes of the torus; elsewhere devices keep their order.
  return Mesh(mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True), names)
