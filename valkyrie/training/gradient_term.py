"""Terms that compute the gradient of a step themselves, for example from several passes.

Without one, `train_step` reads the tokens of a step once.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from valkyrie.errors import ConfigurationError
from valkyrie.models.model import Model
from valkyrie.training.objective import Sums, Term, Terms
from valkyrie.training.tbptt import Learns
from valkyrie.types import Array, Batch, Carry, Params


class OnePass(Protocol):
  """Reads the tokens of a step once, over all devices."""

  def __call__(
    self,
    terms: Terms,
    arrays: Mapping[str, Mapping[str, Array]],
    learns: Learns,
  ) -> tuple[Params, Carry, Sums]:
    """Returns (the gradient of what learns, float32, the carry after the step, the sums).

    Args:
      terms: whose loss it is.
      arrays: {module: {name: array}}, which stand beside the parameters, whole on every device.
      learns: the parameters and arrays that get a gradient.
    """
    ...


class StepGradient(NamedTuple):
  """The gradient of a step, and what came with it.

  gradient: the gradient of the parameters that learn, float32.
  carry: the carry after the step.
  sums: sums over the tokens of the step.
  state: what the term keeps, as before the step if that was None.
  """

  gradient: Params
  carry: Carry
  sums: Sums
  state: Any


class GradientTerm(Term):
  """A term that computes the gradient of a step. An objective has at most one."""

  def initial_state(self, model: Model, rows: int, tokens: int) -> Any:
    """What the term keeps from step to step besides parameters and carries: a pytree, or None.

    `tokens` is the largest number that a step reads of a row.
    """
    raise NotImplementedError

  def step_gradient(
    self,
    one_pass: OnePass,
    model: Model,
    terms: Terms,
    learns: Learns,
    params: Params,
    state: Any,
    step: Array,
    batch: Batch,
  ) -> StepGradient:
    """The gradient of all terms of the objective.

    Args:
      one_pass: reads the tokens once.
      model: the run's model, with the parameters of all terms.
      terms: the terms of the objective, this one included.
      learns: the parameters that learn.
      params: float32 or narrower, as stored.
      state: what this term keeps.
      step: int32, the number of the step.
      batch: its tokens, [B, N·C].
    """
    raise NotImplementedError


def gradient_term(terms: Terms) -> GradientTerm | None:
  """The term that computes the gradient; None if `train_step` does.

  Raises a ConfigurationError if several would.
  """
  found = [term for term in terms if isinstance(term, GradientTerm)]
  if len(found) > 1:
    names = ', '.join(term.name for term in found)
    raise ConfigurationError(
      f'StepSettings.objective has several terms that compute the gradient of a step: '
      f'{names}. Keep one, and remove the others.'
    )
  return found[0] if found else None
