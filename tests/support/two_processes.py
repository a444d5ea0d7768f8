"""One of the processes of processes_test: gradients in every layout, and consistency checks.

It writes the loss and the gradient of one step, and prints the errors of other bindings and tokens.

python two_processes.py COORDINATOR PROCESSES PROCESS FOLDER LAYOUT ...
"""

import argparse
import pathlib
import sys

import jax
from jax.sharding import NamedSharding, PartitionSpec
import layouts
import numpy as np
import tiny

from valkyrie.distributed import processes
from valkyrie.distributed.consistency import TokenConsistency, check_same_bindings
from valkyrie.errors import ConfigurationError, DataError


class Feed:
  """A feed of one batch, in which one row may differ."""

  def __init__(self, whole):
    self.whole, self.differs = whole, None

  def read(self, position, length, rows):
    batch = jax.tree.map(lambda x: x[list(rows)].copy(), self.whole)
    if self.differs in rows:
      batch.inputs[list(rows).index(self.differs), 3] += 1
    return batch

  def describe(self, position, length):
    return 'the documents there'


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument('folder')
  parser.add_argument('names', nargs='+')
  parser.add_argument('--coordinator')
  parser.add_argument('--processes')
  parser.add_argument('--process', type=int)
  parser.add_argument('--join_seconds', type=int)
  flags = parser.parse_args()
  this = processes.member(flags.coordinator, flags.processes, flags.process)
  processes.join(this, flags.join_seconds)
  model = tiny.model(compute_dtype='float32', remat_policy=None)  # compiles sooner
  params, carry = jax.device_get(tiny.init(model, layouts.ROWS))
  whole = layouts.batch('float32')

  def placed(leaf, sharding):
    return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])

  for name in flags.names:
    layout = layouts.layout_of(name)
    state = {'params': params, 'carry': carry}
    state = jax.tree.map(placed, state, tiny.shardings(layout, model, params, carry))
    rows = layout.local_rows(layouts.ROWS)
    batch = layout.place_batch(jax.tree.map(lambda x: x[rows], whole), layouts.ROWS)  # noqa: B023
    # The outputs are replicated, so that this process can read them.
    step = layout.jit(
      layouts.of_step(model, remat_chunks=False),
      out_shardings=NamedSharding(layout.mesh, PartitionSpec()),
    )
    leaves = jax.device_get(jax.tree.leaves(step(state['params'], state['carry'], batch)))
    if jax.process_index() == 0:
      np.savez(pathlib.Path(flags.folder, f'{name}.npz'), *leaves)
    processes.exchange('done', name)

  for seed in (0, flags.process):
    try:
      check_same_bindings({'StepSettings.seed': seed, 'TaskFeed.task': 'letters'})
    except ConfigurationError as error:
      print(f'other bindings: {error}', file=sys.stderr)

  feed = Feed(whole)
  rows = range(4 * flags.process, 4 * flags.process + 4)
  for differs in (None, 5):
    feed.differs = differs if flags.process == 1 else None
    try:
      TokenConsistency(feed, rows, every=3)(6, 0, feed.read(0, 24, rows))
    except DataError as error:
      print(f'other tokens: {error}', file=sys.stderr)


if __name__ == '__main__':
  main()
