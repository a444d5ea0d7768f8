"""What the benchmark times: the train step of a variant of the model, and the loop around it."""

from collections.abc import Callable, Mapping, Sequence
import functools
import time
from typing import Any, NamedTuple

import haiku as hk
import jax
import numpy as np

from valkyrie.data.feed import prefetch
from valkyrie.models import language_model
from valkyrie.models.block import Block
from valkyrie.models.language_model import LanguageModel
from valkyrie.monitoring import flops
from valkyrie.monitoring.training_log import TrainingLog
from valkyrie.sharding.partitioner import Partitioner
from valkyrie.training.curriculum import Curriculum, Phase
from valkyrie.training.optimizers import Optimizer
from valkyrie.training.train_step import TrainState, initial_state, make_train_step
from valkyrie.types import Batch

# Steps that are timed together. The loop writes its log once in so many.
STEPS = 10


class Forward(NamedTuple):
  """The operations of one token's forward pass: repeats x (terms of a layer) + unembedding."""

  repeats: int
  layer: dict[str, int]
  words: dict[str, str]
  unembedding: int


class Trainer:
  """The compiled train step of one variant: one row, its gradient exact through all chunks."""

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
    self.feed = MemoryFeed(self.model.vocabulary_size, document)
    self.batch = layout.place_batch(self.feed.read(0, tokens))
    optimizer = Optimizer(learning_rate=1e-3, warmup_steps=10, train_steps=1000)

    def start():
      return initial_state(self.model, optimizer, 0, 1)

    shardings = layout.state_shardings(jax.eval_shape(start))
    self.state: TrainState = layout.partition(start, out_shardings=shardings)()
    step = layout.partition(
      make_train_step(self.model, optimizer, self.curriculum, phase, seed=0, remat=True),
      donate_argnums=0,
      out_shardings=(shardings, None),
    )
    self.step = step.lower(self.state, self.batch).compile()
    self.state, _ = self.step(self.state, self.batch)  # the first touches its memory first

  @property
  def parameters(self) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(self.state.params))

  @property
  def flops_per_token(self) -> int:
    return flops.train_flops_per_token(self.model.forward_flops)

  def bare_steps(self, steps: int = STEPS) -> float:
    """Seconds a step takes where one batch is read again and again, and nobody watches."""
    began = time.perf_counter()
    for _ in range(steps):
      self.state, _ = self.step(self.state, self.batch)
    jax.block_until_ready(self.state)
    return (time.perf_counter() - began) / steps


class Loop:
  """The loop of valkyrie/train.py around a trainer's step."""

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
    """Seconds a step takes in the loop, the start and the end of its reading ahead included."""
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
  """One row of documents of one length, read from memory."""

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
  """Takes what the log writes, and keeps nothing."""

  def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
    del step, scalars


def _look_at(
  make: Callable[..., LanguageModel], block: Callable[..., Block]
) -> tuple[Forward, Any]:
  """The terms of the forward pass, each from the module that it belongs to, and the dtype."""
  found = []

  def look():
    model, layer = make(name='model'), block(name='block')
    parts = {type(part).__name__: part for part in (*layer.mixers, layer.mlp)}
    terms = {name: part.forward_flops(model.d_model) for name, part in parts.items()}
    words = {name: part.forward_flops.__doc__ for name, part in parts.items()}
    unembedding = 2 * model.d_model * model.vocabulary_size
    found.append((Forward(model.repeats, terms, words, unembedding), model.compute_dtype))

  hk.transform(look).apply({}, None)
  return found[0]
