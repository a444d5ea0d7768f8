"""Learning-rate schedules: a warm-up, and then one of several shapes, as a share of the peak."""

import jax
import jax.numpy as jnp
import optax

from valkyrie.errors import ConfigurationError, check_count

Schedule = optax.Schedule


def schedule(
  shape: str | Schedule,
  *,
  warmup_steps: int,
  train_steps: int,
  final: float,
  cooldown: float,
) -> Schedule:
  """The share of the peak at a step, counted from 0.

  The warm-up is linear, from 1 / warmup_steps to 1. Then follows

    constant       1
    linear         to `final` at train_steps
    cosine         to `final` at train_steps (Loshchilov & Hutter 2017)
    inverse_sqrt   sqrt(warmup_steps / step) (Vaswani et al. 2017)
    wsd            1, then linear to `final` over the last share `cooldown` of train_steps (warm-up,
                   stable, decay: Hu et al. 2024, MiniCPM)

  or a function, such as one of optax, of the steps since the end of the warm-up.

  Raises:
    ConfigurationError: the name is unknown, `cooldown` is not a share, or the steps are too many.
  """
  check_count('Optimizer.warmup_steps', warmup_steps)
  check_count('Optimizer.train_steps', train_steps)
  if shape == 'wsd' and not 0 < cooldown <= 1:
    raise ConfigurationError(
      f'Optimizer.cooldown={cooldown} must be above 0 and at most 1: the share of train_steps at '
      'the end in which the learning rate decays.'
    )
  decay_steps = max(train_steps - warmup_steps, 1)
  begin = max(warmup_steps, 1)
  last = min(max(round(cooldown * train_steps), 1), decay_steps)
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


def _checked(after: Schedule) -> Schedule:
  """The function, if it returns a number for a step."""
  name = getattr(after, '__name__', type(after).__name__)
  try:
    share = jax.eval_shape(after, jax.ShapeDtypeStruct((), jnp.int32))
    fits = share.shape == ()
  except (TypeError, AttributeError, ValueError, OverflowError) as error:
    raise ConfigurationError(
      f'Optimizer.schedule={name} did not return a number for a step ({error}). A reference to a '
      f'function that creates a schedule needs parentheses: @{name}().'
    ) from error
  if not fits:
    raise ConfigurationError(
      f'Optimizer.schedule={name} returned an array of shape {share.shape} for a step, but a '
      'number was expected: the share of the peak.'
    )
  return after
