"""Where the gin files are: beside this package in a clone, inside it in a wheel."""

import pathlib

_PACKAGE = pathlib.Path(__file__).resolve().parent

GIN = _PACKAGE / 'gin' if (_PACKAGE / 'gin').is_dir() else _PACKAGE.parent / 'gin'
