"""Valkyrie: hybrid language models trained through very long sequences."""

import os
import sys


def _leave_the_current_folder() -> None:
  """Removes the folder that `python -m valkyrie.…` put first on sys.path.

  It may be the run of a stranger, with a numpy.py that Python would import. It stays if this
  package itself lies there, as in a clone.
  """
  # While Python looks for the module, argv[0] is -m, and the module stands before the arguments.
  if sys.argv[:1] != ['-m'] or sys.flags.safe_path:
    return
  module = sys.orig_argv[-len(sys.argv)]  # 'valkyrie.main', or after letters: '-Bmvalkyrie.main'
  if module.startswith('-'):
    module = module.partition('m')[2]
  package = os.path.dirname(os.path.abspath(__file__))
  if module.partition('.')[0] == __name__ and sys.path[0] != os.path.dirname(package):
    del sys.path[0]


_leave_the_current_folder()

import importlib  # noqa: E402, the function above decides where the standard library is found
from typing import TYPE_CHECKING, Any  # noqa: E402

if TYPE_CHECKING:
  from valkyrie.inference.generation import Sampling as Sampling
  from valkyrie.inference.opened import load as load
  from valkyrie.lab.decomposition.decomposed import decomposition as decomposition

__version__ = '0.2.0'  # setup.py reads it; CHANGELOG.md has a section for each

_PUBLIC = {
  'load': 'valkyrie.inference.opened',
  'decomposition': 'valkyrie.lab.decomposition.decomposed',
  'Sampling': 'valkyrie.inference.generation',
}


def __getattr__(name: str) -> Any:
  """`valkyrie.load` and the like: jax and gin are imported when they are used."""
  if name not in _PUBLIC:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  return getattr(importlib.import_module(_PUBLIC[name]), name)
