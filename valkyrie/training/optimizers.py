"""Any optax algorithm, with a group of its own for the S5 parameters, clipping and a schedule."""

from collections.abc import Callable, Sequence
import re
from typing import Any

import gin
import jax
import jax.numpy as jnp
import optax

from valkyrie.config.computation import may_change_on_resume
from valkyrie.sharding.partitioner import path_of
from valkyrie.types import Array, Params

for _algorithm in (optax.adam, optax.adamw, optax.adafactor, optax.lamb, optax.lion, optax.sgd):
  gin.external_configurable(_algorithm, module='optax')


@may_change_on_resume('train_steps')  # the end of the learning rate's schedule
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
    self._ssm_pattern = re.compile(ssm_pattern)
    self._clip_norm = clip_norm
    # A learning rate of 1 makes the algorithms give directions; the step scales them, so that one
    # number, the one that is logged, is the learning rate. A planner may begin to learn later than
    # the rest, and what corrects for few steps must count its own.
    self._groups = {
      'rest': algorithm(learning_rate=1.0),
      'planner': algorithm(learning_rate=1.0),
      'ssm': optax.chain(ssm_algorithm(learning_rate=1.0), optax.scale(ssm_learning_rate_scale)),
    }
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
    return self._direction(params).init(params)

  def update(
    self,
    gradients: Params,
    state: Any,
    params: Params,
    learning_rate: Array,
    *,
    plan: bool = True,
  ) -> tuple[Params, Any]:
    """One step: (gradients, state, params) -> (params, state).

    Without `plan`, whatever belongs to a planner is passed through: decay and momentum would move
    it where its gradient is zero, too.
    """
    directions, after = self._direction(params).update(gradients, state, params)
    updates = jax.tree.map(lambda d: learning_rate * d, directions)
    moved = optax.apply_updates(params, updates), after
    if plan:
      return moved
    return jax.tree_util.tree_map_with_path(
      lambda path, new, old: old if _of_planner(path) else new, moved, (params, state)
    )

  def _direction(self, params: Params) -> optax.GradientTransformation:
    """Clipping, then each group's algorithm; a group without parameters has no state."""

    def group(path, _):
      if _of_planner(path):
        return 'planner'
      return 'ssm' if self._ssm_pattern.search(path_of(path)) else 'rest'

    labels = jax.tree_util.tree_map_with_path(group, params)
    groups = {name: self._groups[name] for name in sorted(set(jax.tree.leaves(labels)))}
    return optax.chain(optax.clip_by_global_norm(self._clip_norm), optax.partition(groups, labels))


def _of_planner(path: Sequence[Any]) -> bool:
  """Whether a leaf of the parameters, or of their optimizer's state, belongs to a planner."""
  return '/planner/' in path_of(path)
