"""The state before the first step: initialized, or with the weights of another run."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from valkyrie.run.evaluator import Evaluator
from valkyrie.training.setup import Setup
from valkyrie.training.train_step import TrainState
from valkyrie.weights.initial import InitialWeights, check_loss


class InitialState:
  """Makes the state; a call reads the weights again."""

  def __init__(self, setup: Setup, vocabulary: str, source: str | None, say: Callable[[str], None]):
    """Takes the parts of the run, the fingerprint of its vocabulary, and the weights' source."""
    self._setup, self._vocabulary, self._say = setup, vocabulary, say
    self._weights = None if source is None else InitialWeights(source)
    self._complete: bool | None = None  # whether all weights were loaded; None if none were

  def check_source(self) -> None:
    """Raises a ConfigurationError if weights are to be loaded that are not there."""
    if self._weights is not None:
      self._weights.check_source()

  def __call__(self) -> TrainState:
    """The state on the mesh; raises as `InitialWeights.load` does."""
    state = self._setup.initial_state()
    if self._weights is None:
      return state
    params, self._complete = self._weights.load(
      self._setup.model, self._setup.settings.model, state.params, self._vocabulary, self._say
    )
    average = None if state.average is None else jax.tree.map(jnp.copy, params)
    return state._replace(params=params, average=average)

  def check(self, evaluate: Evaluator, state: TrainState, stop: Callable[[], bool]) -> None:
    """Evaluates loaded weights once, and says their loss; raises as `check_loss` does."""
    if self._weights is None or self._complete is None:
      return
    plan = self._setup.curriculum.phase(0).planner
    loss = evaluate(state.evaluated, whole=False, plan=plan, stop=stop)['loss']
    if loss is not None:
      strict = self._complete and not self._weights.any_loss
      self._say(check_loss(loss, self._setup.model.about.vocabulary_size, strict))
