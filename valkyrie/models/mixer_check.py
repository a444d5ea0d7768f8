"""Check of a sequence mixer: the rules that make chunks, packed documents and rows exact."""

from collections.abc import Callable, Sequence
from typing import Any

import chex
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from valkyrie import edges
from valkyrie.errors import ConfigurationError
from valkyrie.types import Array, Carry, SequenceMixer

_ROWS = 2
_TIME = 16
_CUT = 7  # the tokens of the first chunk
_START = 11  # of the second document, inside the second chunk


def check_members(mixer: SequenceMixer) -> None:
  """Raises a ConfigurationError if a mixer lacks what `types.SequenceMixer` requires."""
  for member in ('causal', 'dropout', 'initial_carry', 'forward_flops'):
    if not hasattr(mixer, member):
      raise ConfigurationError(
        f'The mixer {type(mixer).__name__} has no attribute {member}. Give it all that '
        'valkyrie.types.SequenceMixer lists.'
      )


def check_causal(mixers: Sequence[SequenceMixer]) -> None:
  """Raises a ConfigurationError if a mixer reads tokens that are to be predicted."""
  for mixer in mixers:
    if not mixer.causal:
      raise ConfigurationError(
        f'A language model predicts each token from those before it, but its mixer '
        f'{type(mixer).__name__} also reads those after it. Use a causal mixer in Block.mixers, '
        'such as LongformerAttention, or S5 with S5.bidirectional = False.'
      )


def check_result(name: str, x: Array, before: Carry, y: Array, after: Carry) -> None:
  """Raises a ConfigurationError if a mixer's outputs or carry have another form than its inputs."""

  def message() -> str:
    return (
      f'The mixer {name} returned outputs of shape {jnp.shape(y)} for inputs of shape {x.shape}'
    )

  with edges.asserted(message, 'Return the shape of the inputs.'):
    chex.assert_shape([y], [x.shape])
  edges.check_carry(f'The mixer {name}', after, before, 'initial_carry')


@jax.default_matmul_precision('highest')  # a platform's own rounding breaks no rule
def check_mixer(make: Callable[[], SequenceMixer], width: int, tolerance: float = 1e-4) -> None:
  """Runs a causal mixer on 16 random tokens of two rows, with random parameters, in float32.

  `make` is its class, or a function that makes it; inputs have D = `width`. `tolerance` is the
  largest difference of equal results, relative to the size of the outputs. Raises a
  ConfigurationError that names the broken rule of `valkyrie.types.SequenceMixer`.
  """
  name = getattr(make, '__name__', repr(make))

  def initial_carry() -> Carry:
    mixer = make()
    check_members(mixer)
    return mixer.initial_carry(_ROWS, jnp.float32)

  def read(x, carry, positions, segment_ids):
    return make()(x, carry, positions=positions, segment_ids=segment_ids)

  mixer = hk.without_apply_rng(hk.transform(read))
  random = np.random.default_rng(0)

  def moved(leaf: Any) -> np.ndarray:
    # A parameter that is zero at first would hide what the mixer does.
    return np.asarray(leaf) + 0.1 * random.normal(size=leaf.shape).astype(leaf.dtype)

  x = random.normal(size=(_ROWS, _TIME, width)).astype(np.float32)
  at = np.tile(np.r_[0:_START, 0 : _TIME - _START].astype(np.int32), (_ROWS, 1))
  segments = np.ones_like(at) + (np.arange(_TIME) >= _START).astype(np.int32)
  fresh = hk.transform(initial_carry).apply({}, None)
  params = jax.tree.map(moved, mixer.init(jax.random.key(0), x, fresh, at, segments))
  run = jax.jit(mixer.apply)

  def over(x, carry, begin=0, end=_TIME, segments=segments):
    """(outputs, the carry after) of the tokens [begin, end)."""
    return run(params, x[:, begin:end], carry, at[:, begin:end], segments[:, begin:end])

  whole, after = over(x, fresh)
  check_result(name, jnp.asarray(x), fresh, whole, after)

  def not_finite() -> str:
    return f'The outputs of {name} for normal random inputs are not finite'

  with edges.asserted(not_finite, 'Correct its __call__.'):
    chex.assert_tree_all_finite(whole)
  size = max(float(np.abs(whole).max()), 1e-6)

  def compare(found: Any, expected: Any, rule: str) -> None:
    difference = float(np.abs(found - expected).max())
    if not difference <= tolerance * size:
      raise ConfigurationError(f'{name}: {rule}. The values differ by {difference:.3g}.')

  later = x.copy()
  later[:, _CUT:] += random.normal(size=later[:, _CUT:].shape)
  compare(
    over(later, fresh)[0][:, :_CUT],
    whole[:, :_CUT],
    'an output depends on a later token. Use only tokens before it',
  )
  other = x.copy()
  other[1] += 1
  compare(
    over(other, fresh)[0][0], whole[0], 'a row depends on another one. Keep axis 0 of x apart'
  )
  first, carry = over(x, fresh, 0, _CUT)
  second, _ = over(x, carry, _CUT)
  compare(
    np.concatenate([first, second], axis=1),
    whole,
    f'a row cut into chunks of {_CUT} and {_TIME - _CUT} tokens gives other outputs than the whole '
    'row. Pass on what later tokens need in the carry',
  )
  compare(
    over(x, fresh, _START)[0],
    whole[:, _START:],
    'a document depends on the one before it. Start anew where positions is 0',
  )
  _, carry = over(x, fresh, segments=np.where(np.arange(_TIME) < _CUT, segments, 0))
  compare(
    over(x, carry, _CUT)[0],
    second,
    'padding changes the carry. Leave it as it was where segment_ids is 0',
  )
