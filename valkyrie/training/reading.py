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
    self.stretches = [Stretch(*recorded) for recorded in stretches]
    if not self.stretches:
      self.stretches.append(Stretch(0, 0, rows))
    is_other = self.stretches[-1].rows != rows
    if is_other or self.position(step) != position:
      self.stretches.append(Stretch(step, position, rows))
    dealt = self._dealt()
    # (position, feed) of each deal; the feed of a run that was dealt once is as it was given.
    self._deals = [(0, feed)]
    if len(dealt) > 1:
      self._deals = []
      for number, (begin, rows_of_deal) in enumerate(dealt):
        dealt_feed = feed.dealt(number, rows_of_deal, begin)
        self._deals.append((begin, dealt_feed))
    self._begin, self.feed = self._deals[-1]

  def _dealt(self) -> list[tuple[int, int]]:
    """(position, rows) of each deal: a stretch with other rows than the one before begins one."""
    first, *later = self.stretches
    dealt = [(0, first.rows)]
    latest_rows = first.rows
    for stretch in later:
      if stretch.rows != latest_rows:
        dealt.append((stretch.position, stretch.rows))
        latest_rows = stretch.rows
    return dealt

  def position(self, step: int) -> int:
    """Tokens of each row that the steps before `step` read, over all stretches."""
    latest = self.stretches[-1]
    begin = self.curriculum.position(latest.step)
    tokens = self.curriculum.position(step) - begin
    return latest.position + tokens

  def place(self, step: int) -> int:
    """The position in `feed` at which `step` (from 0) reads."""
    return self.position(step) - self._begin

  def tokens(self, step: int) -> int:
    """Tokens that all rows read before `step`."""
    _, *later = self.stretches
    ends = [stretch.position for stretch in later]
    ends.append(self.position(step))
    tokens = 0
    for stretch, end in zip(self.stretches, ends, strict=True):
      tokens_of_row = end - stretch.position
      tokens += tokens_of_row * stretch.rows
    return tokens

  def progress(self, step: int) -> Mapping[str, float]:
    """The feed's `progress` before `step`, over all deals."""
    _, *later = self._deals
    ends = [begin for begin, _ in later]
    ends.append(self.position(step))
    totals: dict[str, float] = {}
    for (begin, feed), end in zip(self._deals, ends, strict=True):
      for name, value in feed.progress(end - begin).items():
        totals[name] = totals.get(name, 0) + value
    return totals

  def describe(self, step: int) -> str:
    """Names the documents that `step` (from 0) reads."""
    length = self.curriculum.phase(step).tokens_per_row
    return self.feed.describe(self.place(step), length)

  def plan(self, train_steps: int) -> str:
    """A line about the epochs that the run reads; a ConfigurationError if the feed ends before."""
    end = self.feed.row_end
    if train_steps and end is not None and self.place(train_steps - 1) >= end:
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
    latest = self.stretches[-1]
    if len(self.stretches) == 1 or latest.step != step:
      return None
    before = self.stretches[-2]
    if before.rows == latest.rows:
      return f'each row is read on from its token {latest.position:,}'
    earlier_deal, latest_deal = self._deals[-2:]
    begin, feed = earlier_deal
    end, _ = latest_deal
    read_again = feed.unfinished(end - begin)
    return (
      f'the documents are now dealt over {latest.rows} rows instead of {before.rows}, and carries '
      f'begin empty: {read_again:,} tokens of the unfinished epoch are read again'
    )
