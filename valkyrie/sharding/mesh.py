"""The target devices of a program, which need not be attached to this machine, and their mesh."""

from collections.abc import Sequence
import math
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.sharding import Mesh

from valkyrie.errors import ConfigurationError, converted
from valkyrie.sharding import ambient

SLICE = 'slice'  # the mesh axis over the data-center network


def current_devices() -> Sequence[Any]:
  """The target devices, `Ambient.devices`, or the devices of this machine."""
  return ambient.current().devices or jax.devices()


def platform() -> str:
  """'cpu', 'gpu' or 'tpu': the platform of the target devices."""
  return current_devices()[0].platform


def make_mesh(
  axes: Sequence[tuple[str, int]],
  slices: int = 1,
  chosen: Sequence[int] | None = None,
) -> Mesh:
  """The mesh of these axes over all devices, or over the first one if every axis has size 1.

  `chosen` are the numbers of the only devices to take, in the order of `current_devices`.

  An axis is (name, size), outermost first; one size may be -1, for all remaining devices. With
  several slices, these are the axes of each, and the outermost axis SLICE joins the slices. Raises
  a ConfigurationError if the axes are malformed, or need other devices, or a number is wrong.
  """
  _check_axes(axes)
  if slices > 1:
    axes = ((SLICE, slices), *axes)
    _check_axes(axes)
  devices = current_devices()
  seen = f'this process sees {len(devices)}'
  if chosen is not None:
    devices = _chosen(devices, chosen)
    seen = f'Partitioner.devices has {len(devices)}'
  names = [name for name, _ in axes]
  sizes = [size for _, size in axes]
  given_sizes = [size for size in sizes if size != -1]
  fixed = math.prod(given_sizes)
  if sizes == [1] * len(sizes):
    devices = devices[:1]
  first = devices[0]
  slices_of_devices = {getattr(device, 'slice_index', 0) for device in devices}
  present = len(slices_of_devices)
  have_slices = slices > 1 or first.platform == 'tpu'
  if have_slices and slices != present > 1:
    raise ConfigurationError(
      f'The devices belong to {present} slices, but Partitioner.slices = {slices}. Set it to '
      f'{present}.'
    )
  has_one_open = sizes.count(-1) == 1
  if has_one_open and len(devices) % fixed == 0:
    open_axis = sizes.index(-1)
    sizes[open_axis] = len(devices) // fixed
  takes_all = math.prod(sizes) == len(devices)
  if -1 in sizes or not takes_all:
    axis_texts = [f'{name}={size}' for name, size in axes]
    wanted = ' x '.join(axis_texts)
    number = f'{fixed}'
    if -1 in sizes:
      number = f'a multiple of {fixed}'
    part = ''
    if fixed < len(devices):
      part = ', or name so many of these in Partitioner.devices'
    raise ConfigurationError(
      f'The mesh {wanted} needs {number} devices, but {seen} ({first.device_kind}). Run on '
      f'{number} devices{_slice_of(first, fixed)}{part}. '
      '--run_mode=precompile with a TPU slice by its sides, such as --topology=v4:4x4x2, or with '
      'nodes of GPUs, such as --topology=4xh100:8, estimates the memory and the time of a step on '
      'chips that are not here. A model that fits one device takes '
      'any number of them with --gin_file=gin/partition/data.gin.'
    )
  slices_of_mesh = 1
  if slices == present > 1:
    slices_of_mesh = slices
    sizes = sizes[1:]
  if chosen is None:
    array = _arranged(devices, sizes, slices_of_mesh)
  else:
    failure = f'The devices of Partitioner.devices = {chosen!r} cannot form the mesh {axes}'
    advice = 'Name as many in each slice and, on TPUs, chips that form a box of the torus.'
    with converted((AssertionError, ValueError), ConfigurationError, failure, advice):
      array = _arranged(devices, sizes, slices_of_mesh)
  return Mesh(array, names)


def _arranged(devices: Sequence[Any], sizes: Sequence[int], slices: int) -> Any:
  """The devices as an array of these sizes, with an axis before them if they are of slices.

  On a TPU, each mesh axis follows axes of the torus; elsewhere, devices keep their order.
  """
  if slices == 1:
    return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
  in_a_slice = [1, *sizes]
  over_slices = [slices] + [1] * len(sizes)
  return mesh_utils.create_hybrid_device_mesh(
    in_a_slice, over_slices, devices, allow_split_physical_axes=True
  )


def _chosen(devices: Sequence[Any], numbers: Any) -> Sequence[Any]:
  """The devices of these numbers."""
  is_list = isinstance(numbers, tuple | list) and bool(numbers)
  known = range(len(devices))

  def is_known(number):
    return type(number) is int and number in known

  if not is_list or not all(map(is_known, numbers)):
    raise ConfigurationError(
      f'Partitioner.devices = {numbers!r} does not name devices of this run, which are '
      f'numbered from 0 to {len(devices) - 1}. Name some, such as (0,), or None for all.'
    )
  if len(set(numbers)) < len(numbers):
    raise ConfigurationError(f'Partitioner.devices = {numbers!r} has a number twice. Remove one.')
  return [devices[number] for number in numbers]


def _slice_of(device: Any, chips: int) -> str:
  """The name of a TPU slice of so many chips like this one, in the families that count cores."""
  families = {'TPU v4': 'v4', 'TPU v5': 'v5p', 'TPU v5p': 'v5p'}
  family = families.get(device.device_kind)
  if family is None:
    return ''
  cores = 2 * chips
  return f', such as the slice {family}-{cores}'


def _check_axes(axes: Any) -> None:
  """Refuses malformed axes; XLA would abort the process if two had one name."""

  def is_axis(axis):
    match axis:
      case (str(), int(size)):
        return size == -1 or size >= 1
    return False

  is_mesh = isinstance(axes, tuple | list) and all(map(is_axis, axes))
  if is_mesh:
    names = {name for name, _ in axes}
    is_mesh = len(names) == len(axes)
  if not is_mesh:
    raise ConfigurationError(
      f'Partitioner.mesh = {axes!r} is not a mesh. Give each axis a unique name and a size, which '
      "is at least 1, or -1 for all remaining devices; for example (('data', -1),)."
    )
