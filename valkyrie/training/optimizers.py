"""Any optax algorithm, with a group of its own for the S5 parameters, clipping and a schedule."""

from collections.abc import Callable
import re
from typing import Any

import gin
import jax
import jax.numpy as jnp
import optax

from valkyrie.partitioning import path_of
from valkyrie.types import Array, Params

for _algorithm in (optax.adam, optax.adamw, optax.adafactor, optax.lamb, optax.lion, optax.sgd):
  gin.external_configurable(_algorithm, module='optax')


@gin.configurable
class Optimizer:
  """Clip by the global norm, direct by an optax algorithm, step by the learning rate."""

  def __init__(
    self,
    learning_rate: float,
    warmup_steps: int,
    train_steps: int,
    algorithm: Callable[..., optax.GradientTransformation] = optax.adamw,
    ssm_algorithm: Callable[..., optax.GradientTransformation] = optax.adam,
    ssm_pattern: str = r'/(lambda_re|lambda_im|b|log_step)$',
    ssm_learning_rate_scale: float = 0.25,
    final_learning_rate_scale: float = 0.1,
    clip_norm: float = 1.0,
  ):
    """Configures the optimizer.

    Args:
      learning_rate: the peak.
      warmup_steps: steps of linear warm-up.
      train_steps: the step at which the cosine ends.
      algorithm: an optax optimizer that takes `learning_rate`.
      ssm_algorithm: the same for Λ, B and log Δ of S5; the paper gives them no weight decay and a
        smaller learning rate (S5 appendix B.1.3 and table 11), so the default decays nothing.
      ssm_pattern: a regular expression that finds those parameters by their paths.
      ssm_learning_rate_scale: their share of the learning rate.
      final_learning_rate_scale: the share of the peak at which the cosine ends.
      clip_norm: the largest global norm of the gradient that passes whole.
    """
    pattern = re.compile(ssm_pattern)

    def group(params):
      return jax.tree_util.tree_map_with_path(
        lambda path, _: 'ssm' if pattern.search(path_of(path)) else 'rest', params
      )

    # A learning rate of 1 makes the algorithms give directions; the step scales them, so that one
    # number, the one that is logged, is the learning rate.
    self._direction = optax.chain(
      optax.clip_by_global_norm(clip_norm),
      optax.partition(
        {
          'rest': algorithm(learning_rate=1.0),
          'ssm': optax.chain(
            ssm_algorithm(learning_rate=1.0), optax.scale(ssm_learning_rate_scale)
          ),
        },
        group,
      ),
    )
    self._schedule = optax.warmup_cosine_decay_schedule(
      init_value=learning_rate / max(warmup_steps, 1),
      peak_value=learning_rate,
      warmup_steps=warmup_steps,
      decay_steps=max(train_steps, warmup_steps + 1),
      end_value=learning_rate * final_learning_rate_scale,
    )

  def learning_rate(self, step: Array) -> Array:
    """The schedule's learning rate at a step, counted from 0."""
    return jnp.asarray(self._schedule(step), jnp.float32)

  def init(self, params: Params) -> Any:
    """The state before the first step."""
    return self._direction.init(params)

  def update(
    self, gradients: Params, state: Any, params: Params, learning_rate: Array
  ) -> tuple[Params, Any]:
    """One step: (gradients, state, params) -> (params, state)."""
    directions, state = self._direction.update(gradients, state, params)
    updates = jax.tree.map(lambda d: learning_rate * d, directions)
    return optax.apply_updates(params, updates), state
