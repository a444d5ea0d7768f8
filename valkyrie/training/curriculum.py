"""Curriculum: phases of chunk length, unroll and learning rate, as a function of the step."""

import bisect
from collections.abc import Sequence
import dataclasses

import gin
import jax.numpy as jnp

from valkyrie.config.ranges import NonNegativeFloat, PositiveInt, check_fields
from valkyrie.errors import ConfigurationError, check_count
from valkyrie.types import Array


@gin.configurable
@dataclasses.dataclass(frozen=True)
class Phase:
  """A run of steps of one shape.

  Attributes:
    chunk_size: C, tokens that one forward call reads.
    chunks: N, chunks of one optimizer step.
    backprop_chunks: consecutive chunks through which the gradient flows; divides N.
    steps: its number of steps; None, for the last phase, means to the end.
    learning_rate_scale: a factor on the schedule's learning rate.
    insert: whether the insert of the model takes part; if not, its parameters do not change.
    long_every: every so many steps of the phase, the gradient flows through `long_backprop_chunks`
      chunks instead, to teach what lies farther back. None for never.
    long_backprop_chunks: divides N, and is more than `backprop_chunks`.
  """

  chunk_size: PositiveInt
  chunks: PositiveInt
  backprop_chunks: PositiveInt
  steps: PositiveInt | None = None
  learning_rate_scale: NonNegativeFloat = 1.0
  insert: bool = True
  long_every: PositiveInt | None = None
  long_backprop_chunks: PositiveInt | None = None

  def __post_init__(self):
    check_fields(self)
    check_count('Phase.chunks x Phase.chunk_size', self.tokens_per_row)
    if self.chunks % self.backprop_chunks:
      raise ConfigurationError(
        f'backprop_chunks={self.backprop_chunks} must divide chunks={self.chunks}: the gradient '
        'flows through groups of backprop_chunks consecutive chunks.'
      )
    every = self.long_every
    longer = self.long_backprop_chunks
    if (every, longer) == (None, None):
      return
    fits = longer is not None and longer > self.backprop_chunks and self.chunks % longer == 0
    if every is None or not fits:
      raise ConfigurationError(
        f'Phase has long_every={every} and long_backprop_chunks={longer}. Give both: every 1 or '
        f'more steps, the gradient flows through more than backprop_chunks={self.backprop_chunks} '
        f'chunks, and that number divides chunks={self.chunks}.'
      )

  @property
  def long(self) -> 'Phase':
    """The steps with the longer gradient."""
    longer = self.long_backprop_chunks or self.backprop_chunks
    return dataclasses.replace(
      self,
      backprop_chunks=longer,
      long_every=None,
      long_backprop_chunks=None,
    )

  @property
  def shape(self) -> tuple[int, int, int, bool]:
    """(C, N, backprop_chunks, insert): phases of one shape share one compiled step."""
    return self.chunk_size, self.chunks, self.backprop_chunks, self.insert

  @property
  def tokens_per_row(self) -> int:
    """N x C, tokens of a row that one step reads."""
    return self.chunks * self.chunk_size


@gin.configurable
class Curriculum:
  """Phases one after the other; `begins` are the positions of a row at which they begin."""

  def __init__(self, phases: Sequence[Phase]):
    self.phases = tuple(phases)
    if not self.phases or any(phase.steps is None for phase in self.phases[:-1]):
      raise ConfigurationError(
        f'Curriculum.phases have {[phase.steps for phase in self.phases]} steps. Give at least one '
        'phase, and Phase.steps to every phase but the last.'
      )
    self._starts = [0]
    self.begins = [0]
    step = 0
    position = 0
    for phase in self.phases[:-1]:
      steps = phase.steps or 0
      step += steps
      position += steps * phase.tokens_per_row
      self._starts.append(step)
      self.begins.append(position)
    check_count('The sum of Phase.steps', step)

  def index(self, step: int) -> int:
    """The index, from 0, of the phase of `step` (from 0)."""
    return bisect.bisect_right(self._starts, step) - 1

  def phase(self, step: int) -> Phase:
    """The phase of `step` (from 0), or its `long` form where that is due."""
    index = self.index(step)
    phase = self.phases[index]
    number = step - self._starts[index] + 1
    if phase.long_every and number % phase.long_every == 0:
      return phase.long
    return phase

  @property
  def forms(self) -> list[Phase]:
    """All that `phase` returns: the phases and their long forms."""
    return self.forms_from(0)

  def forms_from(self, step: int) -> list[Phase]:
    """What `phase` returns from a step on: without the phases that are over."""
    phases = self.phases[self.index(step) :]
    long_forms = [phase.long for phase in phases if phase.long_every]
    return [*phases, *long_forms]

  def counts(self, steps: int) -> list[int]:
    """How many of the first steps have each of the `forms`."""
    ends = [*self._starts[1:], steps]
    lengths = []
    for begin, end in zip(self._starts, ends, strict=True):
      length = min(end, steps) - begin
      lengths.append(max(0, length))
    short = []
    long = []
    for length, phase in zip(lengths, self.phases, strict=True):
      rare = 0
      if phase.long_every:
        rare = length // phase.long_every
        long.append(rare)
      short.append(length - rare)
    return short + long

  def position(self, step: int) -> int:
    """Tokens of a row that the steps before `step` read: the feed's position."""
    index = self.index(step)
    steps_of_phase = step - self._starts[index]
    tokens = steps_of_phase * self.phases[index].tokens_per_row
    return self.begins[index] + tokens

  def steps_before(self, position: int) -> int:
    """The number of steps that begin before a position of the rows, 1 or more."""
    index = bisect.bisect_left(self.begins, position) - 1
    size = self.phases[index].tokens_per_row
    tokens_of_phase = position - self.begins[index]
    steps_of_phase = -(-tokens_of_phase // size)
    return self._starts[index] + steps_of_phase

  def learning_rate_scale(self, step: Array) -> Array:
    """The phase's factor on the learning rate, for a traced step."""
    scales = jnp.asarray([phase.learning_rate_scale for phase in self.phases], jnp.float32)
    starts = jnp.asarray(self._starts)
    begun = jnp.searchsorted(starts, step, side='right')
    return scales[begun - 1]
