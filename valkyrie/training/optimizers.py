"""Optimizer: any optax algorithm, with a group for the S5 parameters, clipping and a schedule."""

from collections.abc import Callable
import re
from typing import Any

import gin
import jax
import jax.numpy as jnp
import optax

from valkyrie.config.computation import may_change_on_resume
from valkyrie.types import Array, Axes, Params, leaf_path

for _algorithm in (optax.adam, optax.adamw, optax.adafactor, optax.lamb, optax.lion, optax.sgd):
  gin.external_configurable(_algorithm, module='optax')

_PLANNER = 'planner '  # the beginning of the kinds of a planner's parameters


@gin.configurable
@may_change_on_resume('train_steps')  # it stretches the schedule
class Optimizer:
  """Clip by the global norm, direct by an optax algorithm, step by the learning rate."""

  def __init__(
    self,
    learning_rate: float,
    warmup_steps: int,
    train_steps: int,
    algorithm: Callable[..., optax.GradientTransformation] = optax.adamw,
    vector_algorithm: Callable[..., optax.GradientTransformation] = optax.adam,
    ssm_pattern: str = r'/(lambda|lambda_re|lambda_im|log_rate|b|log_step|step_bias)$',
    ssm_learning_rate_scale: float = 0.25,
    final_learning_rate_scale: float = 0.1,
    clip_norm: float = 1.0,
  ):
    """Configures the optimizer.

    Args:
      learning_rate: the peak.
      warmup_steps: steps of linear warm-up.
      train_steps: the step at which the cosine ends.
      algorithm: an optax optimizer that takes `learning_rate`, for matrices.
      vector_algorithm: the same for norm scales, biases and other vectors, which common practice
        does not decay, and for Λ, B and log Δ of S5. The default decays nothing.
      ssm_pattern: a regular expression that matches the paths of the latter, and of the rates and
        steps of other recurrences. The paper gives them no weight decay and a smaller learning rate
        (S5 appendix B.1.3 and table 11).
      ssm_learning_rate_scale: their share of the learning rate.
      final_learning_rate_scale: the share of the peak at which the cosine ends.
      clip_norm: the largest global norm of the gradient that is not scaled down.
    """
    self._ssm_pattern = re.compile(ssm_pattern)
    self._clip_norm = clip_norm
    # With a learning rate of 1 the algorithms return directions; the step scales them, so that the
    # logged number is the learning rate. A planner may start later than the rest, and Adam's bias
    # correction must count its own steps.
    self._groups = {
      f'{owner}{kind}': make(learning_rate=1.0)
      for owner in ('', _PLANNER)
      for kind, make in (('matrix', algorithm), ('vector', vector_algorithm))
    }
    ssm = vector_algorithm(learning_rate=1.0)
    self._groups['ssm'] = optax.chain(ssm, optax.scale(ssm_learning_rate_scale))
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

  def init(self, params: Params, kinds: Any) -> Any:
    """The state before the first step; `kinds` is a pytree like params, see `Model.kinds`."""
    return self._direction(params, kinds).init(params)

  def update(
    self,
    gradients: Params,
    state: Any,
    params: Params,
    learning_rate: Array,
    kinds: Any,
    *,
    plan: bool = True,
  ) -> tuple[Params, Any]:
    """One step: (gradients, state, params) -> (params, state).

    Without `plan`, the planner's parameters and their state stay the same: decay and momentum would
    change them at a gradient of zero, too.
    """
    after: Any
    directions, after = self._direction(params, kinds).update(gradients, state, params)
    updates = jax.tree.map(lambda d: learning_rate * d, directions)
    moved = optax.apply_updates(params, updates)
    kept = {name: of for name, of in state[1].inner_states.items() if name.startswith(_PLANNER)}
    if plan or not kept:
      return moved, after

    def keep(kind, old, new):
      return old if kind.startswith(_PLANNER) else new

    moved = jax.tree.map(keep, kinds, params, moved)
    groups = after[1]._replace(inner_states={**after[1].inner_states, **kept})
    return moved, (after[0], groups)

  def state_axes(self, state: Any, params: Params, axes: Any) -> Any:
    """The logical axes of each leaf of the state: a moment has those of its parameter.

    Args:
      state: the shapes of the optimizer's state.
      params: the shapes of the parameters.
      axes: the logical axes of each parameter, a pytree like params.
    """

    def of_leaf(path, leaf) -> Axes:
      module, name = (getattr(key, 'key', None) for key in (None, None, *path)[-2:])
      parameter = params.get(module, {}).get(name)
      if parameter is not None and parameter.shape == leaf.shape:
        return axes[module][name]
      return (None,) * leaf.ndim  # a count, or a factored moment

    return jax.tree_util.tree_map_with_path(of_leaf, state)

  def _direction(self, params: Params, kinds: Any) -> optax.GradientTransformation:
    """Clipping, then each group's algorithm; a group without parameters has no state."""

    def group(path, _, kind):
      in_ssm = not kind.startswith(_PLANNER) and self._ssm_pattern.search(leaf_path(path))
      return 'ssm' if in_ssm else kind

    labels = jax.tree_util.tree_map_with_path(group, params, kinds)
    groups = {name: self._groups[name] for name in sorted(set(jax.tree.leaves(labels)))}
    return optax.chain(optax.clip_by_global_norm(self._clip_norm), optax.partition(groups, labels))
