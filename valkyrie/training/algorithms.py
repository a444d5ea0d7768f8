"""Any algorithm of optax on parameters that are stacked over layers, at a rate that changes.

An algorithm may treat all numbers the same (Adam), or act on each parameter as a whole: norms and
trust ratios (LAMB), factored moments (Adafactor), orthogonal directions (Muon). Such an algorithm
must see each layer of a stack by itself. The steps of most algorithms are proportional to the
learning rate. Others are not: LARS keeps steps of earlier rates, and MADGRAD sums squares that
contain the rate. A trial on small arrays tells which kind it is.
"""

from collections.abc import Callable
import functools
import inspect
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

from valkyrie.errors import ConfigurationError, converted
from valkyrie.types import Array

Algorithm = Callable[..., optax.GradientTransformation]
Transformation = optax.GradientTransformation


class Nature(NamedTuple):
  """How an algorithm has to be run.

  by_layers: it acts on whole parameters, so it must see the layers of a stack one by one.
  proportional: its steps are the learning rate times what it computes at a rate of 1. Otherwise it
    gets the learning rate of each step.
  """

  by_layers: bool
  proportional: bool


# Known to treat all numbers the same, in proportion to the rate; the trial takes a second.
_PLAIN = (optax.adam, optax.adamw, optax.lion, optax.sgd, optax.nadam, optax.nadamw)
_LAYERS = 2
_SHAPES = {'a': (_LAYERS, 3, 4), 'b': (_LAYERS, 4, 3)}
# Rates of the steps of a trial: so many, and so large, that estimates of a distance grow.
_CHANGING = np.geomspace(2.0, 1e-3, 60)[np.random.default_rng(1).permutation(60)]
_CONSTANT = (1e-6, 0.3)
_SAME = 3e-3  # the iterations of Muon amplify rounding; another treatment differs by 0.06 or more


@functools.cache
def nature(algorithm: Algorithm) -> Nature:
  """How an algorithm has to be run; an unusable one is a ConfigurationError."""
  if inspect.unwrap(algorithm) in _PLAIN:
    return Nature(by_layers=False, proportional=True)
  if 'schedule_free' in _name(algorithm):
    raise ConfigurationError(
      f'{_name(algorithm)} evaluates other parameters than those that it trains, and a run saves '
      'only the latter. Use another algorithm. If the end of the run is open, bind '
      "Optimizer.schedule = 'constant' or 'wsd'."
    )
  trial = _Trial(algorithm)
  proportional = trial.is_proportional()
  return Nature(trial.acts_on_layers(proportional), proportional)


def created(algorithm: Algorithm, learning_rate: Any) -> Transformation:
  """The algorithm at a learning rate: a number, an array, or a schedule if it takes one."""
  message = f'{_name(algorithm)} cannot be created from only a learning_rate'
  advice = 'Bind its other parameters, or use another algorithm.'
  with converted((TypeError,), ConfigurationError, message, advice):
    return algorithm(learning_rate=learning_rate)


def times(algorithm: Transformation, factor: Array) -> Transformation:
  """The algorithm with steps of `factor` times the size, and with the same state."""

  def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    steps, state = algorithm.update(updates, state, params)

    def scaled(step: Array) -> Array:
      return factor * step

    return jax.tree.map(scaled, steps), state

  return optax.GradientTransformation(algorithm.init, update)


def at_rest(algorithm: Transformation) -> Transformation:
  """The algorithm at rest: it takes no step, and its state stays as it is.

  Decay and momentum would move parameters at a gradient of zero, too.
  """

  def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    return jax.tree.map(jnp.zeros_like, updates), state

  return optax.GradientTransformation(algorithm.init, update)


def per_layer(algorithm: Transformation) -> Transformation:
  """The algorithm on each layer of parameters [layers, ...], all with the same layers."""
  return optax.GradientTransformation(jax.vmap(algorithm.init), jax.vmap(algorithm.update))


class _Trial:
  """Some steps of an algorithm on the layers of two stacks, compared with optax used directly."""

  def __init__(self, algorithm: Algorithm):
    self._algorithm = algorithm
    random = np.random.default_rng(0)

    # Decays need parameters that are as large as the steps, and estimates of the distance from the
    # first parameters need small ones, which do not round it away, and gradients that agree.
    self._params = {}
    self._gradients = {}
    for size, (name, shape) in zip((1.0, 1e-3), _SHAPES.items(), strict=True):
      common = random.normal(size=shape)
      noise = random.normal(size=(len(_CHANGING), *shape))
      gradients = common + noise
      params = size * random.normal(size=shape)
      self._params[name] = jnp.asarray(params, jnp.float32)
      self._gradients[name] = jnp.asarray(gradients, jnp.float32)
    try:
      self._rates = jnp.asarray([_CHANGING], jnp.float32)
      self._expected = self._with_a_schedule()
      self._takes_schedules = True
    except Exception:  # whatever an algorithm makes of a function where it expects a number
      constant_rates = [[rate] * len(_CHANGING) for rate in _CONSTANT]
      self._rates = jnp.asarray(constant_rates, jnp.float32)
      self._expected = [self._at_a_constant(rate) for rate in _CONSTANT]
      self._takes_schedules = False

  def is_proportional(self) -> bool:
    """Whether steps are proportional to the rate; a ConfigurationError if no rate can be given."""
    if self._agrees(proportional=True):
      return True
    if self._takes_schedules and self._agrees(proportional=False):
      return False
    raise ConfigurationError(
      f'The steps of {_name(self._algorithm)} are not proportional to its learning_rate, and it '
      'takes no rate that changes from step to step, as a schedule asks for. Use another '
      'algorithm, such as @optax.adamw.'
    )

  def acts_on_layers(self, proportional: bool) -> bool:
    """Whether only layer by layer, not on stacks, it does what it does on separate parameters."""
    for by_layers in (False, True):
      if self._agrees(proportional=proportional, stacked=True, by_layers=by_layers):
        return by_layers
    raise ConfigurationError(
      f'{_name(self._algorithm)} mixes values across parameters or uses randomness, so it would '
      'behave differently on stacked layers. Use an algorithm that updates each parameter '
      'independently.'
    )

  def _with_a_schedule(self) -> list[dict[str, Array]]:
    """What optax does with the changing rates as a schedule, on separate layers."""
    rates = self._rates[0]
    with_schedule = created(self._algorithm, lambda count: rates[count])
    return [self._moved(lambda _: with_schedule, *self._layers(), rates)]

  def _at_a_constant(self, rate: float) -> dict[str, Array]:
    """What optax does with one rate, on separate layers."""
    constant = created(self._algorithm, rate)
    return self._moved(lambda _: constant, *self._layers(), self._rates[0])

  def _agrees(self, *, proportional: bool, stacked: bool = False, by_layers: bool = False) -> bool:
    """Whether the form in which a run would use the algorithm does what optax does."""

    def make(rate: Array) -> Transformation:
      if proportional:
        transformation = times(created(self._algorithm, 1.0), rate)
      else:
        transformation = created(self._algorithm, rate)
      if by_layers:
        return per_layer(transformation)
      return transformation

    arrays = (self._params, self._gradients)
    if not stacked:
      arrays = self._layers()
    for rates, expected in zip(self._rates, self._expected, strict=True):
      moved = self._moved(make, *arrays, rates)
      for name, leaf in expected.items():
        difference = jnp.linalg.norm(moved[name] - leaf)
        allowed = _SAME * jnp.linalg.norm(leaf)
        if not difference < allowed:  # a NaN does not agree
          return False
    return True

  def _layers(self) -> tuple[Any, Any]:
    """The parameters and gradients with every layer as an array of its own."""
    params = {}
    gradients = {}
    for name, stack in self._params.items():
      layers_first = jnp.moveaxis(self._gradients[name], 1, 0)
      params[name] = [*stack]
      gradients[name] = [*layers_first]
    return params, gradients

  def _moved(
    self,
    make: Callable[[Array], Transformation],
    params: Any,
    gradients: Any,
    rates: Array,
  ) -> dict[str, Array]:
    """The sum of some steps by name, as stacks; the leaves of `gradients` have a row for each."""

    @jax.jit
    def moved(params: Any, gradients: Any, rates: Array) -> Any:
      def step(kept, given):
        params, state, total = kept
        gradient, rate = given
        steps, state = make(rate).update(gradient, state, params)
        params = optax.apply_updates(params, steps)
        total = optax.apply_updates(total, steps)
        return (params, state, total), None

      state = make(rates[0]).init(params)
      nothing = jax.tree.map(jnp.zeros_like, params)
      kept = (params, state, nothing)
      (_, _, total), _ = lax.scan(step, kept, (gradients, rates))
      return total

    try:
      total = moved(params, gradients, rates)
    except (TypeError, ValueError) as error:
      reason, *_ = str(error).splitlines()
      raise ConfigurationError(
        f'{_name(self._algorithm)} needs more than gradients and parameters, which is all that a '
        f'step has ({reason}). Use another algorithm.'
      ) from error
    for name, leaf in total.items():
      if isinstance(leaf, list):
        total[name] = jnp.stack(leaf)
    return total


def _name(algorithm: Algorithm) -> str:
  unwrapped = inspect.unwrap(algorithm)
  return getattr(unwrapped, '__name__', repr(algorithm))
