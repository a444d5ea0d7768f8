"""Any algorithm of optax on parameters that are stacked over layers.

An algorithm may treat all numbers alike (Adam), or act on each parameter as a whole: norms and
trust ratios (LAMB), factored moments (Adafactor), orthogonal directions (Muon). Such an algorithm
must see each layer of a stack by itself. A trial on small arrays tells which kind it is.
"""

from collections.abc import Callable
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from valkyrie.errors import ConfigurationError, converted

Algorithm = Callable[..., optax.GradientTransformation]
# Known to treat all numbers alike; the trial takes a second.
_ALIKE = (optax.adam, optax.adamw, optax.lion, optax.sgd, optax.nadam, optax.nadamw)
_STEPS, _LAYERS = 3, 2
_SAME = 3e-3  # the iterations of Muon amplify rounding; another treatment differs by 0.06 or more


@functools.cache
def acts_on_layers(algorithm: Algorithm) -> bool:
  """Whether an algorithm must see layers one by one; an unusable one is a ConfigurationError."""
  if inspect.unwrap(algorithm) in _ALIKE:
    return False
  if 'schedule_free' in _name(algorithm):
    raise ConfigurationError(
      f'{_name(algorithm)} trains other parameters than those to be evaluated and saved. Use '
      "another algorithm with Optimizer.schedule = 'constant' or 'wsd', which need no end either."
    )
  make = functools.partial(_made, algorithm)
  shapes = {'a': (_LAYERS, 3, 4), 'b': (_LAYERS, 4, 3)}
  random = np.random.default_rng(0)
  params, *gradients = (
    {name: jnp.asarray(random.normal(size=s), jnp.float32) for name, s in shapes.items()}
    for _ in range(1 + _STEPS)
  )
  split = functools.partial(jax.tree.map, lambda x: [*x])
  apart = _after(make(), split(params), [split(g) for g in gradients])
  apart = {name: jnp.stack(layers) for name, layers in apart.items()}
  for layers in (False, True):
    whole = _after(per_layer(make()) if layers else make(), params, gradients)
    differences = {n: jnp.linalg.norm(whole[n] - found) for n, found in apart.items()}
    if all(differences[n] < _SAME * jnp.linalg.norm(found) for n, found in apart.items()):
      return layers
  raise ConfigurationError(
    f'{_name(algorithm)} mixes values across parameters or uses randomness, so it would behave '
    'differently on stacked layers. Use an algorithm that updates each parameter independently.'
  )


def per_layer(algorithm: optax.GradientTransformation) -> optax.GradientTransformation:
  """The algorithm on each layer of parameters [layers, ...], all with the same layers."""
  return optax.GradientTransformation(jax.vmap(algorithm.init), jax.vmap(algorithm.update))


def _made(algorithm: Algorithm) -> optax.GradientTransformation:
  message = f'{_name(algorithm)} cannot be created from only a learning_rate'
  advice = 'Bind its other parameters, or use another algorithm.'
  with converted((TypeError,), ConfigurationError, message, advice):
    return algorithm(learning_rate=1.0)


def _after(
  algorithm: optax.GradientTransformation, params: Any, gradients: list[Any]
) -> dict[str, Any]:
  """The sum of the directions of some steps."""

  @jax.jit
  def steps(params: Any, gradients: list[Any]) -> Any:
    state, total = algorithm.init(params), jax.tree.map(jnp.zeros_like, params)
    for gradient in gradients:
      directions, state = algorithm.update(gradient, state, params)
      total = optax.apply_updates(total, directions)
    return total

  try:
    return steps(params, gradients)
  except (TypeError, ValueError) as error:
    raise ConfigurationError(
      f'The algorithm needs more than gradients and parameters, which is all that a step has '
      f'({str(error).splitlines()[0]}). Use another algorithm.'
    ) from error


def _name(algorithm: Algorithm) -> str:
  return getattr(inspect.unwrap(algorithm), '__name__', repr(algorithm))
