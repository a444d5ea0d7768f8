"""One trial of scripts/learn with a model of gin files, in a process of its own.

The parts are those of `valkyrie.main`, and so is the step. The trial replaces seed, learning rate,
number of rows and number of steps; warm-up and phases keep their shares of the steps.
"""

from collections.abc import Sequence
import dataclasses
import functools
import time
from typing import Any

import gin
import jax
import learn_trial
from learn_trial import Trial
import learn_validation
import numpy as np

from valkyrie import main
from valkyrie.config.load import load_gin
from valkyrie.data.feed import TaskFeed
from valkyrie.errors import ConfigurationError
from valkyrie.models.language_model import Model
from valkyrie.run.trainer import batches
from valkyrie.training.curriculum import Curriculum
from valkyrie.training.losses import token_scores
from valkyrie.training.reading import Reading
from valkyrie.training.setup import Setup, StepSettings, check_vocabulary
from valkyrie.types import Params

READ_ROWS, READ_CHUNK = 4, 512  # of a validation; the cuts between chunks change nothing


def settings_of(trial: Trial) -> StepSettings:
  """The settings of its step. Loads the gin files, for which gin must be empty."""
  flags, gin_flags = main.parse_command_line(trial.gin)
  load_gin(flags.gin_file, gin_flags, modules=main.CONFIGURABLE_MODULES)
  settings: StepSettings = gin.get_configurable(StepSettings)()
  curriculum = settings.curriculum()
  optimizer: Any = settings.optimizer
  shipped = gin.get_bindings('Optimizer')
  share = trial.steps / shipped['train_steps']
  phases = [
    phase if phase.steps is None else dataclasses.replace(phase, steps=round(share * phase.steps))
    for phase in curriculum.phases
  ]
  return dataclasses.replace(
    settings,
    seed=trial.seed,
    batch_size=_rows(curriculum, trial.batch),
    curriculum=lambda: Curriculum(phases),
    optimizer=functools.partial(
      optimizer,
      learning_rate=trial.rate,
      warmup_steps=round(share * shipped['warmup_steps']),
      train_steps=trial.steps,
    ),
  )


class Run:
  """The setup of a trial, and what it reads."""

  def __init__(self, trial: Trial):
    settings = settings_of(trial)
    self.setup = Setup(settings)
    feed = self.open_feed('train', batch_size=settings.batch_size, seed=trial.seed)
    check_vocabulary(self.setup.model, feed)
    self.reading = Reading(self.setup.curriculum, feed, settings.batch_size)

  def open_feed(self, split: str, **settings) -> TaskFeed:
    with gin.config_scope(split):
      return gin.get_configurable(TaskFeed)(**settings)

  def compile(self) -> dict:
    """The compiled step of each shape of phase."""
    phases = {phase.shape: phase for phase in self.setup.curriculum.phases}
    return {shape: self.setup.trace(phase).lower().compile() for shape, phase in phases.items()}


def measure(trial: Trial) -> dict[str, Any]:
  """The seconds of a step, a mean over the steps of all phases."""
  run = Run(trial)
  batch = next(batches(run.reading, run.setup, range(1)))
  state, before = run.setup.initial_state(), None
  seconds = {}
  for shape, compiled in run.compile().items():

    def step(compiled=compiled):
      nonlocal state, before
      state, metrics = compiled(state, batch)
      jax.block_until_ready(before)  # as in `train`
      before = metrics

    seconds[shape] = learn_trial.step_seconds(step)
  phases = map(run.setup.curriculum.phase, range(trial.steps))
  return {'step_seconds': np.mean([seconds[phase.shape] for phase in phases])}


def train(trial: Trial) -> dict[str, Any]:
  """Trains and validates."""
  began = time.perf_counter()
  run = Run(trial)
  setup, steps = run.setup, run.compile()
  state = setup.initial_state()
  state = state._replace(params=with_outputs_scaled(state.params, trial.output_scale))
  jax.block_until_ready(state)
  ready = time.perf_counter()
  losses, before = [], None
  for number, batch in enumerate(batches(run.reading, setup, range(trial.steps))):
    state, metrics = steps[setup.curriculum.phase(number).shape](state, batch)
    jax.block_until_ready(before)  # two steps in flight, as in valkyrie.run.train
    before = metrics
    losses.append(metrics.sums.loss / metrics.sums.weight)
  jax.block_until_ready(state)
  trained = time.perf_counter()
  documents = learn_validation.sample(run.open_feed('validation', batch_size=1).store, trial.scored)
  nats = read(setup.model, state.params, documents, READ_ROWS, READ_CHUNK)
  return {
    'parameters': sum(jax.tree.leaves(setup.model.counts())),
    'seconds': trained - ready,
    'startup_seconds': ready - began,
    'validation_seconds': time.perf_counter() - trained,
    'skipped_steps': int(state.skipped),
    'losses': [round(float(loss), 4) for loss in losses],
    'reading': 'whole documents',
    **learn_validation.summary(nats),
  }


def read(
  model: Model, params: Params, documents: Sequence[np.ndarray], rows: int, chunk_size: int
) -> list[np.ndarray]:
  """Nats of the targets of each document, read from its start in chunks with the carry."""

  @jax.jit
  def losses_of(params, carry, inputs, targets, positions, segment_ids):
    features, carry = model.apply(params, carry, inputs, positions, segment_ids)
    return token_scores(features, targets, model.about.vocabulary_size).loss, carry

  nats: list[np.ndarray] = [np.empty(0)] * len(documents)
  by_length = sorted(range(len(documents)), key=lambda number: -len(documents[number]))
  for first in range(0, len(documents), rows):  # documents of similar length stand side by side
    numbers = by_length[first : first + rows]
    longest = len(documents[numbers[0]]) - 1
    tokens = np.zeros((rows, -(-longest // chunk_size) * chunk_size + 1), np.int32)
    segments = np.zeros_like(tokens)
    for row, number in enumerate(numbers):
      tokens[row, : len(documents[number])] = documents[number]
      segments[row, : len(documents[number]) - 1] = 1
    carry, losses = model.initial_carry(rows), []
    for begin in range(0, longest, chunk_size):
      chunk = slice(begin, begin + chunk_size)
      positions = np.tile(np.arange(begin, begin + chunk_size, dtype=np.int32), (rows, 1))
      targets = tokens[:, 1:][:, chunk]
      loss, carry = losses_of(
        params, carry, tokens[:, chunk], targets, positions, segments[:, chunk]
      )
      losses.append(np.asarray(loss))
    joined = np.concatenate(losses, axis=1)
    for row, number in enumerate(numbers):
      nats[number] = joined[row, : len(documents[number]) - 1]
  return nats


def with_outputs_scaled(params: Params, scale: float) -> Params:
  return {
    module: {name: scale * leaf if name == 'out' else leaf for name, leaf in leaves.items()}
    for module, leaves in params.items()
  }


def _rows(curriculum: Curriculum, batch: int) -> int:
  lengths = {phase.tokens_per_row for phase in curriculum.phases}
  if len(lengths) > 1 or batch % min(lengths):
    raise ConfigurationError(
      f'The phases read {sorted(lengths)} tokens of a row in a step, but all models must read '
      f'{batch} tokens in a step. Use --batch with a multiple of the one length of all phases.'
    )
  return batch // min(lengths)


if __name__ == '__main__':
  learn_trial.main(measure, train)
