"""Workloads of the benchmarks: the train step of a model variant, and the training loop."""

import argparse
import collections
from collections.abc import Callable, Mapping, Sequence
import functools
import time
from typing import Any, NamedTuple

import haiku as hk
import jax
import numpy as np

from valkyrie.data.read_ahead import prefetch
from valkyrie.models import language_model
from valkyrie.models.block import Block
from valkyrie.models.language_model import LanguageModel
from valkyrie.monitoring.training_log import TrainingLog
from valkyrie.sharding.partitioner import Partitioner
from valkyrie.training import kernel_check
from valkyrie.training.curriculum import Curriculum, Phase
from valkyrie.training.optimizers import Optimizer
from valkyrie.training.reading import Reading
from valkyrie.training.setup import Setup, StepSettings
from valkyrie.types import Batch

# Steps that are timed together; the loop writes its log once in as many.
STEPS = 10
# names of variants
WHOLE = 'the model'
NO_MIXERS = 'no mixers'


class Forward(NamedTuple):
  """Operations of the forward pass per token: repeats x (terms of the pattern) + unembedding.

  words: the explanation of each kind of term.
  """

  repeats: int
  terms: list[tuple[str, int]]
  words: dict[str, str]
  unembedding: int


def with_bindings(
  parser: argparse.ArgumentParser, arguments: Sequence[str] | None
) -> tuple[argparse.Namespace, list[str]]:
  """(the flags of the parser, the flags --gin.NAME=VALUE beside them)."""
  flags, others = parser.parse_known_args(arguments)
  if unknown := [flag for flag in others if not flag.startswith('--gin.')]:
    parser.error(f'unknown: {" ".join(unknown)}')
  return flags, others


def variants() -> dict[str, tuple[Callable[..., Block], ...]]:
  """The patterns to compare: the model's own, each of its blocks alone, and a block of the MLP."""

  def look():
    return LanguageModel(name='model').pattern

  pattern = hk.transform(look).apply({}, None)
  alone = {name: (block,) for name, block in zip(_names(pattern), pattern, strict=True)}
  no_mixers = functools.partial(pattern[0], mixers=())
  return {WHOLE: pattern, **(alone if len(alone) > 1 else {}), NO_MIXERS: (no_mixers,)}


class Trainer:
  """The compiled train step of one variant, with the exact gradient through all chunks.

  Attributes:
    blocks: {name of a block's mixers: the number of its layers}.
  """

  def __init__(
    self,
    pattern: Sequence[Callable[..., Block]],
    layout: Partitioner,
    tokens: int,
    rows: int = 1,
    chunks: int = 1,
    document: int = 1000,
  ):
    make = functools.partial(LanguageModel, pattern=pattern)
    self.model = language_model.transform(make)
    self.forward, self.compute_dtype = _look_at(make)
    self.blocks = collections.Counter(self.forward.repeats * _names(pattern))
    self.layout = layout
    phase = Phase(chunk_size=tokens // chunks, chunks=chunks, backprop_chunks=chunks)
    self.curriculum = Curriculum([phase])
    self.feed = MemoryFeed(self.model.about.vocabulary_size, document, rows)
    self.batch = layout.place_batch(self.feed.read(0, tokens))
    self.setup = Setup(
      StepSettings(
        seed=0,
        batch_size=rows,
        model=make,
        partitioner=lambda: layout,
        curriculum=lambda: self.curriculum,
        optimizer=lambda: Optimizer(learning_rate=1e-3, warmup_steps=10, train_steps=1000),
      )
    )
    self.state = self.setup.initial_state()
    self.setup = self.setup.with_kernels(kernel_check.agreeing_lengths(self.setup, print))
    self.step = self.setup.trace(phase).lower().compile()
    self.state, _ = self.step(self.state, self.batch)  # untimed: it allocates the memory

  @property
  def parameters(self) -> int:
    return sum(jax.tree.leaves(self.model.counts()))

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
      trainer.setup,
      Reading(trainer.curriculum, trainer.feed, trainer.feed.batch_size),
      every=STEPS,
      total_steps=STEPS,
    )

  def steps(self) -> float:
    """Seconds per step in the loop, including the start and the end of prefetching."""
    trainer = self._trainer
    log = self._log
    began = time.perf_counter()
    numbers = range(self._done, self._done + STEPS)
    spans = (
      (trainer.curriculum.position(n), trainer.curriculum.phase(n).tokens_per_row) for n in numbers
    )
    log.clock(runs=True)
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
  """Rows of random documents of equal length, held in memory."""

  tokens_per_byte = 1.0

  def __init__(self, vocabulary_size: int, document: int, rows: int):
    self.batch_size = rows
    self._document = document
    self._tokens = np.random.default_rng(0).integers(0, vocabulary_size, 2**20, np.int32)

  def progress(self, position: int) -> dict[str, float]:
    return {'epochs': position * self.batch_size / len(self._tokens)}

  def read(self, position: int, length: int, rows: None = None) -> Batch:
    """The tokens [position, position + length) of every row, as numpy arrays [rows, length]."""
    del rows
    starts = position + len(self._tokens) // self.batch_size * np.arange(self.batch_size)
    at = starts[:, None] + np.arange(length + 1)
    tokens = self._tokens[at % len(self._tokens)]
    documents, positions = np.divmod(at[:, :-1], self._document)
    return Batch(
      inputs=tokens[:, :-1],
      targets=tokens[:, 1:],
      weights=(positions < self._document - 1).astype(np.float32),
      positions=positions.astype(np.int32),
      segment_ids=(documents + 1).astype(np.int32),
    )


class NullWriter:
  """A writer that discards its scalars."""

  def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
    del step, scalars


def _names(pattern: Sequence[Callable[..., Block]]) -> list[str]:
  """The names of each block's mixers."""

  def look():
    return [' + '.join(type(m).__name__ for m in make(name='block').mixers) for make in pattern]

  return hk.transform(look).apply({}, None)


def _look_at(make: Callable[..., LanguageModel]) -> tuple[Forward, Any]:
  """The terms of the forward pass, each from its own module, and the compute dtype."""

  def look():
    model = make(name='model')
    blocks = [block(name='block') for block in model.pattern]
    parts = [part for block in blocks for part in (*block.mixers, block.mlp)]
    terms = [(type(part).__name__, part.forward_flops(model.d_model)) for part in parts]
    words = {type(part).__name__: part.forward_flops.__doc__ for part in parts}
    unembedding = 2 * model.d_model * model.vocabulary_size
    return Forward(model.repeats, terms, words, unembedding), model.compute_dtype

  return hk.transform(look).apply({}, None)
