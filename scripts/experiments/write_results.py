"""Runs the commands of a page of docs/results, and writes what they print below them.

A command stands in a comment before its table or text, and another comment ends it:

    <!-- run: bash scripts/experiment power_errors -->
    <!-- end of run -->

    bash scripts/experiment write_results design                     all commands of the page
    bash scripts/experiment write_results memory --only recall       those that contain a text

Markdown tables are written as they are, other texts as code. `certify` writes its own tables.
"""
# Environment: base

import argparse
from collections.abc import Sequence
import pathlib
import re
import subprocess
import sys

import page_blocks

from valkyrie.distributed import console

FOLDER = pathlib.Path(__file__).parents[2] / 'docs' / 'results'
COMMAND = re.compile(r'^<!-- run: (.*) -->$', re.MULTILINE)


def shown(printed: str) -> str:
  """The Markdown tables in what a command printed; without any, all of it as code."""
  lines = printed.strip('\n').splitlines()
  tables = re.findall(r'(?:^\|.*\n?)+', printed, re.MULTILINE)
  if tables:
    return '\n\n'.join(table.strip() for table in tables)
  return '\n'.join(f'    {line}'.rstrip() for line in lines)


@console.program
def main(arguments: Sequence[str] | None = None) -> int:
  """Returns 1 if a command failed; then what it had printed before stays on the page."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('page', help='its name without .md')
  parser.add_argument('--only', default='', help='only commands that contain this text')
  flags = parser.parse_args(arguments)
  page = FOLDER / f'{flags.page}.md'
  failed = False
  for command in COMMAND.findall(page.read_text()):
    if flags.only not in command:
      continue
    done = subprocess.run(['bash', '-c', command], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
      print(f'{command} ended with {done.returncode}: its results stay.', file=sys.stderr)
      failed = True
      continue
    begin = f'<!-- run: {command} -->'
    text = f'\n{shown(done.stdout)}\n'
    written = page_blocks.with_block(page.read_text(), begin, '<!-- end of run -->', text)
    page.write_text(written)
  return int(failed)


if __name__ == '__main__':
  sys.exit(main())
