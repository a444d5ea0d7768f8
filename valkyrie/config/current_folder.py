"""The current folder as a place of packages: only for those that a command names.

Neither `python -m valkyrie.main` nor the command `valkyrie` searches the current folder, which may
be the run of a stranger with a numpy.py.
"""

import importlib
from importlib.machinery import PathFinder
import importlib.util
import os
import sys

from valkyrie.errors import ConfigurationError


def search(module: str) -> None:
  """Lets Python find the package of a module in the current folder, after all other places.

  Raises a ConfigurationError if a package of this name is there and in another place.
  """
  name = module.partition('.')[0]
  try:
    here = os.getcwd()
  except OSError:  # deleted
    return
  in_here = PathFinder.find_spec(name, [here])
  if in_here is None or here in sys.path:
    return
  elsewhere = importlib.util.find_spec(name)
  if elsewhere is None or elsewhere.origin is None:  # a folder without __init__.py comes last
    sys.path.append(here)
    importlib.invalidate_caches()
    return
  if in_here.origin is None or os.path.realpath(in_here.origin) == os.path.realpath(
    elsewhere.origin
  ):
    return
  raise ConfigurationError(
    f'There are two packages {name}: {in_here.origin} in the current folder, and '
    f'{elsewhere.origin}. For the second one, start the command in another folder; for the first '
    f'one, put PYTHONPATH=. before the command.'
  )
