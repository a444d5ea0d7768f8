"""Runs scripts/experiments/chip.py in one process, but for the command that it kills.

On a chip each command is a process of its own. Here they would import the same packages six times.

python chip_process.py FLAG ...
"""

from collections.abc import Sequence
import importlib
import pathlib
import sys

from page_process import call_main

SCRIPTS = pathlib.Path(__file__).parents[2] / 'scripts' / 'experiments'


def call(command: Sequence[str]) -> None:
  """What `chip.call` does, by the `main` of the module or script."""
  _, *words = command
  if words[0] == '-m':
    _, name, *arguments = words
  else:
    script, *arguments = words
    name = pathlib.Path(script).stem
  code = call_main(name, arguments)
  assert not code, f'{command} exits with {code}'


if __name__ == '__main__':
  sys.path[:0] = ['', str(SCRIPTS)]
  chip = importlib.import_module('chip')
  chip.call = call
  sys.exit(chip.main(sys.argv[1:]))
