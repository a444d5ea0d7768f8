"""Optional packages: the command that installs one for the Python of this process.

It names the package that is missing, never this one: `valkyrie` on the public index is a package of
somebody else.
"""

import importlib.util
import shlex
import sys


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
