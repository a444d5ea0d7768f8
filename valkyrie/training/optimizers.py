"""Optimizer: algorithms of optax by group of parameters, clipping and a schedule.

An algorithm whose steps are proportional to the learning rate is created with a rate of 1, and its
steps are multiplied by the rate; another one is created with the rate, see `algorithms.Nature`.
"""

from collections.abc import Sequence
import copy
import dataclasses
import functools
import re
from typing import Any

import gin
import jax
import jax.numpy as jnp
import optax

from valkyrie.config.computation import may_change_on_resume
from valkyrie.config.patterns import check_all_choose
from valkyrie.config.ranges import (
  Fraction,
  Limit,
  NonNegativeFloat,
  NonNegativeInt,
  check_fields,
  checked,
)
from valkyrie.errors import ConfigurationError, converted, regular_expression
from valkyrie.training.algorithms import Algorithm, at_rest, created, nature, per_layer, times
from valkyrie.types import Array, Axes, Params, leaf_path, leaves_by_path


@gin.configurable
@dataclasses.dataclass(frozen=True)
class Group:
  """Parameters that learn in their own way.

  Attributes:
    pattern: a regular expression that is found in their paths, as in model_info.txt. A parameter
      belongs to the first group that it matches.
    learning_rate_scale: a factor on the learning rate; 0 freezes them, and they have no moments.
    decay: False takes the optimizer's algorithm for vectors, which decays nothing, for the group.
    algorithm: one of their own.
    may_be_empty: whether a model without such parameters is accepted.
    clip_norm: the largest norm of the gradient of the group's parameters of one kind, which are
      then left out of the optimizer's clipping; None clips them with all others.
  """

  pattern: str
  learning_rate_scale: NonNegativeFloat = 1.0
  decay: bool = True
  algorithm: Algorithm | None = None
  may_be_empty: bool = False
  clip_norm: Limit | None = None

  def __post_init__(self):
    regular_expression('Group.pattern', self.pattern)
    check_fields(self)
    if self.algorithm is not None:
      nature(self.algorithm)  # refuses some; `Optimizer._of_leaf` uses the answer


@gin.configurable
def recurrence_group(
  pattern: str = r'/(lambda|lambda_re|lambda_im|log_rate|b|log_step|step_bias)$',
  learning_rate_scale: NonNegativeFloat = 0.25,
) -> Group:
  """Λ, B and log Δ of S5, and the rates and steps of other recurrences.

  The paper gives them no weight decay and a smaller learning rate (S5, appendix B.1.3, table 11).
  """
  return Group(pattern, learning_rate_scale, decay=False, may_be_empty=True)


@gin.configurable
@may_change_on_resume('train_steps')  # it stretches the schedule
class Optimizer:
  """Clip by the global norm, direct by algorithms of optax, step by the learning rate."""

  @checked
  def __init__(
    self,
    learning_rate: NonNegativeFloat,
    warmup_steps: NonNegativeInt,
    train_steps: NonNegativeInt,
    algorithm: Algorithm = optax.adamw,
    vector_algorithm: Algorithm = optax.adam,
    groups: Sequence[Group] | None = None,
    schedule: str | optax.Schedule = 'cosine',
    final_learning_rate_scale: NonNegativeFloat = 0.1,
    cooldown: Fraction = 0.2,
    clip_norm: Limit = 1.0,
  ):
    """Constructs the algorithms and the schedule.

    A ConfigurationError is raised if an algorithm needs more than gradients and parameters, or if a
    number is out of its range.

    Args:
      learning_rate: the peak.
      warmup_steps: steps of linear warm-up.
      train_steps: the step at which the schedule ends.
      algorithm: an optimizer of optax that takes `learning_rate`, for matrices. It may act on whole
        parameters, as Muon does: every matrix of every layer is one.
      vector_algorithm: the same for norm scales, biases and other vectors; the default decays
        nothing.
      groups: parameters that learn in their own way; None takes `recurrence_group`.
      schedule: the shape after the warm-up, see `schedule_of`.
      final_learning_rate_scale: the share of the peak at which it ends.
      cooldown: the share of the steps in which 'wsd' decays.
      clip_norm: the largest global norm of the gradient that is not scaled down.
    """
    if groups is None:
      groups = (recurrence_group(),)
    self._groups_of_terms: tuple[Group, ...] = ()
    self._own_groups = tuple(groups)
    self._clip_norm = clip_norm
    self.train_steps = train_steps
    self._algorithms = {True: algorithm, False: vector_algorithm}
    for one in self._algorithms.values():
      nature(one)
    self._peak = learning_rate
    self._schedule_until = functools.partial(
      schedule_of,
      schedule,
      warmup_steps=warmup_steps,
      final=final_learning_rate_scale,
      cooldown=cooldown,
    )
    self._schedule = self._schedule_until(train_steps=train_steps)

  def preceded_by(self, groups: Sequence[Group]) -> 'Optimizer':
    """This optimizer, with groups of terms before its own."""
    other = copy.copy(self)
    other._groups_of_terms = (*groups, *self._groups_of_terms)
    return other

  @property
  def _groups(self) -> tuple[Group, ...]:
    return (*self._groups_of_terms, *self._own_groups)

  def ending_at(self, train_steps: int) -> 'Optimizer':
    """This optimizer, with a schedule that ends at another step."""
    other = copy.copy(self)
    other.train_steps = train_steps
    other._schedule = self._schedule_until(train_steps=train_steps)
    return other

  def learning_rate(self, step: Array) -> Array:
    """The schedule's learning rate at a step, counted from 0."""
    rate = self._peak * self._schedule(step)
    return jnp.asarray(rate, jnp.float32)

  def init(self, params: Params, kinds: Any) -> Any:
    """The state before the first step; `kinds` is a pytree like params, see `Model.kinds`.

    A group without parameters raises a ConfigurationError.
    """
    self._check_groups([*leaves_by_path(params)])
    first = self.learning_rate(jnp.zeros((), jnp.int32))
    transformation = self._steps(params, kinds, first)
    return transformation.init(params)

  def _check_groups(self, paths: Sequence[str]) -> None:
    """Raises a ConfigurationError for a group to which no parameter belongs."""
    kind = 'paths in model_info.txt'
    each_of_terms = [(group,) for group in self._groups_of_terms]  # two terms may freeze the same
    for groups in (*each_of_terms, self._own_groups):
      patterns = [group.pattern for group in groups]
      optional = [group.pattern for group in groups if group.may_be_empty]
      check_all_choose('Group.pattern', patterns, paths, kind, optional)

  def update(
    self,
    gradients: Params,
    state: Any,
    params: Params,
    learning_rate: Array,
    kinds: Any,
  ) -> tuple[Params, Any]:
    """One step: (gradients, state, params) -> (params, state)."""
    transformation = self._steps(params, kinds, learning_rate)
    steps, after = transformation.update(gradients, state, params)
    return optax.apply_updates(params, steps), after

  def learns(self, path: str) -> bool:
    """Whether a parameter belongs to a group that learns."""
    _, group = self._group(path)
    return group.learning_rate_scale > 0

  def _group(self, path: str) -> tuple[int | None, Group]:
    """The number of the first group that a path matches, and the group."""
    for number, group in enumerate(self._groups):
      if re.search(group.pattern, path):
        return number, group
    return None, Group('')

  def state_axes(self, state: Any, params: Params, axes: Any) -> Any:
    """The logical axes of each leaf of the state: a moment has the axes of its parameter.

    The arguments are the shapes of the state and of the parameters, and the parameters' axes.
    """

    def of_leaf(path, leaf) -> Axes:
      keys = [getattr(key, 'key', None) for key in path]
      module, name = [None, None, *keys][-2:]
      group = params.get(module, {})
      parameter = group.get(name)
      if parameter is not None and parameter.shape == leaf.shape:
        return axes[module][name]
      return (None,) * leaf.ndim  # a count, or a factored moment

    return jax.tree_util.tree_map_with_path(of_leaf, state)

  def _steps(
    self,
    params: Params,
    kinds: Any,
    learning_rate: Array,
  ) -> optax.GradientTransformation:
    """Clipping, then each group's algorithm; a group without parameters has no state."""
    algorithms: dict[str, optax.GradientTransformation] = {}

    def label(path, leaf, kind):
      name, transformation = self._of_leaf(leaf_path(path), leaf, kind, learning_rate)
      if kind.rests:
        transformation = at_rest(transformation)
      algorithms[name] = transformation
      return name

    labels = jax.tree_util.tree_map_with_path(label, params, kinds)
    clip = optax.clip_by_global_norm(self._clip_norm)
    if any(group.clip_norm is not None for group in self._groups):

      def clips_with_all(path, _):
        _, group = self._group(leaf_path(path))
        return group.clip_norm is None

      with_all = jax.tree_util.tree_map_with_path(clips_with_all, params)
      clip = optax.masked(clip, with_all)
    step = optax.partition(dict(sorted(algorithms.items())), labels)
    return optax.chain(clip, step)

  def _of_leaf(
    self,
    path: str,
    leaf: Any,
    kind: Any,
    learning_rate: Array,
  ) -> tuple[str, optax.GradientTransformation]:
    """The name of a parameter's group, and its algorithm at a learning rate."""
    number, group = self._group(path)
    decays = kind.is_matrix and group.decay
    name = 'vector'
    if decays:
      name = 'matrix'
    if number is not None:
      name = f'{name} of group {number}'
    # A part that may rest has groups of its own: Adam's bias correction counts its own steps.
    if kind.part:
      name = f'{kind.part} {name}'
    if not group.learning_rate_scale:
      return f'{name}, frozen', optax.set_to_zero()
    algorithm = group.algorithm or self._algorithms[decays]
    by_layers, proportional = nature(algorithm)
    rate = 1.0
    if not proportional:
      rate = group.learning_rate_scale * learning_rate
    transformation = created(algorithm, rate)
    # An algorithm that acts on whole parameters gets each matrix of a stack, its last two
    # dimensions: a layer, a part of S5's C, a block of a gate. Stacks of equal sizes form a group.
    if by_layers:
      stack = leaf.shape[: kind.stacked]
      if kind.is_matrix:
        stack = leaf.shape[:-2]
      for _ in stack:
        transformation = per_layer(transformation)
      name += ''.join(f', {count} of a stack' for count in stack)
    if group.clip_norm is not None:
      clip = optax.clip_by_global_norm(group.clip_norm)
      transformation = optax.chain(clip, transformation)
    if not proportional:
      return name, transformation
    if group.learning_rate_scale != 1:
      scale = optax.scale(group.learning_rate_scale)
      transformation = optax.chain(transformation, scale)
    return name, times(transformation, learning_rate)


def schedule_of(
  shape: str | optax.Schedule,
  *,
  warmup_steps: int,
  train_steps: int,
  final: float,
  cooldown: float,
) -> optax.Schedule:
  """The share of the peak at a step, counted from 0.

  The warm-up is linear, from 1 / warmup_steps to 1. Then follows

    constant       1
    linear         to `final` at train_steps
    cosine         to `final` at train_steps (Loshchilov & Hutter 2017)
    inverse_sqrt   sqrt(warmup_steps / step) (Vaswani et al. 2017)
    wsd            1, then linear to `final` over the last share `cooldown` of train_steps (warm-up,
                   stable, decay: Hu et al. 2024, MiniCPM)

  or a function, such as one of optax, of the steps since the end of the warm-up.
  """
  if shape == 'wsd' and not 0 < cooldown <= 1:
    raise ConfigurationError(
      f'Optimizer.cooldown={cooldown} must be above 0 and at most 1: the share of train_steps at '
      'the end in which the learning rate decays.'
    )
  decay_steps = max(train_steps - warmup_steps, 1)
  begin = max(warmup_steps, 1)
  cooldown_steps = max(round(cooldown * train_steps), 1)
  last = min(cooldown_steps, decay_steps)
  shapes = {
    'constant': optax.constant_schedule(1.0),
    'linear': optax.linear_schedule(1.0, final, decay_steps),
    'cosine': optax.cosine_decay_schedule(1.0, decay_steps, final),
    'inverse_sqrt': lambda step: jnp.sqrt(begin / (begin + step)),
    'wsd': optax.linear_schedule(1.0, final, last, decay_steps - last),
  }
  if not callable(shape) and shape not in shapes:
    raise ConfigurationError(
      f'Optimizer.schedule={shape!r} is unknown. Use one of {", ".join(shapes)}, or a reference to '
      'a schedule of optax, such as @optax.polynomial_schedule().'
    )
  after = _checked(shape) if callable(shape) else shapes[shape]
  if not warmup_steps:
    return after
  rising = optax.linear_schedule(1 / warmup_steps, 1.0, warmup_steps)
  return optax.join_schedules([rising, after], [warmup_steps])


def _checked(after: optax.Schedule) -> optax.Schedule:
  """The function, if it returns a number for a step."""
  name = getattr(after, '__name__', type(after).__name__)
  message = f'Optimizer.schedule={name} did not return a number for a step'
  advice = f'A reference to a function that creates a schedule needs parentheses: @{name}().'
  kinds = TypeError, AttributeError, ValueError, OverflowError
  with converted(kinds, ConfigurationError, message, advice):
    share = jax.eval_shape(after, jax.ShapeDtypeStruct((), jnp.int32))
    fits = share.shape == ()
  if not fits:
    raise ConfigurationError(
      f'Optimizer.schedule={name} returned an array of shape {share.shape} for a step, but a '
      'number was expected: the share of the peak.'
    )
  return after
