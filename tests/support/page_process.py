"""Runs the blocks of a page of docs/ in order, all in this process.

A page has up to ten commands. Each would import the same packages and compile the same programs
again, so `python -m MODULE ...` calls the `main` of the module. The shell runs all other lines.

python page_process.py < BLOCKS, a JSON list of [language, file, text]
"""

import contextlib
import gc
import importlib
import json
import pathlib
import shlex
import subprocess
import sys
from typing import Any

import gin

PROGRAM = 'python -m '


def run_page(blocks: list[tuple[str, str, str]]) -> None:
  """Writes the blocks that are files, and runs the others."""
  for language, file, text in blocks:
    if file:
      path = pathlib.Path(file)
      path.parent.mkdir(exist_ok=True)
      path.write_text(text)
    elif language == 'python':
      exec(compile(text, '<page>', 'exec'), {'__name__': '__main__'})
    else:
      for command in commands_of(text):
        run_command(command)


def commands_of(text: str) -> list[str]:
  """The commands of a block of bash: a line each; quotes may hold a line's end."""
  commands = []
  unfinished = ''
  for line in text.replace('\\\n', '').splitlines():
    unfinished += line
    if unfinished.count('"') % 2 == 0:
      commands.append(unfinished)
      unfinished = ''
  assert not unfinished, unfinished
  return commands


def call_main(module: str, arguments: list[str]) -> Any:
  """What `python -m module arguments` does, in this process; returns the exit code."""
  gin.clear_config(clear_constants=True)
  importlib.invalidate_caches()
  return importlib.import_module(module).main(arguments)


def run_command(command: str) -> None:
  """Runs one command of a user."""
  print(f'$ {command}', file=sys.stderr)
  if not command.startswith(PROGRAM):
    subprocess.run(['bash', '-eu', '-c', command], check=True)
    return
  command, _, output = command.removeprefix(PROGRAM).partition(' > ')
  module, *arguments = shlex.split(command)
  if output:
    with pathlib.Path(output.strip()).open('w') as file, contextlib.redirect_stdout(file):
      code = call_main(module, arguments)
  else:
    code = call_main(module, arguments)
  assert code == 0, f'{command} exits with {code}'


if __name__ == '__main__':
  gc.set_threshold(200_000, 50, 50)  # as conftest.py does, for the time that tracing takes
  sys.path[0] = ''  # a user's folder, as for `python -m`
  run_page(json.load(sys.stdin))
