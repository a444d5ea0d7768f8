"""What a memory is worth beside attention: models after the same operations, by position.

Each file of gin/models/memory/ changes gin/linux_cpu.gin, and is trained for the operations that
gated_delta.gin needs for --budget tokens, as the package counts them, attention's own included.
With several --rates, each is tried for --rate_budget tokens' worth and the first seed, and the one
that validates best trains the seeds. Then each model reads the first --tokens tokens of held-out
subsystems: with its carry, or, where attention reads rows by themselves, in rows that overlap by
half and count with their second half. Differences from the first model are means over the
subsystems, with 95% intervals (Student's t); of several seeds, a subsystem's mean counts. The
picture memory_beside_attention.png in the folder of the results shows them.

The same command continues after any interruption, and trains and scores nothing twice.

    bash scripts/experiment memory_beside_attention --budget=4e6 --sequences=6 --tokens=262144
    bash scripts/experiment memory_beside_attention --budget=25e6 --rates 2e-3 4e-3 --seeds 0 1
    bash scripts/experiment memory_beside_attention --budget=100e6 --models gated_delta window
"""
# Environment: base

import argparse
from collections.abc import Mapping, Sequence
import io
import math
import pathlib
import subprocess
import sys
from typing import NamedTuple

from bench_runs import with_bindings
import gin
import jax
import jax.numpy as jnp
from memory_by_distance import Curve, draw_differences, mean_and_interval, sums_by_position
import numpy as np

from valkyrie.config.load import load_gin
from valkyrie.config.modules import CONFIGURABLE_MODULES
from valkyrie.data.read_ahead import prefetch
from valkyrie.distributed import console
from valkyrie.lab.comparison import trials
from valkyrie.lab.comparison.findings import bits
from valkyrie.models import language_model
from valkyrie.models.features import Description
from valkyrie.monitoring.recorded_run import Run
from valkyrie.run.evaluator import Evaluator
from valkyrie.sharding.partitioner import Partitioner
from valkyrie.storage import whole_file
from valkyrie.training.setup import StepSettings
from valkyrie.weights.restored import restored_params

RUN = 'gin/linux_cpu.gin'
FOLDER = pathlib.Path('gin/models/memory')
TOKENIZER = 'runs/words/tokenizer.model'  # made by the first run
# In the order in which a comparison that is cut short says most.
MODELS = ('gated_delta', 'window', 'gated_delta_full', 'mamba2', 's5', 'full_2048', 'full_8192')
FACTS = ('parameters', 'MFLOP a token', 'million tokens', 'rate', 'tokens seen')
QUICK = 'import scripts.experiments.quick_evaluation\ntrain.evaluator = @QuickEvaluator\n'
CONTEXT = 512  # the first position that is scored


class Model(NamedTuple):
  """A model of the comparison: its facts, and the tokens of a row and of a step of its training."""

  name: str
  about: Description
  parameters: int
  row: int
  step_tokens: int

  @property
  def step_flops(self) -> int:
    return self.about.train_flops_per_token * self.step_tokens

  @property
  def seen(self) -> str:
    """The tokens that a scored position has seen, at most."""
    if not self.about.carried:
      return f'{self.row // 2:,} to {self.row:,}'
    if self.about.horizon is None:
      return f'{self.about.layers * self.about.window:,}'
    return 'all'


@console.program
def main(arguments: Sequence[str] | None = None) -> None:
  """Trains and scores what is missing, and prints the tables after each model."""
  flags = _flags(arguments)
  if flags.vocabulary == TOKENIZER and not pathlib.Path(TOKENIZER).exists():
    command = [sys.executable, '-m', 'valkyrie.main', f'--gin_file={RUN}', '--run_mode=vocabulary']
    folder = pathlib.Path(TOKENIZER).parent
    subprocess.run([*command, f'--model_dir={folder}', *flags.gin], check=True)
  flags.gin.append(f'--gin.vocabulary="{flags.vocabulary}"')
  flops_per_token = _model(flags, MODELS[0]).about.train_flops_per_token
  models = [_model(flags, name) for name in flags.models]
  longest = max(model.row for model in models)
  if flags.tokens % longest:
    sys.exit(f'--tokens={flags.tokens}: expected a multiple of {longest}, the longest row.')
  facts = []
  scores = {}
  for model in models:
    steps = round(flags.budget * flops_per_token / model.step_flops)
    tried = round(flags.rate_budget * flops_per_token / model.step_flops)
    rate = _best_rate(flags, model, min(tried, steps))
    trained = [_trained(flags, model, steps, rate, seed) for seed in flags.seeds]
    scores[model.name] = np.mean([_scores(flags, folder) for folder, _ in trained], axis=0)
    facts.append(_facts(model, steps, rate))
  print(_table(('model', *FACTS), facts))
  print()
  first, *_ = scores
  differences = _differences(scores)
  print(_by_position(first, scores[first], differences))
  _draw(flags.results / 'memory_beside_attention.png', first, differences)


def _flags(arguments: Sequence[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument(
    '--budget', type=float, required=True, help='tokens of the first model, such as 25e6'
  )
  parser.add_argument('--models', nargs='+', default=MODELS, choices=MODELS)
  parser.add_argument('--rates', type=float, nargs='+', default=[3e-3], help='(default: 3e-3)')
  parser.add_argument('--rate_budget', type=float, default=8e6, help='(default: 8e6)')
  parser.add_argument('--seeds', type=int, nargs='+', default=[0])
  parser.add_argument('--sequences', type=int, default=12, help='subsystems (default: all 12)')
  parser.add_argument('--tokens', type=int, default=2**20, help='of each (default: %(default)s)')
  parser.add_argument('--results', type=pathlib.Path, default=pathlib.Path('runs/memory'))
  parser.add_argument('--vocabulary', default=TOKENIZER, help='(default: %(default)s)')
  flags, flags.gin = with_bindings(parser, arguments)
  return flags


def _model(flags: argparse.Namespace, name: str) -> Model:
  gin.clear_config(clear_constants=True)
  load_gin([RUN, f'{FOLDER}/{name}.gin'], flags.gin, modules=CONFIGURABLE_MODULES)
  settings = StepSettings()
  model = language_model.transform(settings.model)
  (phase,) = settings.curriculum().phases
  parameters = sum(jax.tree.leaves(model.counts()))
  tokens = settings.batch_size * phase.tokens_per_row
  return Model(name, model.about, parameters, phase.chunk_size, tokens)


def _best_rate(flags: argparse.Namespace, model: Model, steps: int) -> float:
  """The rate after which the first seed validates best, if there are several."""
  if len(flags.rates) == 1:
    return flags.rates[0]
  found = {}
  for rate in flags.rates:
    _, run = _trained(flags, model, steps, rate, flags.seeds[0])
    found[rate] = bits(run, CONTEXT)
  print(f'{model.name}: bits per byte by rate {found}', file=sys.stderr, flush=True)
  return min(found, key=lambda rate: found[rate])


def _trained(
  flags: argparse.Namespace, model: Model, steps: int, rate: float, seed: int
) -> tuple[pathlib.Path, Run | None]:
  """(the folder of a run, what it has recorded); it is trained unless it is done."""
  settings = argparse.Namespace(
    results=flags.results, gin_file=[RUN], gin=flags.gin, gin_allow_import=['scripts'], over=()
  )
  statements = f"include '{FOLDER}/{model.name}.gin'\n{QUICK}"
  candidate = trials.Candidate(model.name, statements)
  macros = {'learning_rate': rate, 'seed': seed, 'warmup_steps': min(200, steps // 5)}
  title = f'steps={steps},learning_rate={rate:g},seed={seed}'
  trial = trials.make_trial(settings, candidate, title, steps, {**macros, 'eval_every': steps})
  run = trials.recorded(trial)
  if run is None:
    trials.say(f'{trial.folder}: {steps:,} steps')
    run = trials.train(trial)
  return trial.folder, run


def _scores(flags: argparse.Namespace, folder: pathlib.Path) -> np.ndarray:
  """Bits per byte of a run by subsystem and bin [sequences, bins]; a file of the run keeps them."""
  kept = folder / f'by_position_{flags.tokens}_{flags.sequences}.npy'
  if not kept.exists():
    trials.say(f'{folder}: reads {flags.sequences} x {flags.tokens:,} tokens')
    content = io.BytesIO()
    np.save(content, _read(flags, folder))
    whole_file.write(kept, content.getvalue())
  return np.load(kept)


def _read(flags: argparse.Namespace, folder: pathlib.Path) -> np.ndarray:
  rows = flags.sequences
  sizes = [f'--gin.{owner}.batch_size={rows}' for owner in ('validation/TaskFeed', 'Evaluator')]
  gin.clear_config(clear_constants=True)
  load_gin((), sizes, run=folder, allowed_imports=['scripts'], modules=CONFIGURABLE_MODULES)
  settings = StepSettings()
  device = Partitioner((('data', 1),), (), (), manual=True)
  measure = Evaluator(language_model.transform(settings.model), device)
  model, (feed,) = measure.model, measure.sources.values()
  params, _ = restored_params(model, device, folder, measure.vocabulary)
  (phase,) = settings.curriculum().phases
  size = phase.chunk_size
  bins = flags.tokens.bit_length() - 1
  new = size if model.about.carried else size // 2  # tokens of a chunk that count

  @jax.jit
  def read(carry, batch, start):
    counts = (jnp.arange(size) >= size - new) | (start == 0)
    weights = batch.weights * counts[None]
    return sums_by_position(model, params, carry, batch._replace(weights=weights), start, bins)

  carry = model.initial_carry(rows)
  sums = np.zeros((2, rows, bins))
  spans = [(start, size) for start in range(0, flags.tokens - size + 1, new)]
  for (start, _), batch in zip(spans, prefetch(feed, spans), strict=True):
    found, after = read(carry, batch, start)
    sums += np.asarray(found, np.float64)
    if model.about.carried:
      carry = after
  loss, weight = sums
  return loss / weight * feed.tokens_per_byte / math.log(2)


def _facts(model: Model, steps: int, rate: float) -> list[str]:
  millions = model.about.forward_flops / 1e6
  tokens = steps * model.step_tokens / 1e6
  amounts = [f'{model.parameters:,}', f'{millions:.2f}', f'{tokens:.2f}', f'{rate:g}']
  return [model.name, *amounts, model.seen]


def _differences(scores: Mapping[str, np.ndarray]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
  """{model: mean and half of the interval [bins]} of what it has above the first model."""
  (_, whole), *others = scores.items()
  return {name: mean_and_interval(found - whole) for name, found in others}


def _shown(bins: int) -> range:
  """The bins that begin at position 512 or later."""
  return range(CONTEXT.bit_length() - 1, bins)


def _by_position(
  first: str, whole: np.ndarray, differences: Mapping[str, tuple[np.ndarray, np.ndarray]]
) -> str:
  """The first model's bits per byte [sequences, bins] by position, and differences from it."""
  rows = []
  for n in _shown(whole.shape[1]):
    cells = [f'{2**n:,}', f'{np.isfinite(whole[:, n]).sum()}', f'{np.nanmean(whole[:, n]):.3f}']
    cells += [f'{mean[n]:+.4f} ± {half[n]:.4f}' for mean, half in differences.values()]
    rows.append(cells)
  return _table(('position', 'sequences', first, *differences), rows)


def _draw(
  path: pathlib.Path, first: str, differences: Mapping[str, tuple[np.ndarray, np.ndarray]]
) -> None:
  curves = {}
  for name, (mean, half) in differences.items():
    shown = _shown(len(mean))
    positions = [2**n for n in shown]
    curves[name] = Curve(positions, mean[shown], half[shown])
  if curves:
    draw_differences(path, curves, first)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  lines = [head, ['---'] * len(head), *rows]
  return '\n'.join('| ' + ' | '.join(cells) + ' |' for cells in lines)


if __name__ == '__main__':
  sys.exit(main())
