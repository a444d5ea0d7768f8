"""Cost per token in rows of different lengths: seconds, and memory beyond the carries.

Every step runs forward and backward through all chunks of the row, without a cut in the gradient,
and updates the parameters. The lengths are timed in turns within one run.

    bash scripts/experiment long_rows
    bash scripts/experiment long_rows --gin_file=gin/h100.gin --chunk_size=8192

--gin.NAME=VALUE changes the model.

scripts/experiments/long_llama.py has the same table of Hugging Face's Llama.
"""
# Environment: accelerator

import argparse
from collections.abc import Sequence
import statistics
import sys

from bench_runs import WHOLE, Trainer, variants, with_bindings
import jax

from valkyrie.config.load import load_gin
from valkyrie.distributed import console
from valkyrie.main import CONFIGURABLE_MODULES
from valkyrie.sharding.partitioner import Partitioner
from valkyrie.training import tbptt

LAYOUT = 'gin/partition/single.gin'
MIB = 2**20


def carries_in_bytes(trainer: Trainer, chunks: int) -> int:
  """Bytes of the carries that a step keeps for its backward pass."""
  one = sum(leaf.nbytes for leaf in jax.tree.leaves(trainer.state.carry))
  length = 1 if trainer.setup.settings.keep_carries else tbptt.segment_length(chunks)
  return (length + chunks // length) * one


@console.program
def main(arguments: Sequence[str] | None = None) -> None:
  """Prints the table."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument(
    '--tokens', type=int, nargs='+', default=[8192, 655360], help='tokens of a row'
  )
  parser.add_argument('--gin_file', default='gin/models/tiny.gin', help='a model, or a run')
  parser.add_argument('--chunk_size', type=int, default=2048)
  parser.add_argument('--repeats', type=int, default=5)
  flags, bindings = with_bindings(parser, arguments)
  load_gin([LAYOUT, flags.gin_file], bindings, modules=CONFIGURABLE_MODULES)

  trainers = {}
  memory = {}
  state = None
  for tokens in flags.tokens:
    chunks = tokens // flags.chunk_size
    trainers[tokens] = trainer = Trainer(
      variants()[WHOLE], Partitioner(), tokens, chunks=chunks, document=tokens
    )
    temporary = trainer.step.memory_analysis().temp_size_in_bytes
    memory[tokens] = temporary, carries_in_bytes(trainer, chunks)
    state, trainer.state = trainer.state, None  # all lengths train one state, in turns

  seconds: dict[int, list[float]] = {tokens: [] for tokens in flags.tokens}
  for _ in range(flags.repeats):
    for tokens, trainer in trainers.items():
      # Short rows take more steps, so that every length reads equally many tokens in a turn.
      steps = max(1, max(flags.tokens) // tokens)
      trainer.state = state
      seconds[tokens].append(trainer.bare_steps(steps) / tokens)
      state, trainer.state = trainer.state, None

  print(
    f'{flags.gin_file}, {trainer.parameters:,} parameters, one row, chunks of {flags.chunk_size}, '
    f'exact gradients, {jax.devices()[0].device_kind}, median of {flags.repeats}:\n'
  )
  print(' tokens  µs a token  of the first  temporaries         carries  the rest  of the first')
  first = flags.tokens[0]
  for tokens in flags.tokens:
    cost = statistics.median(seconds[tokens])
    temporary, carries = memory[tokens]
    rest = temporary - carries
    print(
      f'{tokens:7,} {1e6 * cost:11.1f} {cost / statistics.median(seconds[first]):13.3f}'
      f' {temporary / MIB:8.1f} MiB {carries / MIB:12.1f} MiB {rest / MIB:5.1f} MiB'
      f' {rest / (memory[first][0] - memory[first][1]):13.3f}'
    )


if __name__ == '__main__':
  sys.exit(main())
