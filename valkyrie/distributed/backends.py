"""The backend of jax: the message where it cannot be started."""

from collections.abc import Iterator
import os
import traceback

from valkyrie import packages
from valkyrie.errors import ConfigurationError

_STARTS_BACKENDS = os.path.join('jax', '_src', 'xla_bridge.py')


def misfit(error: BaseException) -> ConfigurationError | None:
  """The error to show for one that jax raised while it started its backend; None for any other.

  jax raises a RuntimeError for an unknown platform, and fails an assertion without a word for CUDA
  without a GPU.
  """
  if not any(_STARTS_BACKENDS in name for name in _files(error)):
    return None
  before, _, _ = str(error).partition('\n  In call to configurable')
  reason = before.strip() or 'it found no device'
  named = os.environ.get('JAX_PLATFORMS')
  asked = 'JAX_PLATFORMS is not set'
  if named:
    asked = f'JAX_PLATFORMS={named}'
  return ConfigurationError(
    f'jax cannot use the devices of this machine ({asked}): {reason}. Unset JAX_PLATFORMS, or name '
    'a platform that this machine has, such as cpu. For an NVIDIA GPU, jax needs a package: '
    f'{packages.install("jax[cuda13]")}'
  )


def _files(error: BaseException | None) -> Iterator[str]:
  """The files of the functions through which an error and its causes came."""
  while error is not None:
    for frame, _ in traceback.walk_tb(error.__traceback__):
      yield frame.f_code.co_filename
    error = error.__cause__ or error.__context__
