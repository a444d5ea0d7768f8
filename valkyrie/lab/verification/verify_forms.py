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
  recomputes: as the run does, else all activations are saved.
  learns: whether there are gradients.
  carry: whether the carry after the last token should be the same.
  """

  name: str
  batch: Batch
  chunk_size: int
  layout: Partitioner
  recomputes: bool = True
  learns: bool = True
  carry: bool = True


def forms(setup: Setup, layouts: Mapping[str, Partitioner]) -> Iterator[list[Form]]:
  """Lists of forms that should be the same as their first."""
  about = setup.language_model.about
  layout = setup.partitioner
  size = setup.curriculum.phases[0].chunk_size
  time = CHUNKS * size
  rows = min(setup.settings.batch_size, 2 * jax.device_count())
  longer = documents(rows, 2 * time, about)
  batch = jax.tree.map(lambda x: x[:, :time], longer)
  run = Form(RUN, batch, size, layout)
  same = [run]
  if about.remat_policy is not None or setup.settings.remat_chunks:
    same.append(run._replace(name='activations saved', recomputes=False))
  same += [run._replace(name=f'layout {name}', layout=other) for name, other in layouts.items()]
  unit = layout.parts_of('time')
  if about.carried:
    cuts = [time] if size // 2 % unit or size == 1 else [size // 2, time]
    same += [run._replace(name=f'chunks of {cut:,}', chunk_size=cut) for cut in cuts]
    # What follows has no weight, and should change nothing.
    masked = longer._replace(weights=longer.weights * (np.arange(2 * time) < time))
    same.append(run._replace(name='twice the length', batch=masked, carry=False))
  yield same
  packed, alone = _apart(batch)
  yield [
    run._replace(name='packed', batch=packed, carry=False),
    run._replace(name='a document alone', batch=alone, carry=False),
  ]
  if about.carried and unit == 1:
    few = min(size, _SINGLY)
    begun = jax.tree.map(lambda x: x[:, :few], batch)
    at_once = run._replace(name='at once', batch=begun, chunk_size=few, learns=False)
    yield [at_once, at_once._replace(name='token by token', chunk_size=1)]


def documents(rows: int, time: int, about: Description) -> Batch:
  """Random tokens of documents of all lengths, which begin anywhere."""
  random = np.random.default_rng(0)
  longest = min(about.max_context or time, time // 2)
  positions = np.zeros((rows, time), np.int32)
  for row in positions:
    begin = 0
    while begin < time:
      length = min(int(longest ** random.random()) + 1, longest, time - begin)
      row[begin : begin + length] = np.arange(length)
      begin += length
  tokens = random.integers(about.vocabulary_size, size=(rows, time + 1), dtype=np.int32)
  segments = np.cumsum(positions == 0, axis=1, dtype=np.int32)
  same = np.diff(segments, axis=1, append=segments[:, -1:]) == 0
  return Batch(tokens[:, :-1], tokens[:, 1:], same.astype(np.float32), positions, segments)


def _apart(batch: Batch) -> tuple[Batch, Batch]:
  """The batch with weights in one document of each row, and this document at the row's start."""
  weights = np.zeros_like(batch.weights)
  alone = jax.tree.map(np.zeros_like, batch)
  for row in range(len(weights)):
    lengths = np.bincount(batch.segment_ids[row])
    lengths[1] = min(lengths[1], 1)  # the first has no neighbor before it
    chosen = np.flatnonzero(batch.segment_ids[row] == np.argmax(lengths))
    weights[row, chosen] = batch.weights[row, chosen]
    for whole, part in zip(batch, alone, strict=True):
      part[row, : len(chosen)] = whole[row, chosen]
  return batch._replace(weights=weights), alone


def refuse(refused: dict[str, str], name: str, reason: str) -> None:
  """Records and prints why a form is not possible, in the first line of the reason."""
  refused[name] = reason.partition('\n')[0]
  print(f'{name} is not possible: {refused[name]}', flush=True)
