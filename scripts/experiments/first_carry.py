"""One task, learned by a first carry and by LoRA: the held-out loss, and the bytes of each.

The task is to say what a function does: from `name(arguments)` the first line of its docstring, for
the public functions of packages that Valkyrie needs. The base is gin/tiny_cpu.gin, trained on the
standard library, which lacks them, or a run that --base names, with its --gin_file. All learn
the same steps from it, from all answers or from a few (--answers), at several rates; of each, the
rate and the step with the lowest loss on the held-out answers count.

    bash scripts/experiment first_carry runs/first_carry
    bash scripts/experiment first_carry runs/first_carry --answers 48 --steps 100
"""
# Environment: base

import argparse
import ast
from collections.abc import Iterator, Sequence
import importlib.util
import json
import math
import pathlib
import re
import subprocess
import sys
from typing import NamedTuple
import warnings

from bench_runs import with_bindings

import valkyrie
from valkyrie.distributed import console
from valkyrie.monitoring.json_lines import by_step

PACKAGES = ('numpy', 'scipy', 'jax', 'optax', 'haiku', 'matplotlib')
RATES = {
  'first_carry': (0.01, 0.03, 0.1, 0.3),
  'lora': (1e-3, 3e-3, 1e-2, 3e-2),
  'lora_rank_1': (3e-3, 1e-2, 3e-2, 1e-1),
  'lora_everywhere': (1e-3, 3e-3, 1e-2),
}
# Lora.pattern alone chooses the matrices of attention.
FLAGS = {
  'lora_rank_1': ('--gin.Lora.rank=1',),
  'lora_everywhere': (r"--gin.Lora.pattern='/(query|key|value|out|gate|hidden|inner)$'",),
}
LONGEST = 100  # letters of a prompt or an answer
HELD_OUT = 10  # each tenth answer


class Learned(NamedTuple):
  """What one kind learned at its best rate: bits a token, and where."""

  bits: float
  rate: float
  step: int
  folder: pathlib.Path


def pairs() -> Iterator[tuple[str, str]]:
  """The (prompt, answer) of each public function; no two answers are equal."""
  found = {}
  warnings.simplefilter('ignore', SyntaxWarning)  # of old escapes in strings
  for package in PACKAGES:
    spec = importlib.util.find_spec(package)
    assert spec and spec.origin, f'{package} is not installed'
    for path in sorted(pathlib.Path(spec.origin).parent.rglob('*.py')):
      for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith(('_', 'test')):
          prompt = f'{node.name}({", ".join(argument.arg for argument in node.args.args)})\n'
          answer = (ast.get_docstring(node) or '').split('\n')[0]
          if answer.isascii() and 8 < len(answer) <= LONGEST and len(prompt) <= LONGEST:
            found[answer] = prompt
  yield from ((prompt, answer) for answer, prompt in found.items())


def run(*flags: str) -> None:
  """Runs Valkyrie in a process of its own, and prints how."""
  print('python -m valkyrie.main', *flags, flush=True)
  subprocess.run([sys.executable, '-m', 'valkyrie.main', *flags], check=True)


@console.program
def main(arguments: Sequence[str] | None = None) -> None:
  """Prints the table; a second call goes on."""
  flags = _flags(arguments)
  flags.folder.mkdir(parents=True, exist_ok=True)
  texts = _texts(flags.folder, flags.answers)
  model = [f'--gin_file={file}' for file in flags.gin_file] + flags.gin
  base = flags.base
  if base is None:
    base = flags.folder / 'base'
    run(*model, f'--gin.train_steps={flags.base_steps}', f'--model_dir={base}')
  best = {}
  table = ['| | bits a token of held-out answers | at other rates | bytes |']
  table.append('| --- | --- | --- | --- |')
  for kind, rates in RATES.items():
    learned = [_learned(flags, [*model, *texts], base, kind, rate) for rate in rates]
    best[kind], *others = sorted(learned)
    size = _first_carry_bytes(best[kind]) if kind == 'first_carry' else _adapter_bytes(best[kind])
    row = [kind, _cell(best[kind]), ', '.join(map(_cell, others)), f'{size:,}']
    table.append(f'| {" | ".join(row)} |')
  before = _loss_before(best['lora'])
  table.insert(2, f'| before | {before:.3f} | | |')
  answers = 'all' if flags.answers is None else f'{flags.answers:,}'
  print(f'\n{answers} answers, {flags.steps} steps; in brackets the rate, and the step\n')
  print('\n'.join(table))


def _flags(arguments: Sequence[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
  parser.add_argument('folder', type=pathlib.Path, help='of the runs')
  parser.add_argument('--base', type=pathlib.Path, help='a run to begin from (default: trained)')
  parser.add_argument('--gin_file', nargs='+', default=['gin/tiny_cpu.gin'], help="the base's")
  parser.add_argument('--base_steps', type=int, default=1600, help='default: %(default)s')
  parser.add_argument('--answers', type=int, help='to learn from (default: all)')
  parser.add_argument('--steps', type=int, default=400, help='of the task (default: %(default)s)')
  flags, flags.gin = with_bindings(parser, arguments)
  return flags


def _texts(folder: pathlib.Path, answers: int | None) -> list[str]:
  """Writes the answers to learn from and those held out; the flags of a run that reads them."""
  lines = [json.dumps({'prompt': prompt, 'answer': answer}) for prompt, answer in pairs()]
  held_out = lines[::HELD_OUT]
  learned = [line for number, line in enumerate(lines) if number % HELD_OUT]
  if answers is not None:
    spacing = len(learned) // answers
    learned = learned[::spacing][:answers]
  text = folder / f'learned_{len(learned)}.jsonl'
  validation = folder / 'held_out.jsonl'
  for path, chosen in ((text, learned), (validation, held_out)):
    if not path.exists():
      path.write_text('\n'.join(chosen) + '\n')
  return [f'--gin.text="{text}"', f'--gin.held_out="{validation}"']


def _learned(
  flags: argparse.Namespace,
  given: Sequence[str],
  base: pathlib.Path,
  kind: str,
  rate: float,
) -> Learned:
  """Trains one kind at one rate, if it is not done, and reads its evaluations."""
  suffix = '' if flags.answers is None else f'_{flags.answers}'
  folder = flags.folder / f'{kind}_{rate:g}{suffix}'
  run(
    *given,
    '--gin_file=gin/data/prompts.gin',
    f'--gin_file=gin/optimizers/{"lora" if kind.startswith("lora") else kind}.gin',
    *FLAGS.get(kind, ()),
    '--gin.chunk_size=128',
    '--gin.batch_size=8',
    f'--gin.warmup_steps={flags.steps // 20}',
    f'--gin.train_steps={flags.steps}',
    f'--gin.learning_rate={rate:g}',
    f'--gin.eval_every={flags.steps // 10}',
    '--gin.Evaluator.chunks=64',
    f'--gin.train.initial_weights="{base}"',
    f'--model_dir={folder}',
  )
  evaluations = by_step(folder / 'eval' / 'metrics.jsonl')
  measured = [(line['loss'], step) for step, line in evaluations.items()]
  loss, step = min(measured)
  return Learned(loss / math.log(2), rate, step, folder)


def _first_carry_bytes(learned: Learned) -> int:
  """The size of the file that is used beside the base."""
  exported = learned.folder / 'exported'
  if not exported.exists():
    run(
      f'--model_dir={learned.folder}',
      '--run_mode=export',
      f'--output={exported}',
      "--gin.export.form='first_carry'",
    )
  return (exported / 'model.safetensors').stat().st_size


def _adapter_bytes(learned: Learned) -> int:
  """The size of the adapters, which an export would merge into the weights."""
  size = 0
  for arrays in valkyrie.load(learned.folder).params.values():
    size += sum(array.nbytes for name, array in arrays.items() if '_lora_' in name)
  return size


def _loss_before(learned: Learned) -> float:
  """Bits a token of the base, as the log of a run that began from it has them."""
  log = (learned.folder / 'log.txt').read_text()
  loaded = re.search(r'loss of the loaded weights is ([\d.]+)', log)
  assert loaded
  return float(loaded[1]) / math.log(2)


def _cell(learned: Learned) -> str:
  return f'{learned.bits:.3f} ({learned.rate:g}, {learned.step})'


if __name__ == '__main__':
  sys.exit(main())
