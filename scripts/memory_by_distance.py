"""What memory is worth by distance: the loss by position with the whole carry and with states cut.

    PYTHONPATH=. python scripts/memory_by_distance.py runs/linux --sequences 12

Each row reads the first sequence that the run's validation split deals to it, three times: with its
carry, and with the recurrent states cut every so many tokens; caches of attention are never cut.
Beside each cut is what it costs: the mean over sequences in bits per byte, with its 95% interval
(Student's t of the differences). The picture is loss_by_position_distance.png in the run's folder.
--gin.NAME=VALUE changes the run's configuration.
"""

import argparse
from collections.abc import Sequence
import functools
import math
import pathlib

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import scipy.stats

from valkyrie.config.load import load_gin
from valkyrie.config.modules import CONFIGURABLE_MODULES
from valkyrie.data.feed import prefetch
from valkyrie.models import language_model
from valkyrie.models.carry_cuts import cut_carry
from valkyrie.monitoring import pictures
from valkyrie.monitoring.metrics import BY_POSITION
from valkyrie.run.evaluator import Evaluator
from valkyrie.sharding.partitioner import Partitioner
from valkyrie.training.losses import token_scores
from valkyrie.training.setup import StepSettings
from valkyrie.weights.restored import restored_params


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
  flags, bindings = parser.parse_known_args(arguments)
  rows, size = flags.sequences, flags.chunk_size
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
    features, carry = model.apply(params, carry, batch.inputs, batch.positions, batch.segment_ids)
    loss = token_scores(features, batch.targets, model.about.vocabulary_size).loss
    weights = batch.weights * (batch.positions == start + jnp.arange(size))
    of_bin = jax.nn.one_hot(31 - lax.clz(batch.positions + 1), bins)
    sums = [jnp.einsum('bt,btn->bn', of, of_bin) for of in (weights * loss, weights)]
    return jnp.array(sums), carry

  sums = {every: np.zeros((2, rows, bins)) for every in (None, *flags.cuts)}
  carries = {every: model.initial_carry(rows) for every in sums}
  spans = [(start, size) for start in range(0, flags.tokens, size)]
  for (start, _), batch in zip(spans, prefetch(feed, spans), strict=True):
    for every in sums:
      is_cut = every is not None and start % every == 0
      found, carries[every] = read(carries[every], batch, start, is_cut)
      sums[every] += np.asarray(found, np.float64)

  nats_to_bits_per_byte = feed.tokens_per_byte / math.log(2)
  by_bin = {every: nats_to_bits_per_byte * loss / weight for every, (loss, weight) in sums.items()}
  print('| position | sequences | whole |', *(f'cut every {every:,} |' for every in flags.cuts))
  print('| --- ' * (3 + len(flags.cuts)) + '|')
  for n in range(size.bit_length() - 1, bins):
    whole = by_bin[None][:, n]
    read_so_far = np.isfinite(whole)
    cells = [f'{2**n:,}', f'{read_so_far.sum()}', f'{whole[read_so_far].mean():.3f}']
    for every in flags.cuts:
      costs = (by_bin[every][:, n] - whole)[read_so_far]
      half = scipy.stats.sem(costs) * scipy.stats.t.ppf(0.975, len(costs) - 1)
      cells.append(f'{costs.mean():+.4f} ± {half:.4f}')
    print('|', ' | '.join(cells), '|')
  curves = {
    'whole carry' if every is None else f'states cut every {every:,} tokens': {
      f'{BY_POSITION}{2**n}': float(np.nanmean(found[:, n])) for n in range(1, bins)
    }
    for every, found in by_bin.items()
  }
  pictures.write_loss_by_position(flags.run, curves, 'distance')


if __name__ == '__main__':
  main()
