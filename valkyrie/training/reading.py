"""Tokens of each step of a run, also after a resume with other rows or other chunks.

The tokens of a step are a pure function of its number and of the stretches of the run, which a
checkpoint records. With other rows, the documents are dealt again, over the new rows; with another
curriculum, each row continues where it was.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from valkyrie.errors import ConfigurationError
from valkyrie.training.curriculum import Curriculum
from valkyrie.types import TaskFeed


class Stretch(NamedTuple):
  """The steps from `step` on, with the same rows and curriculum; `position` is of each row."""

  step: int
  position: int
  rows: int


class Reading:
  """The positions of steps in `feed`, the newest deal.

  A checkpoint records the `stretches` of the run; `curriculum` applies to the steps that follow.
  """

  def __init__(
    self,
    curriculum: Curriculum,
    feed: TaskFeed,
    rows: int,
    *,
    step: int = 0,
    position: int = 0,
    stretches: Sequence[Sequence[int]] = (),
  ):
    """Continues the reading of a checkpoint at its `step`, or begins a new one.

    A new stretch begins if the B = `rows` of the feed, or the position, differ from the checkpoint.
    With other rows, a feed that ends after some epochs raises a ConfigurationError.
    """
    self.curriculum = curriculum
    self.stretches = [Stretch(*found) for found in stretches] or [Stretch(0, 0, rows)]
    is_other = self.stretches[-1].rows != rows
    if is_other or self.position(step) != position:
      self.stretches.append(Stretch(step, position, rows))
    dealt = [(0, self.stretches[0].rows)]
    for stretch in self.stretches:
      _, latest_rows = dealt[-1]
      if stretch.rows != latest_rows:
        dealt.append((stretch.position, stretch.rows))
    # (position, feed) of each deal; the feed of a run that was dealt once is as it was given.
    self._deals = [(0, feed)]
    if len(dealt) > 1:
      self._deals = []
      for number, (begin, rows_of_deal) in enumerate(dealt):
        dealt_feed = feed.dealt(number, rows_of_deal, begin)
        self._deals.append((begin, dealt_feed))
    self._begin, self.feed = self._deals[-1]

  def position(self, step: int) -> int:
    """Tokens of each row that the steps before `step` read, over all stretches."""
    latest = self.stretches[-1]
    of_curriculum = self.curriculum.position
    tokens = of_curriculum(step) - of_curriculum(latest.step)
    return latest.position + tokens

  def place(self, step: int) -> int:
    """The position in `feed` at which `step` (from 0) reads."""
    return self.position(step) - self._begin

  def tokens(self, step: int) -> int:
    """Tokens that all rows read before `step`."""
    ends = [stretch.position for stretch in self.stretches[1:]]
    ends.append(self.position(step))
    tokens = 0
    for stretch, end in zip(self.stretches, ends, strict=True):
      tokens += (end - stretch.position) * stretch.rows
    return tokens

  def progress(self, step: int) -> Mapping[str, float]:
    """The feed's `progress` before `step`, over all deals."""
    ends = [begin for begin, _ in self._deals[1:]]
    ends.append(self.position(step))
    found = []
    for (begin, feed), end in zip(self._deals, ends, strict=True):
      found.append(feed.progress(end - begin))
    totals = {}
    for name in found[0]:
      totals[name] = sum(of_deal[name] for of_deal in found)
    return totals

  def describe(self, step: int) -> str:
    """Names the documents that `step` (from 0) reads."""
    length = self.curriculum.phase(step).tokens_per_row
    return self.feed.describe(self.place(step), length)

  def plan(self, train_steps: int) -> str:
    """A line about the epochs that the run reads; a ConfigurationError if the feed ends before."""
    end = self.feed.row_end
    if end is not None and self.place(train_steps - 1) >= end:
      left = self.curriculum.position(train_steps) - self.place(train_steps)
      in_curriculum = end + left
      steps = self.curriculum.steps_before(in_curriculum)
      raise ConfigurationError(
        f'The feed ends after {end:,} tokens of its longest row, in step {steps}, but '
        f'train_steps={train_steps}. Set train_steps={steps}, or more TaskFeed.epochs (None '
        'repeats without end).'
      )
    epochs = []
    for name, value in self.progress(train_steps).items():
      if name.startswith('epochs'):
        words = name.replace('/', ' of ')
        epochs.append(f'{value:.3g} {words}')
    tokens = self.position(train_steps)
    listed = ', '.join(epochs)
    return f'{train_steps} steps read {tokens:,} tokens of each row: {listed}'

  def change(self, step: int) -> str | None:
    """What a resume after `step` steps changes in the tokens that are read; None if nothing."""
    if len(self.stretches) == 1 or self.stretches[-1].step != step:
      return None
    before, now = self.stretches[-2:]
    if before.rows == now.rows:
      return f'each row is read on from its token {now.position:,}'
    (begin, feed), (end, _) = self._deals[-2:]
    read_again = feed.unfinished(end - begin)
    return (
      f'the documents are now dealt over {now.rows} rows instead of {before.rows}, and carries '
      f'begin empty: {read_again:,} tokens of the unfinished epoch are read again'
    )
