"""Size and compile time of the train step with twice the layers and with 16 times the chunks.

Neither should make the program larger: both are loops.

    bash scripts/experiment compile_scaling
"""
# Environment: tpu

import argparse
from collections.abc import Mapping, Sequence
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
from typing import Any

from valkyrie.distributed import console

COMMAND = (
  *('-m', 'valkyrie.main', '--gin_file=gin/v4_32.gin'),
  *('--run_mode=precompile', '--topology=v4:4x4x2'),
  f'--gin.precompile.hbm_bytes={2**40}',  # so that everything fits, and no remedy is compiled
)
PROGRAMS = ((36, 10), (72, 10), (36, 160))  # layers, chunks; the first is the baseline


def compiled(layers: int, chunks: int) -> Mapping[str, Any]:
  """The certificate of gin/v4_32.gin with these sizes, compiled in a process of its own."""
  with tempfile.TemporaryDirectory() as model_dir:
    changed = (
      f'--gin.LanguageModel.layers={layers}',
      f'--gin.chunks={chunks}',
      f'--gin.backprop_chunks={chunks}',
      f'--model_dir={model_dir}',
    )
    subprocess.run([sys.executable, *COMMAND, *changed], stdout=subprocess.DEVNULL, check=False)
    (certificate,) = json.loads(pathlib.Path(model_dir, 'precompile.json').read_text())
  return certificate


@console.program
def main(arguments: Sequence[str] | None = None) -> None:
  """Prints the table."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--repeats', type=int, default=3, help='times that each program is compiled')
  flags = parser.parse_args(arguments)
  # In turns, so that a machine that slows down affects all programs equally.
  turns = [[compiled(*program) for program in PROGRAMS] for _ in range(flags.repeats)]
  print(f'{turns[0][0]["compiler"]} for {turns[0][0]["topology"]}, median of {flags.repeats}')
  print('layers  chunks  instructions  of the first  code MB  of the first  seconds  of the first')
  first = None
  for (layers, chunks), certificates in zip(PROGRAMS, zip(*turns, strict=True), strict=True):
    seconds = statistics.median(c['compile_seconds'] for c in certificates)
    now = certificates[0]['instructions'], certificates[0]['code_bytes'] / 1e6, seconds
    first = first or now
    of_first = [value / one for value, one in zip(now, first, strict=True)]
    print(
      f'{layers:6} {chunks:7} {now[0]:13,} {of_first[0]:13.3f} {now[1]:8.1f} {of_first[1]:13.3f}'
      f' {now[2]:8.1f} {of_first[2]:13.3f}'
    )


if __name__ == '__main__':
  sys.exit(main())
