"""The parameters of a run, read from checkpoints into the layout of a partitioner."""

import os

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from valkyrie.checkpoint.manager import LATEST, open_to_read
from valkyrie.checkpoint.stored_arrays import StoredArray, keeping_last
from valkyrie.data.vocabularies import Vocabulary
from valkyrie.errors import ConfigurationError
from valkyrie.models.model import Model
from valkyrie.sharding.partitioner import Partitioner
from valkyrie.training import rounding
from valkyrie.types import Params


def restored_params(
  model: Model,
  partitioner: Partitioner,
  model_dir: str | os.PathLike,
  vocabulary: Vocabulary,
  step: str = LATEST,
) -> tuple[Params, tuple[int, ...]]:
  """The parameters of a step of a run, or the mean over several steps, and the step numbers.

  A run with an average of its parameters has the average in each step. `step` is a number, 'latest'
  or 'best', see `checkpoint.manager.open_to_read`; or several numbers separated by commas, whose
  parameters have the mean of their values.

  Raises a ConfigurationError if the run has no such step, or one of another model or vocabulary.
  """
  shapes = _shapes(model)
  parameter_axes = model.parameter_axes(partitioner.parameter_axes)
  shardings = partitioner.shardings(shapes, parameter_axes)
  target = jax.tree.map(lambda leaf, sharding: leaf.update(sharding=sharding), shapes, shardings)
  steps = _steps(step)
  total, *numbers = _restored(model_dir, vocabulary, steps[0], target)
  if len(steps) == 1:
    return total, tuple(numbers)
  total = rounding.wide(total)
  for name in steps[1:]:
    params, number = _restored(model_dir, vocabulary, name, target)
    total = jax.tree.map(jnp.add, total, rounding.wide(params))
    numbers.append(number)

  def mean_of(leaf, like):
    mean = leaf / len(steps)
    return mean.astype(like.dtype)

  return jax.tree.map(mean_of, total, target), tuple(numbers)


def stored_params(
  model: Model,
  model_dir: str | os.PathLike,
  vocabulary: Vocabulary,
  step: str = LATEST,
) -> tuple[Params, tuple[int, ...]]:
  """As `restored_params`, but as `StoredArray`s: of all, as much as the largest is in memory."""
  target = _shapes(model)
  trees = []
  numbers = []
  for name in _steps(step):
    params, number = _restored(model_dir, vocabulary, name, target, lazily=True)
    trees.append(params)
    numbers.append(number)
  means = jax.tree.map(_mean_of_stored, *trees)
  return keeping_last(means), tuple(numbers)


def _shapes(model: Model) -> Params:
  return hk.data_structures.map(lambda _, __, declared: declared.shape, model.parameters())


def _steps(step: str) -> list[str]:
  steps = step.split(',')
  if len({*steps}) < len(steps):
    raise ConfigurationError(f'The steps {step} name one twice. Name different ones.')
  return steps


def _mean_of_stored(*arrays: StoredArray) -> StoredArray:
  """The mean of an array over steps, summed in float32 or wider."""
  first, *others = arrays
  if not others:
    return first

  def read() -> np.ndarray:
    content = np.asarray(first)
    wide = np.promote_types(content.dtype, np.float32)
    total = content.astype(wide)
    for other in others:
      total += np.asarray(other)
    total /= len(arrays)
    return total.astype(first.dtype)

  return StoredArray(first.shape, first.dtype, read)


def _restored(
  model_dir: str | os.PathLike,
  vocabulary: Vocabulary,
  step: str,
  target: Params,
  lazily: bool = False,
) -> tuple[Params, int]:
  with open_to_read(model_dir, step) as directory:
    number = directory.latest_step()
    record = directory.latest_record()
    if record is None or number is None:
      raise ConfigurationError(
        f'{model_dir} contains no checkpoint. Train there first (--gin.train_steps=0 saves the '
        'first weights), or pass the --model_dir of a run.'
      )
    trained_vocabulary = record.get('vocabulary')
    if trained_vocabulary != vocabulary.fingerprint:
      raise ConfigurationError(
        f'{model_dir} was trained with the vocabulary {trained_vocabulary}, but '
        f'{vocabulary.fingerprint} is given: its ids mean other texts, or texts begin with another '
        f'BOS (after a +). Bind the vocabulary that {model_dir}/config.gin names, with the same '
        '"add_bos_token" in the tokenizer_config.json beside it.'
      )
    return directory.restore_evaluated(target, lazily), number
