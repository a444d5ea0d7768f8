"""What memory is worth by distance: the loss by position with the whole carry and with states cut.

    bash scripts/experiment memory_by_distance runs/linux --sequences 12

Each row reads the first sequence that the run's validation split deals to it: once with its carry,
and for each cut with the recurrent states reset every so many tokens; caches of attention stay.
Beside each cut is what it costs: the mean over sequences in bits per byte, with its 95% interval
(Student's t of the differences), and memory_by_distance.png in the run's folder shows it.
--gin.NAME=VALUE changes the run's configuration.
"""
# Environment: base

import argparse
from collections.abc import Mapping, Sequence
import functools
import itertools
import math
import pathlib
import sys
from typing import NamedTuple

from bench_runs import with_bindings
import jax
from jax import lax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import scipy.stats

from valkyrie.config.load import load_gin
from valkyrie.config.modules import CONFIGURABLE_MODULES
from valkyrie.data.read_ahead import prefetch
from valkyrie.distributed import console
from valkyrie.models import language_model
from valkyrie.models.carry_cuts import cut_carry
from valkyrie.models.model import Model
from valkyrie.monitoring import pictures
from valkyrie.run.evaluator import Evaluator
from valkyrie.sharding.partitioner import Partitioner
from valkyrie.training.losses import token_scores
from valkyrie.training.setup import StepSettings
from valkyrie.types import Array, Batch, Carry, Params
from valkyrie.weights.restored import restored_params


class Curve(NamedTuple):
  """Positions, the mean difference at each, and half of its 95% interval."""

  positions: Sequence[int]
  mean: np.ndarray
  half: np.ndarray


@console.program
def main(arguments: Sequence[str] | None = None) -> None:
  """Prints the table, and draws the picture."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('run', type=pathlib.Path, help='the directory of a run')
  parser.add_argument('--sequences', type=int, required=True, help='rows that are read')
  parser.add_argument('--tokens', type=int, default=2**20, help='of each (default: %(default)s)')
  parser.add_argument(
    '--cuts', type=int, nargs='+', default=[512, 8192], help='tokens between cuts'
  )
  parser.add_argument('--chunk_size', type=int, default=512, help='(default: %(default)s)')
  flags, bindings = with_bindings(parser, arguments)
  rows = flags.sequences
  size = flags.chunk_size
  if flags.tokens % size or any(every % size for every in flags.cuts):
    parser.error(f'--tokens and --cuts have to be multiples of --chunk_size={size}.')
  bindings += [f'--gin.{owner}.batch_size={rows}' for owner in ('validation/TaskFeed', 'Evaluator')]
  load_gin((), bindings, run=flags.run, modules=CONFIGURABLE_MODULES)
  device = Partitioner((('data', 1),), (), (), manual=True)
  measure = Evaluator(language_model.transform(StepSettings().model), device)
  model, (feed,) = measure.model, measure.sources.values()
  params, _ = restored_params(model, device, flags.run, measure.vocabulary)
  bins = flags.tokens.bit_length() - 1

  @functools.partial(jax.jit, donate_argnums=0)
  def read(carry, batch, start, cut):
    initial = model.initial_carry(rows)
    carry = lax.cond(cut, lambda: cut_carry(carry, initial, 'state'), lambda: carry)
    return sums_by_position(model, params, carry, batch, start, bins)

  sums = {every: np.zeros((2, rows, bins)) for every in (None, *flags.cuts)}
  carries = {every: model.initial_carry(rows) for every in sums}
  spans = [(start, size) for start in range(0, flags.tokens, size)]
  for (start, _), batch in zip(spans, prefetch(feed, spans), strict=True):
    for every in sums:
      is_cut = every is not None and start % every == 0
      found, carries[every] = read(carries[every], batch, start, is_cut)
      sums[every] += np.asarray(found, np.float64)

  bits_per_byte = {
    every: loss / weight * feed.tokens_per_byte / math.log(2)
    for every, (loss, weight) in sums.items()
  }
  whole = bits_per_byte[None]
  costs = {every: mean_and_interval(bits_per_byte[every] - whole) for every in flags.cuts}
  print('| position | sequences | whole |', *(f'cut every {every:,} |' for every in flags.cuts))
  print('| --- ' * (3 + len(flags.cuts)) + '|')
  shown = range(size.bit_length() - 1, bins)
  for n in shown:
    cells = [f'{2**n:,}', f'{np.isfinite(whole[:, n]).sum()}', f'{np.nanmean(whole[:, n]):.3f}']
    cells += [f'{mean[n]:+.4f} ± {half[n]:.4f}' for mean, half in costs.values()]
    print('|', ' | '.join(cells), '|')
  curves = {}
  for every, (mean, half) in costs.items():
    from_cut = [n for n in shown if 2**n >= every]
    positions = [2**n for n in from_cut]
    curves[f'memory of at most {every:,} tokens'] = Curve(positions, mean[from_cut], half[from_cut])
  draw_differences(flags.run / 'memory_by_distance.png', curves, 'the whole memory')


def sums_by_position(
  model: Model, params: Params, carry: Carry, batch: Batch, start: Array, bins: int
) -> tuple[Array, Carry]:
  """Reads a chunk [B, C] -> (its nats and weights by row and bin, [2, B, bins], the carry after).

  Only the first sequence of each row counts, whose position in the chunk's first token is `start`.
  The bins are the positions 2^n to 2^(n + 1) - 1 of the targets.
  """
  features, carry = model.apply(params, carry, batch.inputs, batch.positions, batch.segment_ids)
  loss = token_scores(features, batch.targets, model.about.vocabulary_size).loss
  places = start + jnp.arange(batch.inputs.shape[1])
  weights = batch.weights * (batch.positions == places[None])
  of_bin = jax.nn.one_hot(31 - lax.clz(batch.positions + 1), bins)
  sums = [jnp.einsum('bt,btn->bn', of, of_bin) for of in (weights * loss, weights)]
  return jnp.array(sums), carry


def mean_and_interval(differences: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """The mean of [sequences, bins] over sequences, and half of its 95% interval, without NaN."""
  count = np.isfinite(differences).sum(0)
  mean = np.nanmean(differences, 0)
  deviation = np.nanstd(differences, 0, ddof=1)
  return mean, deviation / np.sqrt(count) * scipy.stats.t.ppf(0.975, count - 1)


def draw_differences(path: pathlib.Path, curves: Mapping[str, Curve], compared_with: str) -> None:
  """Writes a picture of differences in bits per byte by position, with their intervals."""
  figure = matplotlib.figure.Figure((9.6, 4.4), layout='constrained')
  axes = figure.subplots()
  axes.set_xscale('log', base=2)
  for (label, curve), color in zip(curves.items(), itertools.cycle(pictures.COLORS)):
    axes.errorbar(*curve, fmt='o-', color=color, lw=3, capsize=4, label=label)
  axes.axhline(0, color='black', lw=1)
  axes.xaxis.set_major_formatter('{x:,.0f}')
  axes.grid(axis='y', color='#dddddd')
  axes.set_xlabel('position in the sequence, from P to 2 P - 1')
  axes.set_ylabel(f'bits per byte above {compared_with}')
  axes.legend(labelcolor='linecolor', frameon=False)
  figure.savefig(path, dpi=100)


if __name__ == '__main__':
  sys.exit(main())
