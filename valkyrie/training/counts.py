"""The range of the numbers that devices count in int32."""

from valkyrie.errors import ConfigurationError

LARGEST = 2**31 - 1


def check_count(name: str, count: int) -> None:
  """Raises a ConfigurationError, naming the binding `name`, for a count that int32 cannot hold."""
  if count > LARGEST:
    raise ConfigurationError(f'{name}={count:,} exceeds {LARGEST:,}, the largest int32. Lower it.')
