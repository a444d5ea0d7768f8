"""Small models and batches that the tests share."""

import functools

import haiku as hk
import jax
import numpy as np
from planner import Planner

from valkyrie.models import language_model
from valkyrie.models.attention.full import FullAttention
from valkyrie.models.attention.longformer import LongformerAttention
from valkyrie.models.block import Block
from valkyrie.models.model import Model
from valkyrie.models.ngrams import NgramEmbedding
from valkyrie.models.s5.layer import S5
from valkyrie.run.evaluator import chunk_scores
from valkyrie.training.train_state import state_axes
from valkyrie.types import Batch

VOCABULARY = 50
WINDOW = 6

attention = functools.partial(
  LongformerAttention,
  heads=4,
  kv_heads=2,
  head_width=8,
  window=WINDOW,
  registers=2,
  document_start=2,
  slice_size=4,
)
full = functools.partial(
  FullAttention, heads=4, kv_heads=2, head_width=8, max_context=16, slice_size=4
)
s5 = functools.partial(S5, state_size=8, hippo_blocks=2)
ngrams = functools.partial(NgramEmbedding, rows=64, width=8)
INTERVAL = 4
planner = functools.partial(
  Planner, plan_interval=INTERVAL, plan_tokens=3, mlp_width=24, head_width=8, segments=3
)


def mixer(make):
  """(init, apply) of the mixer that `make` builds, compiled."""

  def f(x, carry, positions, segment_ids):
    return make()(x, carry, positions=positions, segment_ids=segment_ids)

  pure = hk.without_apply_rng(hk.transform(f))
  return hk.Transformed(jax.jit(pure.init), jax.jit(pure.apply))


def documents(random, rows, time):
  """(positions, segment_ids) of random documents of a few tokens, the first begun before."""
  positions = np.zeros((rows, time), np.int32)
  for row in range(rows):
    position = 7
    for t in range(time):
      positions[row, t] = position = 0 if random.random() < 0.25 else position + 1
  return positions, 1 + np.cumsum(positions == 0, axis=1, dtype=np.int32)


def model(mixers=(attention, s5), layers=2, vocabulary_size=VOCABULARY, **options) -> Model:
  """A hybrid of width 16 whose every part is in use."""
  block = functools.partial(Block, mixers=mixers, mlp_width=24)
  return language_model.transform(
    functools.partial(
      language_model.LanguageModel,
      vocabulary_size=vocabulary_size,
      d_model=16,
      layers=layers,
      pattern=(block,),
      **options,
    )
  )


def init(of: Model, rows: int):
  """(params, carry); the parameters are compiled once for any number of rows."""
  return of.init(jax.random.key(0), rows)


def shardings(partitioner, model, params, carry):
  """The shardings of {'params', 'carry'}."""
  return {
    'params': partitioner.shardings(params, model.parameter_axes(partitioner.parameter_axes)),
    'carry': partitioner.shardings(carry, model.carry_axes(carry)),
  }


def state_shardings(partitioner, model, optimizer, shapes):
  """The shardings of a train state."""
  return partitioner.shardings(shapes, state_axes(model, optimizer, partitioner, shapes))


def batch(lengths, rows=2, seed=0, padding=0) -> Batch:
  """Rows of documents of these lengths, then padding; numpy, [rows, sum(lengths) + padding]."""
  random = np.random.default_rng(seed)
  time = sum(lengths) + padding
  positions = np.concatenate([np.arange(n) for n in (*lengths, padding)])
  segments = np.repeat([*range(1, len(lengths) + 1), 0], [*lengths, padding])
  last = np.append(segments[1:] != segments[:-1], False) | (segments == 0)
  tokens = random.integers(0, VOCABULARY, (rows, time + 1))
  tile = functools.partial(np.tile, reps=(rows, 1))
  return Batch(
    inputs=tokens[:, :-1].astype(np.int32),
    targets=tokens[:, 1:].astype(np.int32),
    weights=tile(np.where(last, 0, 1).astype(np.float32)),
    positions=tile(np.where(segments == 0, 0, positions).astype(np.int32)),
    segment_ids=tile(segments.astype(np.int32)),
  )


def cut(whole: Batch, begin: int, end: int) -> Batch:
  """The tokens [begin, end) of every row."""
  return jax.tree.map(lambda x: x[:, begin:end], whole)


def term_sums(term, model, params, carry, whole: Batch, chunk: int):
  """The sums of a term over a batch that is evaluated in two chunks."""
  run = jax.jit(lambda carry, part: chunk_scores(model, params, carry, part, terms=(term,)))
  parts = []
  for begin in (0, chunk):
    found, carry = run(carry, cut(whole, begin, begin + chunk))
    parts.append(found.terms[term.name])
  return jax.tree.map(lambda *leaves: np.sum(leaves, axis=0, dtype=float), *parts)


def check_slopes(gradient, point, at, random):
  """Compares a gradient at `point` with differences of fourth order along five directions.

  `at(step, direction)` is the function at point + step x direction, in float64.
  """
  for _ in range(5):
    direction = jax.tree.map(lambda a: random.normal(size=a.shape), point)
    slope = (
      np.dot([at(step, direction) for step in (-2e-5, -1e-5, 1e-5, 2e-5)], [1, -8, 8, -1]) / 12e-5
    )
    along = sum(
      np.sum(g * d) for g, d in zip(*map(jax.tree.leaves, (gradient, direction)), strict=True)
    )
    np.testing.assert_allclose(along, slope, rtol=1e-6)
