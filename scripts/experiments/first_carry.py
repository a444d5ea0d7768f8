"""One task, learned by a first carry and by LoRA: the held-out loss, and the bytes of each.

The task is to say what a function does: from `name(arguments)` the first line of its docstring, for
the public functions of packages that Valkyrie needs. The base is gin/tiny_cpu.gin, trained on the
standard library, which has none of them. Both learn the same steps from it, at several rates, and
the best rate of each is the one with the lowest loss on the held-out answers.

    bash scripts/experiment first_carry runs/first_carry
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
import warnings

import valkyrie

PACKAGES = ('numpy', 'scipy', 'jax', 'optax', 'haiku', 'matplotlib')
RATES = {
  'first_carry': (0.03, 0.1, 0.3),
  'lora': (3e-3, 1e-2, 3e-2, 1e-1),
  'lora_rank_1': (1e-2, 3e-2, 1e-1),
}
FLAGS = {'lora_rank_1': ('--gin.Lora.rank=1',)}
LONGEST = 100  # letters of a prompt or an answer


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


def main(arguments: Sequence[str] | None = None) -> None:
  """Prints the table; a second call goes on."""
  parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
  parser.add_argument('folder', type=pathlib.Path, help='of the runs')
  parser.add_argument('--base_steps', type=int, default=1600, help='default: %(default)s')
  parser.add_argument('--steps', type=int, default=400, help='of the task (default: %(default)s)')
  flags = parser.parse_args(arguments)
  flags.folder.mkdir(parents=True, exist_ok=True)
  base = flags.folder / 'base'
  text = flags.folder / 'functions.jsonl'
  if not text.exists():
    lines = [json.dumps({'prompt': prompt, 'answer': answer}) for prompt, answer in pairs()]
    text.write_text('\n'.join(lines) + '\n')
  run('--gin_file=gin/tiny_cpu.gin', f'--gin.train_steps={flags.base_steps}', f'--model_dir={base}')
  losses = {}
  before = math.nan
  for kind, rates in RATES.items():
    for rate in rates:
      folder = flags.folder / f'{kind}_{rate:g}'
      run(
        '--gin_file=gin/tiny_cpu.gin',
        '--gin_file=gin/data/prompts.gin',
        f'--gin_file=gin/optimizers/{kind.partition("_rank")[0]}.gin',
        *FLAGS.get(kind, ()),
        f'--gin.text="{text}"',
        '--gin.held_out=0.1',
        '--gin.chunk_size=128',
        '--gin.batch_size=8',
        '--gin.warmup_steps=20',
        f'--gin.train_steps={flags.steps}',
        f'--gin.learning_rate={rate:g}',
        '--gin.eval_every=100',
        '--gin.Evaluator.chunks=64',
        f'--gin.train.initial_weights="{base}"',
        f'--model_dir={folder}',
      )
      evaluations = (folder / 'eval' / 'metrics.jsonl').read_text().splitlines()
      measured = {line['step']: line for line in map(json.loads, evaluations)}
      losses[kind, rate] = measured[flags.steps]['loss'] / math.log(2)
      loaded = re.search(
        r'loss of the loaded weights is ([\d.]+)', (folder / 'log.txt').read_text()
      )
      assert loaded
      before = float(loaded[1]) / math.log(2)
  best = {kind: min(RATES[kind], key=lambda rate: losses[kind, rate]) for kind in RATES}
  first = flags.folder / 'exported'
  if not first.exists():
    learned = flags.folder / f'first_carry_{best["first_carry"]:g}'
    run(
      f'--model_dir={learned}',
      '--run_mode=export',
      f'--output={first}',
      "--gin.export.form='first_carry'",
    )
  size = {'first_carry': (first / 'model.safetensors').stat().st_size}
  for kind in set(RATES) - set(size):  # an export merges adapters, so their arrays are counted
    adapted = valkyrie.load(flags.folder / f'{kind}_{best[kind]:g}').params.values()
    size[kind] = sum(a.nbytes for group in adapted for n, a in group.items() if '_lora_' in n)
  print(f'\n{len(text.read_text().splitlines()):,} functions, {flags.steps} steps\n')
  print(
    '| | bits a token of held-out answers | at other rates | bytes |\n| --- | --- | --- | --- |'
  )
  print(f'| before | {before:.3f} | | |')
  for kind, rates in RATES.items():
    others = ', '.join(f'{losses[kind, r]:.3f} ({r:g})' for r in rates if r != best[kind])
    found = f'{losses[kind, best[kind]]:.3f} ({best[kind]:g})'
    print(f'| {kind} | {found} | {others} | {size[kind]:,} |')


if __name__ == '__main__':
  main()
