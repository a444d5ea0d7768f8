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


def check_result(
  name: str,
  x: Array,
  before: Carry,
  y: Array,
  after: Carry,
) -> None:
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
  trial = _Trial(make, width)
  x = trial.x
  fresh = trial.fresh
  whole, after = trial.read(x, fresh)
  check_result(name, jnp.asarray(x), fresh, whole, after)

  def not_finite() -> str:
    return f'The outputs of {name} for normal random inputs are not finite'

  with edges.asserted(not_finite, 'Correct its __call__.'):
    chex.assert_tree_all_finite(whole)
  largest = float(np.abs(whole).max())
  size = max(largest, 1e-6)

  def compare(outputs: Any, expected: Any, rule: str) -> None:
    difference = float(np.abs(outputs - expected).max())
    if not difference <= tolerance * size:
      raise ConfigurationError(f'{name}: {rule}. The values differ by {difference:.3g}.')

  later = x.copy()
  noise = trial.random.normal(size=later[:, _CUT:].shape)
  later[:, _CUT:] += noise
  outputs, _ = trial.read(later, fresh)
  rule = 'an output depends on a later token. Use only tokens before it'
  compare(outputs[:, :_CUT], whole[:, :_CUT], rule)

  other = x.copy()
  other[1] += 1
  outputs, _ = trial.read(other, fresh)
  rule = 'a row depends on another one. Keep axis 0 of x apart'
  compare(outputs[0], whole[0], rule)

  first, carry = trial.read(x, fresh, 0, _CUT)
  second, _ = trial.read(x, carry, _CUT)
  joined = np.concatenate([first, second], axis=1)
  rule = (
    f'a row cut into chunks of {_CUT} and {_TIME - _CUT} tokens gives other outputs than the whole '
    'row. Pass on what later tokens need in the carry'
  )
  compare(joined, whole, rule)

  document, _ = trial.read(x, fresh, _START)
  rule = 'a document depends on the one before it. Reset the carry where positions is 0'
  compare(document, whole[:, _START:], rule)

  steps = np.arange(_TIME)
  padded = np.where(steps < _CUT, trial.segments, 0)
  _, carry = trial.read(x, fresh, segments=padded)
  outputs, _ = trial.read(x, carry, _CUT)
  rule = 'padding changes the carry. Leave it as it was where segment_ids is 0'
  compare(outputs, second, rule)


class _Trial:
  """A mixer with random parameters, and random tokens of two documents in each row.

  Attributes:
    random: the generator of the numbers.
    x, positions, segments: the tokens; the second document begins at _START.
    fresh: the carry of rows that have read nothing.
  """

  def __init__(self, make: Callable[[], SequenceMixer], width: int):
    self.random = np.random.default_rng(0)
    x = self.random.normal(size=(_ROWS, _TIME, width))
    self.x = x.astype(np.float32)
    steps = np.arange(_TIME, dtype=np.int32)
    is_second = steps >= _START
    row_positions = np.where(is_second, steps - _START, steps)
    row_segments = np.where(is_second, 2, 1).astype(np.int32)
    self.positions = np.tile(row_positions, (_ROWS, 1))
    self.segments = np.tile(row_segments, (_ROWS, 1))

    def initial_carry() -> Carry:
      mixer = make()
      check_members(mixer)
      return mixer.initial_carry(_ROWS, jnp.float32)

    def read(x, carry, positions, segment_ids):
      return make()(x, carry, positions=positions, segment_ids=segment_ids)

    mixer = hk.without_apply_rng(hk.transform(read))
    self.fresh = hk.transform(initial_carry).apply({}, None)
    key = jax.random.key(0)
    initial_params = mixer.init(key, self.x, self.fresh, self.positions, self.segments)
    self._params = jax.tree.map(self._moved, initial_params)
    self._run = jax.jit(mixer.apply)

  def _moved(self, leaf: Any) -> np.ndarray:
    # A parameter that is zero at first would hide what the mixer does.
    noise = self.random.normal(size=leaf.shape).astype(leaf.dtype)
    return np.asarray(leaf) + 0.1 * noise

  def read(
    self,
    x: np.ndarray,
    carry: Carry,
    begin: int = 0,
    end: int = _TIME,
    segments: np.ndarray | None = None,
  ) -> tuple[Array, Carry]:
    """(The outputs, the carry after) of the tokens [begin, end)."""
    if segments is None:
      segments = self.segments
    part = np.s_[:, begin:end]
    return self._run(self._params, x[part], carry, self.positions[part], segments[part])
