"""A decoder becomes a hybrid: primed layers beside fresh ones, each with and without a teacher.

A small decoder learns the standard library's sources. Three of its four layers of attention then
become layers of the gated delta rule, which begin from the attention (`InitialWeights.primed`) or
fresh, with outputs of zero. All read the same tokens at the same rates. The table has bits per byte
after so many tokens: means over the seeds, each with a decoder of its own, and their ranges. The
last column is of all held-out text; the others, of its first 12,288 tokens, are higher.

The same command continues after any interruption, and trains nothing twice.

    bash scripts/experiment priming runs/priming
    bash scripts/experiment priming runs/priming --learning_rate=1e-3
"""
# Environment: base

import argparse
from collections.abc import Mapping, Sequence
import math
import pathlib
import re
import subprocess
import sys

from valkyrie.distributed import console
from valkyrie.monitoring.json_lines import by_step

FILES = 'scripts/experiments'
STEP_TOKENS = 1024  # 4 rows of 2 chunks of 128
PRIMED = '--gin.InitialWeights.primed=True'
KINDS = ('primed', 'fresh', 'fresh, taught', 'primed, taught')


@console.program
def main(arguments: Sequence[str] | None = None) -> None:
  """Trains what is missing, and prints the table."""
  parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
  parser.add_argument('folder', type=pathlib.Path, help='of the runs')
  parser.add_argument('--seeds', type=int, nargs='+', default=[0, 1], help='(default: 0 1)')
  parser.add_argument('--decoder_steps', type=int, default=2400, help='(default: %(default)s)')
  parser.add_argument('--steps', type=int, default=100, help='of a hybrid (default: %(default)s)')
  parser.add_argument('--learning_rate', type=float, default=3e-3, help='(default: %(default)s)')
  flags = parser.parse_args(arguments)
  found: dict[str, list[Mapping[int, float]]] = {kind: [] for kind in KINDS}
  for seed in flags.seeds:
    decoder = flags.folder / f'decoder_{seed}'
    trained(decoder, 'decoder', flags.decoder_steps, f'--gin.seed={seed}')
    for kind in KINDS:
      place = flags.folder / f'{kind.replace(", ", "_")}_{flags.learning_rate:g}_{seed}'
      options = [
        f'--gin.seed={seed}',
        f'--gin.learning_rate={flags.learning_rate:g}',
        f'--gin.train.initial_weights="{decoder}"',
      ]
      if 'primed' in kind:
        options.append(PRIMED)
      file = 'hybrid'
      if 'taught' in kind:
        file = 'taught'
        options.append(f'--gin.teacher="{decoder}"')
      found[kind].append(trained(place, file, flags.steps, *options))
  print(table(found))


def trained(place: pathlib.Path, file: str, steps: int, *options: str) -> dict[int, float]:
  """{step: bits per byte of held-out text} of a run, which is trained if it is not complete."""
  measured = evaluations(place)
  if steps not in measured:
    command = [
      '-m',
      'valkyrie.main',
      f'--gin_file={FILES}/priming_{file}.gin',
      f'--gin.train_steps={steps}',
      f'--model_dir={place}',
      *options,
    ]
    print('python', *command, file=sys.stderr, flush=True)
    subprocess.run([sys.executable, *command], check=True, stdout=sys.stderr)
    measured = evaluations(place)
  return measured


def evaluations(place: pathlib.Path) -> dict[int, float]:
  """{step: bits per byte} that a run has measured; step 0 is of the weights that it began with."""
  found = {}
  log = place / 'log.txt'
  if log.exists():
    loss = re.search(r'loss of the loaded weights is ([\d.]+)', log.read_text())
    if loss:
      found[0] = float(loss[1]) / math.log(2)
  for step, line in by_step(place / 'eval' / 'metrics.jsonl').items():
    found[step] = line['loss'] / math.log(2)
  return found


def table(found: Mapping[str, Sequence[Mapping[int, float]]]) -> str:
  """Means and ranges over seeds by thousands of tokens, a row for each kind."""
  steps = sorted(next(iter(found.values()))[0])
  tokens = [f'{step * STEP_TOKENS / 1000:.0f}' for step in steps]
  lines = [f'| thousand tokens | {" | ".join(tokens)} |', '| --- ' * (len(steps) + 1) + '|']
  for kind, of_seeds in found.items():
    cells = []
    for step in steps:
      values = [measured[step] for measured in of_seeds]
      mean = sum(values) / len(values)
      cells.append(f'{mean:.3f} ({min(values):.3f} to {max(values):.3f})')
    lines.append(f'| {kind} | {" | ".join(cells)} |')
  return '\n'.join(lines)


if __name__ == '__main__':
  sys.exit(main())
