"""Workloads of the benchmarks: the train step of a model variant, and the training loop."""

from collections.abc import Callable, Mapping, Sequence
import functools
import time
from typing import Any, NamedTuple

import haiku as hk
import jax
import numpy as np

from valkyrie.data.prefetch import prefetch
from valkyrie.models import language_model
from valkyrie.models.block import Block
from valkyrie.models.language_model import LanguageModel
from valkyrie.monitoring.training_log import TrainingLog
from valkyrie.sharding.partitioner import Partitioner
from valkyrie.training.curriculum import Curriculum, Phase
from valkyrie.training.optimizers import Optimizer
from valkyrie.training.setup import Setup, StepSettings
from valkyrie.types import Batch

# Steps that are timed together; the loop writes its log once in as many.
STEPS = 10


class Forward(NamedTuple):
  """Operations of the forward pass per token: repeats x (terms of a layer) + unembedding.

  words: the explanation of each term of `layer`.
  """

  repeats: int
  layer: dict[str, int]
  words: dict[str, str]
  unembedding: int


class Trainer:
  """The compiled train step of one variant: one row, with the exact gradient through all chunks."""

  def __init__(
    self,
    mixers: Sequence[Callable],
    layout: Partitioner,
    tokens: int,
    chunks: int = 1,
    document: int = 1000,
  ):
    block = functools.partial(Block, mixers=mixers)
    make = functools.partial(LanguageModel, pattern=(block,))
    self.model = language_model.transform(make)
    self.forward, self.compute_dtype = _look_at(make, block)
    self.layout = layout
    phase = Phase(chunk_size=tokens // chunks, chunks=chunks, backprop_chunks=chunks)
    self.curriculum = Curriculum([phase])
    self.feed = MemoryFeed(self.model.about.vocabulary_size, document)
    self.batch = layout.place_batch(self.feed.read(0, tokens))
    setup = Setup(
      StepSettings(
        seed=0,
        batch_size=1,
        model=make,
        partitioner=lambda: layout,
        curriculum=lambda: self.curriculum,
        optimizer=lambda: Optimizer(learning_rate=1e-3, warmup_steps=10, train_steps=1000),
      )
    )
    self.state = setup.initial_state()
    self.step = setup.trace(phase).lower().compile()
    self.state, _ = self.step(self.state, self.batch)  # untimed: it allocates the memory

  @property
  def parameters(self) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(self.state.params))

  @property
  def flops_per_token(self) -> int:
    return self.model.about.train_flops_per_token

  def bare_steps(self, steps: int = STEPS) -> float:
    """Seconds per step on one repeated batch, without data loading and logging."""
    began = time.perf_counter()
    for _ in range(steps):
      self.state, _ = self.step(self.state, self.batch)
    jax.block_until_ready(self.state)
    return (time.perf_counter() - began) / steps


class Loop:
  """The loop of valkyrie/run/train.py around a trainer's step."""

  def __init__(self, trainer: Trainer):
    self._trainer = trainer
    self._done = 0
    self._log = TrainingLog(
      NullWriter(),
      trainer.model,
      trainer.curriculum,
      every=STEPS,
      total_steps=STEPS,
      batch_size=1,
      tokens_per_byte=1.0,
    )

  def steps(self) -> float:
    """Seconds per step in the loop, including the start and the end of prefetching."""
    trainer, log = self._trainer, self._log
    began = time.perf_counter()
    numbers = range(self._done, self._done + STEPS)
    spans = (
      (trainer.curriculum.position(n), trainer.curriculum.phase(n).tokens_per_row) for n in numbers
    )
    log.restart_clock()
    under_way = None
    for step, batch in zip(numbers, prefetch(trainer.feed, spans), strict=True):
      trainer.state, metrics = trainer.step(trainer.state, trainer.layout.place_batch(batch))
      log(step + 1, metrics)
      jax.block_until_ready(under_way)
      under_way = metrics
    log.flush()
    jax.block_until_ready(trainer.state)
    self._done += STEPS
    return (time.perf_counter() - began) / STEPS


class MemoryFeed:
  """One row of random documents of equal length, held in memory."""

  def __init__(self, vocabulary_size: int, document: int):
    self._document = document
    self._tokens = np.random.default_rng(0).integers(0, vocabulary_size, 2**20, np.int32)

  def read(self, position: int, length: int, rows: None = None) -> Batch:
    """The tokens [position, position + length) of the row, as numpy arrays [1, length]."""
    del rows
    at = np.arange(position, position + length + 1)
    tokens = self._tokens[at % len(self._tokens)]
    documents, positions = np.divmod(at[:-1], self._document)
    return Batch(
      inputs=tokens[None, :-1],
      targets=tokens[None, 1:],
      weights=(positions < self._document - 1).astype(np.float32)[None],
      positions=positions.astype(np.int32)[None],
      segment_ids=(documents + 1).astype(np.int32)[None],
    )


class NullWriter:
  """A writer that discards its scalars."""

  def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
    del step, scalars


def _look_at(
  make: Callable[..., LanguageModel], block: Callable[..., Block]
) -> tuple[Forward, Any]:
  """The terms of the forward pass, each from its own module, and the compute dtype."""

  def look():
    model, layer = make(name='model'), block(name='block')
    parts = {type(part).__name__: part for part in (*layer.mixers, layer.mlp)}
    terms = {name: part.forward_flops(model.d_model) for name, part in parts.items()}
    words = {name: part.forward_flops.__doc__ for name, part in parts.items()}
    unembedding = 2 * model.d_model * model.vocabulary_size
    return Forward(model.repeats, terms, words, unembedding), model.compute_dtype

  return hk.transform(look).apply({}, None)
