"""The tasks in a clone, whose folder stands beside this package; a wheel has that folder here."""

import pathlib

__path__ = [str(pathlib.Path(__file__).resolve().parents[2] / 'tasks')]
