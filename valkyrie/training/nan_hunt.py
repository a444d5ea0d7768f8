"""Where the first number that is not finite appears: a refused step again, module by module."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp

from valkyrie.errors import Diverged
from valkyrie.sharding.partitioner import path_of
from valkyrie.training.train_step import StepMetrics, TrainState
from valkyrie.types import Array, Batch

TrainStep = Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]


class _Found(Exception):
  """Ends the search."""


def hunting(step: TrainStep, traceable: TrainStep) -> TrainStep:
  """`step`, but where it refuses an update, the search begins.

  Args:
    step: compiled; must not donate the state, which the search starts from.
    traceable: the same function, neither compiled nor with any remat in it, so that it can be run
      operation by operation.

  Returns:
    The step. It waits for every result, and raises Diverged where one is refused.
  """

  def step_or_hunt(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
    after, metrics = step(state, batch)
    if int(metrics.skipped) > int(state.skipped) and not bool(metrics.spiked):
      place = first_nonfinite(traceable, state, batch)
      raise Diverged(
        f'Step {int(state.step) + 1} gave numbers that are not finite. The first: '
        + (place or 'none when it is run operation by operation, so it depends on how it compiles.')
      )
    return after, metrics

  return step_or_hunt


def first_nonfinite(traceable: TrainStep, state: TrainState, batch: Batch) -> str | None:
  """Says where a step's first NaN or infinity is, in the order of computation; None for nowhere.

  What goes in is looked at first. Then the step runs without being compiled, and the output of each
  Haiku module is looked at when it is there, and its gradient in the backward pass.
  """
  for path, leaf in jax.tree_util.tree_leaves_with_path((state.params, state.carry)):
    if not _is_finite(leaf):
      kind = 'parameter' if path[0].idx == 0 else 'carried memory'
      return f'{kind} {path_of(path[1:])}, before the step.'
  calls: Counter[str] = Counter()

  def look(next_method: Callable, args: Any, kwargs: Any, context: hk.MethodContext) -> Any:
    output = next_method(*args, **kwargs)
    if context.method_name != '__call__':
      return output
    name = context.module.module_name.replace('~/', '')
    calls[name] += 1
    watch = _watch(f'{name}, in its call number {calls[name]} of the step.')
    return jax.tree.map(lambda x: watch(x) if _is_float(x) else x, output)

  try:
    with hk.intercept_methods(look), jax.disable_jit():
      traceable(state, batch)
  except _Found as found:
    return str(found)
  return None


def _watch(place: str) -> Callable[[Array], Array]:
  """The identity, which ends the search at a value or at a cotangent that is not finite."""

  def look(x: Array, what: str) -> Array:
    if not _is_finite(x):
      raise _Found(f'{what} {place}')
    return x

  @jax.custom_vjp
  def watch(x):
    return look(x, 'the output of')

  watch.defvjp(
    lambda x: (look(x, 'the output of'), None),
    lambda _, gradient: (look(gradient, 'the gradient of the output of'),),
  )
  return watch


def _is_float(x: Any) -> bool:
  return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)


def _is_finite(x: Array) -> bool:
  return not _is_float(x) or bool(jnp.all(jnp.isfinite(x)))
