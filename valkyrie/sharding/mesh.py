"""The devices that a program is for, and a mesh of them from the axes that gin names."""

from collections.abc import Iterator, Sequence
import contextlib
import contextvars
import math
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.sharding import Mesh

from valkyrie.errors import ConfigurationError

_devices: contextvars.ContextVar[Sequence[Any] | None] = contextvars.ContextVar(
  'devices', default=None
)


@contextlib.contextmanager
def on_devices(devices: Sequence[Any]) -> Iterator[None]:
  """Within it, a mesh is made of these devices, which may be those of a machine far away."""
  token = _devices.set(tuple(devices))
  try:
    yield
  finally:
    _devices.reset(token)


def platform() -> str:
  """'cpu', 'gpu' or 'tpu': what a program is made for, wherever it is compiled."""
  devices = _devices.get()
  return jax.default_backend() if devices is None else devices[0].platform


def make_mesh(axes: Sequence[tuple[str, int]]) -> Mesh:
  """The mesh of these axes over all devices, or over the first one if each axis has one.

  Args:
    axes: (axis name, devices along it), outermost first; -1 once takes all that are left.

  Raises:
    ConfigurationError: the axes are none, or need another number of devices.
  """
  _check_axes(axes)
  devices = _devices.get() or jax.devices()
  names = [name for name, _ in axes]
  sizes = [size for _, size in axes]
  fixed = math.prod(size for size in sizes if size != -1)
  if sizes == [1] * len(sizes):
    devices = devices[:1]
  if sizes.count(-1) == 1 and len(devices) % fixed == 0:
    sizes[sizes.index(-1)] = len(devices) // fixed
  if math.prod(sizes) != len(devices) or -1 in sizes:
    wanted = ' x '.join(f'{name}={size}' for name, size in axes)
    number = f'a multiple of {fixed}' if -1 in sizes else fixed
    raise ConfigurationError(
      f'The mesh {wanted} needs {number} devices, but there are {len(devices)} '
      f'({devices[0].device_kind}). Run it where there are {number}, or choose a layout that fits, '
      'such as gin/partition/data.gin, which takes whatever there is.'
    )
  # On a TPU each axis of the mesh lies along axes of the torus; elsewhere devices keep their order.
  return Mesh(mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True), names)


def _check_axes(axes: Any) -> None:
  """XLA ends the process where two axes have one name."""

  def is_axis(axis):
    match axis:
      case (str(), int(size)):
        return size == -1 or size >= 1
    return False

  whole = isinstance(axes, tuple | list) and all(is_axis(axis) for axis in axes)
  if not whole or len({name for name, _ in axes}) < len(axes):
    raise ConfigurationError(
      f'Partitioner.mesh = {axes!r} is no mesh: give each axis a name of its own and its devices, '
      "which are at least 1, or -1 for all that are left; such as (('data', -1),)."
    )
