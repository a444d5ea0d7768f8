"""What the last token of a document costs by its length, and what a row's carry weighs, by count.

    bash scripts/experiment context_costs

Of the shape of Qwen3.5-2B, with three recurrences to one layer of full attention.
"""
# Environment: base

import pathlib
import sys

import gin
import jax

from valkyrie import main as program
from valkyrie.config.load import load_gin
from valkyrie.distributed import console
from valkyrie.models import language_model
from valkyrie.models.language_model import LanguageModel
from valkyrie.models.model import Model
from valkyrie.sharding.sequence_parallel import is_over_time

FILE = str(pathlib.Path(__file__).with_name('qwen3_5_2b.gin'))
LENGTHS = (8_192, 131_072, 1_048_576)


def model(length: int) -> Model:
  """The model for documents of this length."""
  gin.clear_config(clear_constants=True)
  flags = (f'--gin.FullAttention.max_context={length}',)
  load_gin([FILE], flags, modules=program.CONFIGURABLE_MODULES)
  return language_model.transform(gin.get_configurable(LanguageModel))


@console.program
def main() -> None:
  """Prints the table."""
  alone = model(2).about.forward_flops
  print('   tokens  GFLOP a token  of it for keys   keys, GiB  other carries, MiB')
  for length in LENGTHS:
    made = model(length)
    flops = made.about.forward_flops
    carry = jax.eval_shape(lambda made=made: made.initial_carry(1))
    sizes = {True: 0, False: 0}
    leaves = zip(*map(jax.tree.leaves, (carry, is_over_time(carry))), strict=True)
    for leaf, is_shared in leaves:
      sizes[is_shared] += leaf.size * leaf.dtype.itemsize
    share = 1 - alone / flops
    print(
      f'{length:>9,}{flops / 1e9:>15.2f}{share:>15.1%}{sizes[True] / 2**30:>12.3f}'
      f'{sizes[False] / 2**20:>20.1f}'
    )


if __name__ == '__main__':
  sys.exit(main())
