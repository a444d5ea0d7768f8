"""Valkyrie: hybrid language models trained through very long sequences."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from valkyrie.inference.generation import Sampling as Sampling
  from valkyrie.inference.opened import load as load

__version__ = '0.2.0'  # setup.py reads it; CHANGELOG.md has a section for each

_PUBLIC = {'load': 'valkyrie.inference.opened', 'Sampling': 'valkyrie.inference.generation'}


def __getattr__(name: str) -> Any:
  """`valkyrie.load` and `valkyrie.Sampling`: jax and gin are imported when they are used."""
  if name not in _PUBLIC:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  return getattr(importlib.import_module(_PUBLIC[name]), name)
