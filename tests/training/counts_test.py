"""Counts of runs of any length: exact beyond 2^24 in float32 and 2^31 in int32, or refused."""

import json
import types
from typing import Any

import jax.numpy as jnp
import letters
import numpy as np
import pytest

from valkyrie.errors import LARGEST_COUNT, ConfigurationError
from valkyrie.monitoring.training_log import TrainingLog
from valkyrie.monitoring.writers import create_writers
from valkyrie.run import train
from valkyrie.training.curriculum import Curriculum, Phase
from valkyrie.training.objective import Sums
from valkyrie.training.optimizers import Optimizer
from valkyrie.training.reading import Reading
from valkyrie.training.setup import StepSettings
from valkyrie.training.train_step import StepMetrics
from valkyrie.types import POSITION_PERIOD, position_of

UNUSED: Any = None
REQUIRED: Any = dict.fromkeys((
  'settings', 'feed', 'log_every', 'eval_every', 'checkpoint_every', 'evaluator', 'checkpoints',
))  # fmt: skip


def phase(**options):
  return Phase(**{'chunk_size': 2**20, 'chunks': 4, 'backprop_chunks': 4, **options})


def test_positions_of_devices_are_those_of_the_feed():
  far = [0, 1, 2**30 - 1, 2**30, 2**30 + 1, 2**30 + POSITION_PERIOD, LARGEST_COUNT]
  distances = np.array(far, np.int64)
  of_devices = position_of(jnp.asarray(distances, jnp.int32))
  assert of_devices.dtype == jnp.int32
  np.testing.assert_array_equal(of_devices, position_of(distances))
  assert position_of(distances)[:4].tolist() == [0, 1, 2**30 - 1, 2**30 - POSITION_PERIOD]


def test_a_text_is_read_beyond_the_largest_position():
  loaded = letters.built()
  known = loaded.read([letters.text(40)])
  tokens = loaded.tokenizer.ids(letters.text(40, 1))

  def scored(position):
    carry = known._replace(position=jnp.full(1, position, jnp.int32))
    return loaded.score([tokens], carry)[0].log_probs, loaded.read([tokens], carry).position

  near, _ = scored(2**20 - 16)
  far, position = scored(2**30 - 16)
  assert position.tolist() == [2**30 - POSITION_PERIOD + 24]
  np.testing.assert_allclose(far, near, rtol=1e-4, atol=1e-4)  # distances count


def test_the_log_adds_in_float64(tmp_path):
  steps = Curriculum([phase()])
  feed: Any = types.SimpleNamespace(tokens_per_byte=None, progress=lambda position: {})
  about = types.SimpleNamespace(train_flops_per_token=None)
  setup: Any = types.SimpleNamespace(model=types.SimpleNamespace(about=about))
  with create_writers(tmp_path, tensorboard=False) as writer:
    log = TrainingLog(
      writer,
      setup,
      Reading(steps, feed, rows=4096),
      every=2,
      total_steps=10**8,
    )
    for step, tokens in ((10**8 - 1, 2**24), (10**8, 1)):
      one, sums = jnp.float32(1), jnp.float32(tokens)
      log(
        step,
        StepMetrics(
          Sums(sums, sums, sums, {'mine': sums}), one, {}, one, jnp.int32(0), jnp.bool_(False)
        ),
      )
    log.flush()
  line = json.loads((tmp_path / 'metrics.jsonl').read_text())
  assert (line['loss'], line['beyond_window'], line['terms/mine']) == (1.0, 1.0, 1.0)
  assert line['tokens'] == 10**8 * 4096 * 2**22


def test_an_objective_that_predicts_no_tokens_is_logged_as_what_it_is(tmp_path):
  """Its value is no loss of a model, so it has neither perplexity nor bits."""
  feed: Any = types.SimpleNamespace(tokens_per_byte=0.25, progress=lambda position: {})
  about = types.SimpleNamespace(train_flops_per_token=None)
  setup: Any = types.SimpleNamespace(model=types.SimpleNamespace(about=about))
  reading = Reading(Curriculum([phase()]), feed, rows=2)
  with create_writers(tmp_path, tensorboard=False) as writer:
    log = TrainingLog(writer, setup, reading, every=1, total_steps=1)
    one = jnp.float32(1)
    sums = Sums(None, 4 * one, one, {'mine': one}, objective=2 * one)
    log(1, StepMetrics(sums, one, {}, one, jnp.int32(0), jnp.bool_(False)))
    log.flush()
  line = json.loads((tmp_path / 'metrics.jsonl').read_text())
  assert (line['objective'], line['targets'], line['terms/mine']) == (0.5, 4.0, 0.25)
  assert not line.keys() & {'loss', 'perplexity', 'bits_per_token', 'bits_per_byte'}


def test_phases_of_any_number_of_steps_have_their_own_rate():
  curriculum = Curriculum([phase(steps=LARGEST_COUNT - 2), phase(learning_rate_scale=0.5)])
  scales = [float(curriculum.learning_rate_scale(jnp.int32(LARGEST_COUNT - n))) for n in (3, 2, 1)]
  assert scales == [1.0, 0.5, 0.5]
  assert curriculum.position(LARGEST_COUNT) == LARGEST_COUNT * 2**22


def test_the_schedule_of_many_steps_ends_where_it_should():
  rate = Optimizer(1.0, 2**25, 10**8, schedule='linear').learning_rate
  assert float(rate(jnp.int32(2**25))) == 1.0
  assert float(rate(jnp.int32(10**8))) == pytest.approx(0.1, abs=1e-7)
  assert float(rate(jnp.int32(2**24 + 1))) == pytest.approx((2**24 + 1) / 2**25, rel=1e-6)


@pytest.mark.parametrize(
  ('make', 'name'),
  [
    (lambda: phase(chunk_size=2**29), 'Phase.chunks x Phase.chunk_size=2,147,483,648'),
    (
      lambda: Curriculum([phase(steps=LARGEST_COUNT), phase(steps=1), phase()]),
      'The sum of Phase.steps',
    ),
    (lambda: Optimizer(1.0, 2**31, 10), 'Optimizer.warmup_steps = 2147483648'),
    (lambda: Optimizer(1.0, 10, 2**31), 'Optimizer.train_steps = 2147483648'),
    (lambda: train.train('', train_steps=2**31, **REQUIRED), 'train.train_steps'),
  ],
)
def test_counts_that_devices_cannot_hold_are_refused(make, name):
  refused = rf'{name}.* (exceeds 2,147,483,647|is out of range.*, 2147483647\])'
  with pytest.raises(ConfigurationError, match=refused):
    make()


@pytest.mark.parametrize('seed', [-1, 2**32])
def test_a_seed_that_would_be_cut_is_refused(seed):
  with pytest.raises(ConfigurationError, match=rf'StepSettings\.seed = {seed} is out of range'):
    StepSettings(seed, 8, UNUSED, UNUSED, UNUSED, UNUSED)
