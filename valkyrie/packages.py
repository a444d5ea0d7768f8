"""Packages: their versions, and the commands that install one and that start a module of ours.

The command that installs names the package that is missing, never this one: `valkyrie` on the
public index is a package of somebody else.
"""

from collections.abc import Iterator
import contextlib
from importlib import metadata
import importlib.util
import os
import pathlib
import platform
import shlex
import sys

from valkyrie import __version__

_COMPILERS = {
  'cpu': ('jaxlib',),
  'gpu': ('jax-cuda13-pjrt', 'jax-cuda12-pjrt'),
  'tpu': ('libtpu',),
}
_COMPUTING = ('jax', 'jaxlib', 'dm-haiku', 'optax', 'orbax-checkpoint', 'numpy')


def version(package: str) -> str:
  """The version of a package; some ways to install one leave no metadata."""
  try:
    return metadata.version(package)
  except metadata.PackageNotFoundError:
    return 'unknown'


def versions() -> dict[str, str]:
  """The versions of Valkyrie, Python and the packages that decide the computation of a step."""
  found = {'valkyrie': __version__, 'python': platform.python_version()}
  for package in _COMPUTING:
    found[package] = version(package)
  return found


def compilers(platform: str) -> dict[str, str]:
  """{package: version} of the compilers for a platform of jax, such as 'tpu', as far as known."""
  found = {}
  for package in _COMPILERS.get(platform, ()):
    for distribution in metadata.distributions(name=package):
      found.setdefault(package, distribution.version)
  return found


def start(module: str) -> list[str]:
  """The command that runs a module of this package in a process of its own.

  -P leaves out the current folder, which may be a stranger's, with a folder `valkyrie`.
  """
  folder_of_package = pathlib.Path(__file__).resolve().parents[1]
  if folder_of_package == pathlib.Path.cwd():
    return [sys.executable, '-m', module]
  return [sys.executable, '-P', '-m', module]


@contextlib.contextmanager
def without_current_folder() -> Iterator[None]:
  """A context, or a decorator: a Python that starts in it does not search the current folder.

  The processes of multiprocessing search it for their first modules, before they have our path.
  """
  before = os.environ.get('PYTHONSAFEPATH')
  os.environ['PYTHONSAFEPATH'] = '1'
  try:
    yield
  finally:
    if before is None:
      del os.environ['PYTHONSAFEPATH']
    else:
      os.environ['PYTHONSAFEPATH'] = before


def install(requirement: str) -> str:
  """The command that installs a package, such as 'gcsfs' or 'jax[tpu]', where this Python finds it.

  `pip` alone may be the one of another Python. An environment without pip, such as one that uv
  made, gets it from the standard library first.
  """
  python = shlex.quote(sys.executable or 'python3')
  command = f'{python} -m pip install {shlex.quote(requirement)}'
  if importlib.util.find_spec('pip') is None:
    command = f'{python} -m ensurepip && {command}'
  return command
