"""The folder of the gin files: beside this package in a clone, inside it in a wheel."""

import pathlib

_PACKAGE = pathlib.Path(__file__).resolve().parents[1]

GIN = _PACKAGE / 'gin' if (_PACKAGE / 'gin').is_dir() else _PACKAGE.parent / 'gin'
