"""The target devices of a program, which need not be attached to this machine."""

from collections.abc import Sequence
import contextlib
import contextvars
from typing import Any

import jax

from valkyrie.sharding import scopes

_devices: contextvars.ContextVar[Sequence[Any] | None] = contextvars.ContextVar(
  'devices', default=None
)


def target_devices(devices: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
  """Inside, programs and meshes are for these devices."""
  return scopes.within(_devices, tuple(devices))


def current_devices() -> Sequence[Any]:
  """The target devices; outside `target_devices`, the devices of this machine."""
  return _devices.get() or jax.devices()


def platform() -> str:
  """'cpu', 'gpu' or 'tpu': the platform of the target devices."""
  return current_devices()[0].platform
