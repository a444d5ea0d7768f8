"""Folders: the gin files, beside this package in a clone and inside it in a wheel; the cache."""

import os
import pathlib

_PACKAGE = pathlib.Path(__file__).resolve().parents[1]

GIN = _PACKAGE / 'gin' if (_PACKAGE / 'gin').is_dir() else _PACKAGE.parent / 'gin'

TOKENIZER = 'tokenizer'  # of a run or an export, before the suffix of its kind


def cache() -> pathlib.Path:
  """The folder of token stores and compiled programs."""
  named = os.environ.get('VALKYRIE_CACHE')
  if named:
    return pathlib.Path(named).expanduser().absolute()
  root = os.environ.get('XDG_CACHE_HOME') or '~/.cache'
  return pathlib.Path(root).expanduser().absolute() / 'valkyrie'


def is_address(location: str) -> bool:
  """Whether a location is a URI, such as that of a bucket, and no path of this machine."""
  return '://' in location
