"""Search for the first non-finite number of a refused step, module by module."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp

from valkyrie.errors import Diverged
from valkyrie.training.train_state import TrainState
from valkyrie.training.train_step import StepMetrics
from valkyrie.types import Array, Batch, leaves_by_path

TrainStep = Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]


class _Found(Exception):
  """Ends the search."""


def hunting(step: TrainStep, traceable: TrainStep) -> TrainStep:
  """The compiled `step`, which then waits for every result and raises Diverged after a refused one.

  `step` must not donate its state, which the search reads. `traceable` is the same function, not
  compiled and without remat, to be run operation by operation.
  """

  def step_or_hunt(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
    after, metrics = step(state, batch)
    is_refused = int(metrics.skipped) > int(state.skipped)
    if is_refused and not bool(metrics.spiked):
      place = first_nonfinite(traceable, state, batch)
      raise Diverged(
        f'Step {int(state.step) + 1} has numbers that are not finite. The first: '
        + (place or 'none if it runs operation by operation, so it depends on the compilation.')
      )
    return after, metrics

  return step_or_hunt


def first_nonfinite(traceable: TrainStep, state: TrainState, batch: Batch) -> str | None:
  """The place of a step's first NaN or infinity, in the order of computation; None without any.

  Checks the inputs, then the output of each Haiku module, and its gradient in the backward pass.
  """
  places = []
  for kind, tree in (('parameter', state.params), ('carry', state.carry)):
    for path, leaf in leaves_by_path(tree).items():
      problem = _problem(leaf)
      if problem:
        places.append(f'{kind} {path}{problem}')
  if places:
    return f'{", ".join(places)}, before the step.'
  calls: Counter[str] = Counter()

  def check_output(next_method: Callable, args: Any, kwargs: Any, context: hk.MethodContext) -> Any:
    output = next_method(*args, **kwargs)
    if context.method_name != '__call__':
      return output
    name = context.module.module_name.replace('~/', '')
    calls[name] += 1
    watch = _watch(f'{name}, in call {calls[name]} of the step')
    return jax.tree.map(lambda x: watch(x) if _is_float(x) else x, output)

  try:
    with hk.intercept_methods(check_output), jax.disable_jit():
      traceable(state, batch)
  except _Found as found:
    return str(found)
  return None


def _watch(place: str) -> Callable[[Array], Array]:
  """The identity, which ends the search at a non-finite value or cotangent."""

  def check(x: Array, kind: str) -> Array:
    problem = _problem(x)
    if problem:
      raise _Found(f'{kind} {place}{problem}.')
    return x

  @jax.custom_vjp
  def watch(x):
    return check(x, 'the output of')

  watch.defvjp(
    lambda x: (check(x, 'the output of'), None),
    lambda _, gradient: (check(gradient, 'the gradient of the output of'),),
  )
  return watch


def _is_float(x: Any) -> bool:
  return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)


def _problem(x: Array) -> str:
  """' (2 of 64 are NaN, 1 infinite)'; '' if all numbers are finite."""
  if not _is_float(x):
    return ''
  nan = int(jnp.isnan(x).sum())
  infinite = int(jnp.isinf(x).sum())
  if nan + infinite == 0:
    return ''
  return f' ({nan:,} of {x.size:,} are NaN, {infinite:,} infinite)'
