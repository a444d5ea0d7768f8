"""How well a model predicts a split: the same chunks and carries as in training, no gradient."""

from collections.abc import Callable
from typing import Any

import gin
import jax

from valkyrie.checkpoints import Checkpoints
from valkyrie.data.feed import TaskFeed, prefetch
from valkyrie.errors import ConfigurationError
from valkyrie.models import language_model
from valkyrie.models.language_model import LanguageModel, Model
from valkyrie.monitoring.metrics import Metrics, text_metrics
from valkyrie.monitoring.progress import describe
from valkyrie.monitoring.writers import create_writers
from valkyrie.partitioning import Partitioner
from valkyrie.training.tbptt import chunk_sums
from valkyrie.types import Params


@gin.configurable
class Evaluator:
  """Reads a split from its start, in rows and chunks of its own."""

  def __init__(
    self,
    model: Model,
    partitioner: Partitioner,
    feed: Callable[[], TaskFeed],
    batch_size: int,
    chunk_size: int,
    chunks: int | None = None,
  ):
    """Opens the split.

    Args:
      model: the pure functions of the model.
      partitioner: the devices.
      feed: makes the split's feed, which ends (`epochs=1`).
      batch_size: rows that the split is dealt to.
      chunk_size: tokens of one forward call.
      chunks: how many chunks of each row a quick evaluation reads; None reads all.
    """
    self._feed = feed()
    self._chunk_size = chunk_size
    self._whole = -(-self._feed.row_tokens // chunk_size)
    self._quick = min(chunks or self._whole, self._whole)
    self._partitioner = partitioner
    partitioner.check_batch(batch_size)

    def initial_carry():
      return model.initial_carry(batch_size)

    def read(params, carry, chunk):
      return chunk_sums(model, params, carry, chunk)

    layout = partitioner.state_shardings({'carry': jax.eval_shape(initial_carry)})['carry']
    self._initial_carry = partitioner.partition(initial_carry, out_shardings=layout)
    self._read = partitioner.partition(read, donate_argnums=1, out_shardings=(None, layout))

  def __call__(self, params: Params, *, whole: bool) -> Metrics:
    """loss, bits_per_token and bits_per_byte over the whole split, or over its quick part."""
    chunks = self._whole if whole else self._quick
    spans = ((n * self._chunk_size, self._chunk_size) for n in range(chunks))
    carry, sums = self._initial_carry(), []
    for chunk in prefetch(self._feed, spans):
      of_chunk, carry = self._read(params, carry, self._partitioner.place_batch(chunk))
      sums.append(of_chunk)
    loss, weight = (
      sum(float(value) for value in column)
      for column in zip(*((s.loss, s.weight) for s in jax.device_get(sums)), strict=True)
    )
    return text_metrics(loss, weight, self._feed.tokens_per_byte)


def restored_params(
  model: Model, partitioner: Partitioner, checkpoints: Checkpoints, model_dir: str
) -> tuple[Params, int]:
  """The parameters of a run's newest checkpoint, and its step.

  Raises:
    ConfigurationError: where the run has no checkpoint, or it is of another model.
  """
  abstract, _ = jax.eval_shape(lambda: model.init(jax.random.key(0), 1))
  target: dict[str, Any] = {'params': abstract}
  target = jax.tree.map(
    lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
    target,
    partitioner.state_shardings(target),
  )
  with checkpoints.open(model_dir, read_only=True) as saved:
    step = saved.latest_step()
    restored = saved.restore(target, partial=True)
  if restored is None or step is None:
    raise ConfigurationError(
      f'{model_dir} holds no checkpoint. Train there first, or name the --model_dir of a run.'
    )
  return restored[0]['params'], step


@gin.configurable
def evaluate(
  model_dir: str,
  *,
  model: Callable[..., LanguageModel],
  partitioner: Callable[[], Partitioner],
  evaluator: Callable[..., Evaluator],
  checkpoints: Checkpoints,
) -> None:
  """Evaluates a run's newest checkpoint on the whole validation split, and writes and prints it."""
  functions, layout = language_model.transform(model), partitioner()
  params, step = restored_params(functions, layout, checkpoints, model_dir)
  metrics = evaluator(functions, layout)(params, whole=True)
  with create_writers(model_dir, name='eval') as writer:
    writer.write_scalars(step, metrics)
  print(f'step {step}, validation: ' + ', '.join(describe(metrics)))
