"""A mesh of devices from the axes that gin names."""

from collections.abc import Sequence
import math
from typing import Any

from jax.experimental import mesh_utils
from jax.sharding import Mesh

from valkyrie.errors import ConfigurationError


def make_mesh(axes: Sequence[tuple[str, int]], devices: Sequence[Any]) -> Mesh:
  """The mesh of these axes over the devices, or over the first one if each axis has one.

  Args:
    axes: (axis name, devices along it), outermost first; -1 once takes all that are left.
    devices: of jax.

  Raises:
    ConfigurationError: the axes are none, or need another number of devices.
  """
  _check_axes(axes)
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
