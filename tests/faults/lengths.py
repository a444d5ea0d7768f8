"""Rows with more tokens and documents than 32 bits count."""

from collections.abc import Iterator

from faults.harness import ROWS, STEPS, TOKENS, Harness, write_store
from faults.numbers import parameter_hashes
from faults.table import Trial, fault
from valkyrie.types import POSITION_PERIOD

BORDERS = (2**30, 2**31, 2**40)
PLANNER = (
  '--gin_file=docs/examples/tiny_planner.gin', '--gin_allow_import=planner',
  '--gin.LanguageModel.layers=2',
  '--gin.Planner.plan_interval=8', '--gin.Planner.plan_tokens=2', '--gin.Planner.mlp_width=24',
  '--gin.Planner.head_width=8',
)  # fmt: skip


@fault(
  'a planner in a row of 2^30, 2^31 or 2^40 tokens that is never reset',
  'learns the same as near its start, bit for bit',
  full=3,
)
def tokens(harness: Harness, times: int) -> Iterator[Trial]:
  flags = (*PLANNER, '--gin.train/TaskFeed.reset_at="never"')
  for border in BORDERS[:times]:
    first = border - STEPS * TOKENS // 2
    # Rows repeat a document whose length divides the period of the positions.
    yield _compared(harness, 3**2 * 7 * 11, first % POSITION_PERIOD, first, *flags)


@fault(
  '2^30, 2^31 or 2^40 documents in a row',
  'are told apart, and learned as the first ones, bit for bit',
  full=3,
)
def documents(harness: Harness, times: int) -> Iterator[Trial]:
  length = 21
  for border in BORDERS[:times]:
    before = STEPS * TOKENS // length // 2
    yield _compared(harness, length, 1000 * length, (border - before) * length)


def _compared(harness: Harness, length: int, near: int, far: int, *flags: str) -> Trial:
  """Compares a run that begins at a near token of its rows with one that begins at a far token."""
  task = f'of_{length}'
  texts = [letter * (length // 3) + 'x' * (length - length // 3 - 1) for letter in 'abcd'[:ROWS]]
  write_store(harness.folder / 'data', task, 'train', texts)
  found = []
  for first in (near, far):
    name = harness.new()
    path = harness.folder / f'{name}.parameters'  # the carry has segment ids
    harness.run(
      name,
      f'--gin.train/TaskFeed.task="{task}"',
      '--gin.train.feed=@train/FarFeed',
      f'--gin.FarFeed.first={first}',
      f'--gin.HashParameters.path="{path}"',
      '--gin.train.hooks=(@HashParameters(),)',
      *flags,
    )
    found.append(parameter_hashes(path))
    harness.forget(name)
  differing = [step for step in range(1, STEPS + 1) if found[0][step] != found[1][step]]
  failure = f'the parameters after step {differing[0]} differ' if differing else None
  return Trial(f'from token {far} on', failure)
