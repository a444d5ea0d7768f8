"""Numbers of things, checked where they come in: a negative one fails late, and says little."""

from valkyrie.errors import ConfigurationError


def check_sizes(of: str, least: int = 1, /, **sizes: int) -> None:
  """Raises a ConfigurationError, naming the module `of`, where a size is smaller than `least`."""
  for name, size in sizes.items():
    if size < least:
      raise ConfigurationError(f'{of}: {name}={size} must be at least {least}.')
