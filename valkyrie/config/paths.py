"""Folders: the gin files, beside this package in a clone and inside it in a wheel; the cache."""

import os
import pathlib

from valkyrie.errors import ConfigurationError, usable_path, with_home

_PACKAGE = pathlib.Path(__file__).resolve().parents[1]

_IN_WHEEL = _PACKAGE / 'gin'
GIN = _IN_WHEEL if _IN_WHEEL.is_dir() else _PACKAGE.parent / 'gin'

TOKENIZER = 'tokenizer'  # the file of a run or an export, without its suffix


def cache() -> pathlib.Path:
  """The folder of token stores and compiled programs; ConfigurationError if it is unusable."""
  named = os.environ.get('VALKYRIE_CACHE')
  if named:
    return pathlib.Path(usable_path('VALKYRIE_CACHE', named)).absolute()
  root = os.environ.get('XDG_CACHE_HOME') or '~/.cache'
  try:
    root = with_home(root)
  except ConfigurationError as error:
    raise ConfigurationError(f'{error} VALKYRIE_CACHE=FOLDER sets the cache alone.') from None
  return pathlib.Path(usable_path('XDG_CACHE_HOME', root)).absolute() / 'valkyrie'


def is_address(location: str) -> bool:
  """Whether a location is a URI, such as gs://BUCKET, rather than a path of this machine."""
  return '://' in location
