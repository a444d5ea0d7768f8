"""Seconds from the command to the end of the first step of a run, in parts.

A run says when it begins and ends each part, and the seconds between these lines are measured from
outside. The token stores are there. The first start finds no compiled programs, later ones those
that it has kept.

    bash scripts/experiment startup_bench
"""
# Environment: base

import argparse
from collections.abc import Sequence
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

from valkyrie.config import paths
from valkyrie.distributed import console

# The beginning of the line that ends each part; the third line tells how long each half took.
PARTS = {
  'imports': 'valkyrie ',
  'model, data and state': 'compiling ',
  'tracing and compilation': 'traced in ',
  'first step': 'step 1/1 ',
}
TRACED = re.compile(r'traced in ([\d.]+) s, compiled in ([\d.]+) s')


def start(gin_file: str, programs: pathlib.Path) -> dict[str, float]:
  """Starts a run of one step, with its compiled programs in a folder -> {part: seconds}."""
  stores = json.dumps(str(paths.cache()))
  with tempfile.TemporaryDirectory() as model_dir:
    command = [sys.executable, '-m', 'valkyrie.main', f'--gin_file={gin_file}']
    command += ['--gin.train_steps=1', '--gin.log_every=1', '--gin.Evaluator.chunks=1']
    command += [f'--gin.TaskFeed.data_dir={stores}', f'--model_dir={model_dir}']
    began = time.perf_counter()
    process = subprocess.Popen(
      command,
      stderr=subprocess.PIPE,
      text=True,
      env={**os.environ, 'VALKYRIE_CACHE': str(programs)},
    )
    assert process.stderr is not None
    found = {}
    parts = list(PARTS)
    said = []
    for line in process.stderr:
      said.append(line)
      if parts and line.startswith(PARTS[parts[0]]):
        now = time.perf_counter()
        if times := TRACED.match(line):
          found |= dict(zip(('tracing', 'compilation'), map(float, times.groups()), strict=True))
          parts.pop(0)
        else:
          found[parts.pop(0)] = now - began
        began = now
        if not parts:
          process.terminate()
    if parts:
      raise SystemExit(f'The run ended with {process.wait()}:\n' + ''.join(said[-5:]))
    process.wait()
  return found


@console.program
def main(arguments: Sequence[str] | None = None) -> None:
  """Prints a table, with a row for each start."""
  parser = argparse.ArgumentParser(
    prog='scripts/experiment startup_bench',
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument('--gin_file', default='gin/tiny_cpu.gin', help='default: %(default)s')
  parser.add_argument('--starts', type=int, default=2, help='default: %(default)s')
  flags = parser.parse_args(arguments)
  with tempfile.TemporaryDirectory() as folder:
    start(flags.gin_file, pathlib.Path(folder, 'unmeasured'))  # builds missing stores
    for number in range(1, flags.starts + 1):
      found = start(flags.gin_file, pathlib.Path(folder, 'programs'))
      if number == 1:
        print('| start | ' + ' | '.join(found) + ' | all |')
        print('| --- ' * (len(found) + 2) + '|')
      seconds = [*found.values(), sum(found.values())]
      print(f'| {number} | ' + ' | '.join(f'{value:.1f} s' for value in seconds) + ' |', flush=True)


if __name__ == '__main__':
  sys.exit(main())
