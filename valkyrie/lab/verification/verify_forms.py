"""The forms of a run that the run mode `verify` compares, and random documents for them."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax
import numpy as np

from valkyrie.models.features import Description
from valkyrie.sharding.partitioner import Partitioner
from valkyrie.training.setup import Setup
from valkyrie.types import Batch

RUN = 'the run'
CHUNKS = 4  # that are read of each row
_SINGLY = 256  # tokens at most that are read one by one


class Form(NamedTuple):
  """A way to compute what the run computes.

  batch: [B, T] on the host; chunk_size: C, dividing T.
  recomputes: whether activations are recomputed as in the run; otherwise all are saved.
  learns: whether gradients are compared.
  carry: whether the carry after the last token is compared.
  """

  name: str
  batch: Batch
  chunk_size: int
  layout: Partitioner
  recomputes: bool = True
  learns: bool = True
  carry: bool = True


def forms(setup: Setup, layouts: Mapping[str, Partitioner]) -> Iterator[list[Form]]:
  """Lists of forms. All forms of a list should give the numbers of its first."""
  description = setup.language_model.about
  layout = setup.partitioner
  first_phase = setup.curriculum.phases[0]
  size = first_phase.chunk_size
  time = CHUNKS * size
  rows = min(setup.settings.batch_size, 2 * jax.device_count())
  longer = documents(rows, 2 * time, description)
  batch = _first_tokens(longer, time)
  run = Form(RUN, batch, size, layout)
  # The size of a chunk has to be a multiple of this.
  unit = layout.parts_of('time')

  same = [run]
  recomputes_layers = description.remat_policy is not None
  if recomputes_layers or setup.settings.remat_chunks:
    form = run._replace(name='activations saved', recomputes=False)
    same.append(form)
  for name, other in layouts.items():
    form = run._replace(name=f'layout {name}', layout=other)
    same.append(form)
  if description.carried:
    for other_size in _other_sizes(size, time, unit):
      form = run._replace(name=f'chunks of {other_size:,}', chunk_size=other_size)
      same.append(form)
    # The tokens after `time` have no weight, so they should change nothing.
    places = np.arange(2 * time)
    has_weight = places < time
    masked = longer._replace(weights=longer.weights * has_weight)
    form = run._replace(name='twice the length', batch=masked, carry=False)
    same.append(form)
  yield same

  packed_batch, alone_batch = _with_and_without_neighbors(batch)
  packed = run._replace(name='packed', batch=packed_batch, carry=False)
  alone = run._replace(name='a document alone', batch=alone_batch, carry=False)
  yield [packed, alone]

  if description.carried and unit == 1:
    few = min(size, _SINGLY)
    beginning = _first_tokens(batch, few)
    at_once = run._replace(name='at once', batch=beginning, chunk_size=few, learns=False)
    token_by_token = at_once._replace(name='token by token', chunk_size=1)
    yield [at_once, token_by_token]


def _first_tokens(batch: Batch, count: int) -> Batch:
  return jax.tree.map(lambda x: x[:, :count], batch)


def _other_sizes(size: int, time: int, unit: int) -> list[int]:
  """Sizes of chunks to compare with the run's: half of it, if possible, and the whole row."""
  half = size // 2
  if half == 0 or half % unit:
    return [time]
  return [half, time]


def documents(rows: int, time: int, description: Description) -> Batch:
  """Random tokens in documents of all lengths, which begin anywhere: a batch [rows, time]."""
  random = np.random.default_rng(0)
  half = time // 2
  longest = min(description.max_context or time, half)
  positions = np.zeros((rows, time), np.int32)
  for row in positions:
    begin = 0
    while begin < time:
      drawn = int(longest ** random.random()) + 1
      left = time - begin
      length = min(drawn, longest, left)
      row[begin : begin + length] = np.arange(length)
      begin += length
  shape = (rows, time + 1)
  tokens = random.integers(description.vocabulary_size, size=shape, dtype=np.int32)
  is_start = positions == 0
  segments = np.cumsum(is_start, axis=1, dtype=np.int32)
  last = segments[:, -1:]
  steps_to_next = np.diff(segments, axis=1, append=last)
  next_is_same = steps_to_next == 0
  return Batch(
    inputs=tokens[:, :-1],
    targets=tokens[:, 1:],
    weights=next_is_same.astype(np.float32),
    positions=positions,
    segment_ids=segments,
  )


def _with_and_without_neighbors(batch: Batch) -> tuple[Batch, Batch]:
  """(The batch with weights in only one document of each row, this document at the row's start)."""
  weights = np.zeros_like(batch.weights)
  alone = jax.tree.map(np.zeros_like, batch)
  for row, segments in enumerate(batch.segment_ids):
    lengths = np.bincount(segments)
    lengths[1] = min(lengths[1], 1)  # the first document has no neighbor before it
    longest = np.argmax(lengths)
    tokens = np.flatnonzero(segments == longest)
    count = len(tokens)
    weights[row, tokens] = batch.weights[row, tokens]
    for whole, part in zip(batch, alone, strict=True):
      part[row, :count] = whole[row, tokens]
  return batch._replace(weights=weights), alone


def refuse(refused: dict[str, str], name: str, reason: str) -> None:
  """Prints why a form is left out, the first line of the reason, and adds it to `refused`."""
  first_line, _, _ = reason.partition('\n')
  refused[name] = first_line
  print(f'{name} is not possible: {first_line}', flush=True)
