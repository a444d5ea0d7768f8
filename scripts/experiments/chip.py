"""What one chip does, measured, beside what its certificates expect.

It measures the peak and the parts of a step (bench.py), whole steps of one row at several lengths,
a kill and a resume, generation after a long text, and the checks of --run_mode=verify. A chip
belongs to one process, so each is a command of its own, which is printed. They need jax, Haiku,
optax, Orbax and gin, and read synthetic tokens. The page is RESULTS/chip.md.

    bash scripts/experiment chip
"""
# Environment: accelerator

import argparse
from collections.abc import Iterable, Mapping, Sequence
import json
import pathlib
import shlex
import shutil
import subprocess
import sys
import time
from typing import Any

from valkyrie.distributed import console
from valkyrie.monitoring.json_lines import read_lines

SCRIPTS = pathlib.Path(__file__).parent
GIB = 2**30
STEPS = 3  # the last one is timed
Metrics = Mapping[int, Mapping[str, Any]]


class Run:
  """The commands of one run: its gin files, and `--gin.` flags."""

  def __init__(self, flags: argparse.Namespace, tokens: int):
    self._folder = pathlib.Path(flags.results)
    chunks = max(1, tokens // flags.chunk_size)
    self._flags = [
      *(f'--gin_file={path}' for path in (flags.gin_file, 'gin/data/synthetic.gin')),
      *(f'--gin.{name}=1' for name in ('batch_size', 'log_every')),
      f'--gin.chunk_size={min(tokens, flags.chunk_size)}',
      *(f'--gin.{name}={chunks}' for name in ('chunks', 'backprop_chunks')),
      '--gin.create_writers.tensorboard=False',
    ]

  def folder(self, name: str) -> pathlib.Path:
    return self._folder / name

  def command(self, name: str, *more: str) -> list[str]:
    main = [sys.executable, '-m', 'valkyrie.main', *self._flags]
    return [*main, f'--model_dir={self.folder(name)}', *more]

  def train(self, name: str, steps: int, saves: int) -> list[str]:
    every = f'--gin.checkpoint_every={saves}'
    return self.command(name, f'--gin.train_steps={steps}', every)

  def metrics(self, name: str) -> Metrics:
    """The metrics of each step, of the last process that took it."""
    lines = read_lines(self.folder(name) / 'metrics.jsonl')
    return {found['step']: found for found in lines if 'loss' in found}


def call(command: Sequence[str]) -> None:
  """Runs a command; raises a CalledProcessError if it fails."""
  print(f'$ {shlex.join(command)}', flush=True)
  subprocess.run(command, check=True)


def peaks(flags: argparse.Namespace) -> Iterable[str]:
  """The peak, and the parts of a step."""
  path = pathlib.Path(flags.results) / 'bench.jsonl'
  shape = f'--rows=1 --tokens={flags.tokens[0]} --repeats=3 --json={path}'.split()
  call([sys.executable, str(SCRIPTS / 'bench.py'), f'--gin_file={flags.model}', *shape])
  found = {record['name']: record for record in map(json.loads, path.read_text().splitlines())}
  machine = found['machine']
  peak = found['peak']
  rate = peak['flops_per_second']['median'] / 1e12
  product = f'{peak["dtype"]} products of {peak["size"]}^3'
  yield f'{machine["device"]}, jax {machine["jax"]}: {product} run'
  yield f'at {rate:,.2f} TFLOP/s. A step of {flags.model} on a row of {flags.tokens[0]:,} tokens:'
  yield from ('', '| part | ms |', '| --- | --- |')
  for part, seconds in found['parts']['seconds'].items():
    yield f'| {part} | {1e3 * seconds["median"]:,.1f} |'


def steps(flags: argparse.Namespace) -> Iterable[str]:
  """Whole steps beside their certificates."""
  yield '| tokens of the row | seconds a step | tokens/s | expected | GiB | expected |'
  yield '| --- | --- | --- | --- | --- | --- |'
  for tokens in flags.tokens:
    run = Run(flags, tokens)
    name = f'steps_{tokens}'
    call(run.command(name, '--run_mode=precompile'))
    (certificate,) = json.loads((run.folder(name) / 'precompile.json').read_text())
    call(run.train(name, STEPS, saves=STEPS))
    shutil.rmtree(run.folder(name) / 'checkpoints')  # each of the size of the model and its moments
    last = run.metrics(name)[STEPS]
    seconds = last['step_seconds']
    memory = last.get('device_memory_peak')
    rates = certificate.get('estimated_tokens_per_second_per_chip') or ()
    cells = [
      f'{tokens:,}',
      f'{seconds:,.3f}',
      f'{tokens / seconds:,.0f}',
      ' to '.join(f'{rate:,.0f}' for rate in sorted(rates)),
      f'{memory / GIB:.2f}' if memory else '',
      f'{certificate["total_bytes"] / GIB:.2f}',
    ]
    yield f'| {" | ".join(cells)} |'


def resumed(flags: argparse.Namespace) -> Iterable[str]:
  """A run that is killed and started again, beside one that is not."""
  run = Run(flags, flags.tokens[0])
  last = flags.steps
  killed = flags.steps // 2
  call(run.train('whole', last, saves=last // 3))
  command = run.train('killed', last, saves=last // 3)
  print(f'$ {shlex.join(command)}    # killed after step {killed}', flush=True)
  process = subprocess.Popen(command)
  while process.poll() is None and killed not in run.metrics('killed'):
    time.sleep(0.05)
  process.kill()
  process.wait()
  begun = len(run.metrics('killed'))
  call(command)
  names = 'killed', 'whole'
  found, expected = ([m['loss'] for m in run.metrics(name).values()] for name in names)
  if found != expected or begun == last:
    raise ValueError(f'killed after {begun} of {last} steps: {found}; without a kill: {expected}')
  yield f'A run that was killed (SIGKILL) after {begun} of {last} steps and started again has the'
  yield 'losses of a run that was not, in every digit.'


def generated(flags: argparse.Namespace) -> Iterable[str]:
  """Tokens after a long text."""
  path = pathlib.Path(flags.results) / 'generated.json'
  shape = [f'--gin_file={flags.model}', f'--chunk_size={flags.chunk_size}', f'--json={path}']
  lengths = map(str, sorted({flags.tokens[0], flags.tokens[-1]}))
  script = str(SCRIPTS / 'generate_bench.py')
  call([sys.executable, script, '--alone', *shape, '--tokens', *lengths])
  yield from ('| tokens before | ms a token | MiB of the carry |', '| --- | --- | --- |')
  for found in json.loads(path.read_text()):
    ms = 1e3 * found['seconds']
    mib = found['carry_bytes'] / 2**20
    yield f'| {found["tokens"]:,} | {ms:.2f} | {mib:.1f} |'


def verified(flags: argparse.Namespace) -> Iterable[str]:
  """The checks of the run mode verify, of two layers: all of them need hundreds of GB."""
  run = Run(flags, flags.tokens[0])
  call(run.command('verify', '--run_mode=verify', '--gin.LanguageModel.layers=2'))
  findings = json.loads((run.folder('verify') / 'verify.json').read_text())['findings']
  yield f'All {len(findings)} comparisons of --run_mode=verify agree, in two layers.'


PARTS = {
  'Peak and parts': peaks,
  'Steps': steps,
  'Kill and resume': resumed,
  'Generation': generated,
  'Checks': verified,
}


def default_run() -> str:
  """The run for the chip of this machine, which only the started commands may open."""
  has_nvidia = pathlib.Path('/dev/nvidia0').exists()
  return 'gin/h100.gin' if has_nvidia else 'gin/one_chip.gin'


@console.program
def main(arguments: Sequence[str] | None = None) -> int:
  """Writes the page, and prints it; returns 1 if a command failed or a check differs."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  add = parser.add_argument
  add('--gin_file', default=default_run(), help='a run')
  add('--model', default='gin/models/deep_1b.gin', help='its model, whose parts are timed')
  add('--tokens', type=int, nargs='+', default=[8192, 65536, 655360, 1048576], help='of rows')
  add('--chunk_size', type=int, default=8192)
  add('--steps', type=int, default=6, help='of the run that is killed half-way')
  add('--results', default='runs/chip', help='a new folder')
  flags = parser.parse_args(arguments)
  folder = pathlib.Path(flags.results)
  try:
    folder.mkdir(parents=True)
  except FileExistsError:
    parser.error(f'{folder} is there already. Pass another --results, or delete it.')
  began = time.time()
  failures = 0
  command = ' '.join(['bash scripts/experiment chip', *map(shlex.quote, arguments or sys.argv[1:])])
  text = [f'`{command}`', '']
  for title, part in PARTS.items():
    text += [f'### {title}', '']
    try:
      text += [*part(flags), '']
    except (subprocess.CalledProcessError, ValueError) as error:
      failures += 1
      text += [f'FAILED: {error}', '']
    (folder / 'chip.md').write_text('\n'.join(text))
  print('\n'.join(text))
  minutes = (time.time() - began) / 60
  print(f'{folder}/chip.md has this page, after {minutes:.1f} minutes; {failures} parts failed.')
  return int(failures > 0)


if __name__ == '__main__':
  sys.exit(main())
