"""The ranges of numbers, by the names of parameters, which mean the same everywhere.

`load_gin` checks all bindings before anything is built. Functions called from Python check their
own arguments.
"""

import dataclasses
import inspect
import numbers
from typing import Any

from valkyrie.errors import ConfigurationError

# Mathematical intervals: a round bracket leaves its bound out. Each of several numbers lies in it.
_INTERVALS = {
  '[1, 2147483647]': (
    'batch_size chunk_size chunks backprop_chunks micro_batches long_every long_backprop_chunks '
    'train_steps last_step steps epochs patience profile_steps samples lengths unroll every '
    'keep keep_period vocabulary_size d_model layers heads kv_heads head_width key_width '
    'value_width mlp_width width state_size hippo_blocks slice_size dilations max_context '
    'original_context rank taps window top_k '
    'NgramEmbedding.rows groups sets reference_tokens components.shown components.windows slices'
  ),
  '[2, 2147483647]': 'LossSpikes.window orders',
  '[260, 1048576]': 'train_vocabulary.size',  # beyond the bytes
  '[0, 2147483647]': (
    'warmup_steps keep_best bad_documents allowed registers document_start max_global_tokens '
    'max_tokens ascents faithful_steps attacked_tokens'
  ),
  # An interval beyond the last step is never due.
  '[1, 9223372036854775807]': 'log_every eval_every checkpoint_every hbm_bytes',
  '[0, 4294967295]': 'seed first',
  '[0, 1]': 'depths min_p epsilon cooldown Stochastic.source Adversary.source threshold',
  '[0, 1)': 'dropout pass_carry optax.b1 optax.b2 optax.b3 optax.decay optax.momentum',
  '(0, 1]': 'top_p',
  '(0, 1)': 'average_decay',
  '[1, inf)': 'factor largest_rate',
  '[0, inf)': (
    'learning_rate learning_rate_scale final_learning_rate_scale z_loss temperature '
    'weight weights match_weight low_turns high_turns optax.weight_decay optax.eps optax.eps_root '
    'coefficient minimality exponent last_exponent frequency faithfulness'
  ),
  '(0, inf)': (
    'base embedding_scale horizon shortest step_rescale faithful_rate Adversary.rate '
    'ComponentScores.rate dcn_bytes_per_second'
  ),
  '[1e-30, 1e30]': 'repetition_penalty',
  '(0, inf]': 'clip_norm deviations',
  '(0, 1e9]': 'grace_seconds',
  '[0, inf]': 'Checkpoints.patience create_writers.patience',
}
RANGES = {name: interval for interval, names in _INTERVALS.items() for name in names.split()}


def check(owner: str, where: str = '', /, **values: Any) -> None:
  """Raises a ConfigurationError, which begins with `where`, for a value out of its range.

  None is in every range.
  """
  for name, value in values.items():
    numbers_of_value = [value]  # an empty sequence is refused as it is
    if isinstance(value, list | tuple) and value:
      numbers_of_value = value
    for number in numbers_of_value:
      _check(owner, name, number, where)


def _check(owner: str, name: str, value: Any, where: str) -> None:
  interval = RANGES.get(f'{owner}.{name}')
  if interval is None and owner != 'optax':
    interval = RANGES.get(name)
  if interval is None or value is None:
    return
  least, most = interval[1:-1].split(', ')
  kind = numbers.Real
  number = 'a number'
  if most.isdigit() and most != '1':
    kind = numbers.Integral
    number = 'an integer'
  is_number = issubclass(type(value), kind) and type(value) is not bool
  if not is_number or not _is_between(value, interval, float(least), float(most)):
    raise ConfigurationError(
      f'{where}{owner}.{name} = {value!r} is out of range. Use {number} in {interval}.'
    )


def _is_between(value: Any, interval: str, least: float, most: float) -> bool:
  """Whether a number is between two bounds, or equal to one with a square bracket."""
  if value == least:
    return interval[0] == '[' and value <= most
  if value == most:
    return interval[-1] == ']' and value >= least
  return least < value < most


def check_fields(settings: Any) -> None:
  """Checks the numbers of a dataclass in the fields that this package declares.

  The class of a user may have a field of any name, with any meaning.
  """
  fields = {field.name for field in dataclasses.fields(settings)}
  for declaring in filter(is_ours, type(settings).__mro__):
    named = declaring
    if is_ours(type(settings)):
      named = type(settings)
    for name in fields & inspect.get_annotations(declaring).keys():
      check(named.__name__, **{name: getattr(settings, name)})


def is_ours(configurable: Any) -> bool:
  """Whether a class or function is of this package."""
  package, _, _ = configurable.__module__.partition('.')
  return package == 'valkyrie'
