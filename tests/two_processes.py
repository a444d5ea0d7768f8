"""One step's loss and gradient in every layout, by a process of several: what processes_test reads.

python two_processes.py COORDINATOR PROCESSES PROCESS FOLDER LAYOUT ...
"""

import argparse
import pathlib

import jax
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np
import partitioning_test as layouts
import tiny

from valkyrie import cluster


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument('folder')
  parser.add_argument('names', nargs='+')
  parser.add_argument('--coordinator')
  parser.add_argument('--processes')
  parser.add_argument('--process', type=int)
  parser.add_argument('--join_seconds', type=int)
  flags = parser.parse_args()
  cluster.join(flags.coordinator, flags.processes, flags.process, flags.join_seconds)
  model = tiny.model(compute_dtype='float32')
  params, carry = jax.device_get(tiny.init(model, layouts.ROWS))
  whole = layouts.batch('float32')

  def placed(leaf, sharding):
    return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])

  for name in flags.names:
    layout = layouts.layout_of(name)
    state = {'params': params, 'carry': carry}
    state = jax.tree.map(placed, state, layout.state_shardings(state))
    rows = layout.rows(layouts.ROWS)
    batch = layout.place_batch(jax.tree.map(lambda x: x[rows], whole), layouts.ROWS)  # noqa: B023
    # What comes out is gathered on every device, for this process to read.
    step = layout.partition(
      layouts.of_step(model, remat=False), out_shardings=NamedSharding(layout.mesh, PartitionSpec())
    )
    leaves = jax.device_get(jax.tree.leaves(step(state['params'], state['carry'], batch)))
    if jax.process_index() == 0:
      np.savez(pathlib.Path(flags.folder, f'{name}.npz'), *leaves)
    print(f'{name}: rows {rows[0]} to {rows[-1]}', flush=True)


if __name__ == '__main__':
  main()
