"""Values that hold while a program is traced, such as the mesh axes over which time is split."""

from collections.abc import Iterator
import contextlib
import contextvars
from typing import TypeVar

T = TypeVar('T')


@contextlib.contextmanager
def within(variable: contextvars.ContextVar[T], value: T) -> Iterator[None]:
  """Inside, the variable has this value."""
  token = variable.set(value)
  try:
    yield
  finally:
    variable.reset(token)
