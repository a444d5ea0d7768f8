"""The number of files that a process may open, checked before anything needs them."""

import resource

from valkyrie.errors import ConfigurationError

_NEEDED = 64  # a run with TensorBoard has about 25 open, and its saves open more for moments
_WANTED = 4096


def check() -> None:
  """Raises the limit of this process as far as it may; a ConfigurationError if that is too low."""
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  if soft == resource.RLIM_INFINITY or soft >= _WANTED:
    return
  limit = min(hard, _WANTED)
  if hard == resource.RLIM_INFINITY:
    limit = _WANTED
  if limit > soft:
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
  if limit < _NEEDED:
    raise ConfigurationError(
      f'This process may open {limit} files, and a run needs {_NEEDED}. Raise the limit by '
      '"ulimit -n 1024" in a new shell, or in the settings of the service or container that starts '
      'it, and run the same command again.'
    )
