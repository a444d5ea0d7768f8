"""The choice of a kernel: its values, whether one is used, and the results that are compared first.

A mixer with kernels has `kernels`, one of `CHOICES`, and `kernel_limits`. Its plain form defines
what the kernel computes, and a run uses a kernel only in pieces on which it was compared with it
(`training.kernel_check`).
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from valkyrie.models.layers import MixerOptions, configure
from valkyrie.sharding import ambient
from valkyrie.sharding.mesh import platform
from valkyrie.types import Array, DType, SequenceMixer

CHOICES = (None, 'prefer', 'require', 'interpret')
_NAMES = {'cpu': 'a CPU', 'gpu': 'a GPU', 'tpu': 'a TPU'}


class Limits(NamedTuple):
  """Where a mixer's kernels run: on these platforms, in pieces of a multiple of so many tokens.

  misfit: why there are none for the mixer as it is, if so.
  """

  platforms: Sequence[str]
  multiple: int
  misfit: str | None = None


def asking(mixer: Any) -> Any:
  """The mixer that may ask for kernels: the one inside of a mixer that is made of another."""
  return getattr(mixer, 'inner', mixer)


def why_not(mixer: Any, time: int) -> str | None:
  """Why no kernel of a mixer reads a piece of `time` tokens at once; None if one does."""
  platforms, multiple, misfit = mixer.kernel_limits
  partitioner = ambient.current().partitioner
  if mixer.kernels != 'interpret' and platform() not in platforms:
    offered = ' and '.join(f'{name.upper()}s' for name in platforms)
    return f'the kernels are for {offered}, and this program for {_NAMES[platform()]}'
  if misfit:
    return misfit
  if time % multiple:
    return f'a device reads {time} tokens of a chunk at once, no multiple of {multiple}'
  if partitioner is not None and partitioner.mesh.size > 1:
    return "XLA's partitioner cannot split a kernel; a layout with Partitioner.manual = True can"
  return None


def is_used(mixer: Any, time: int) -> bool:
  """Whether a kernel reads a piece of `time` tokens in a mixer that has its options."""
  agreed = (type(mixer).__name__, time) in mixer.mixer_options.kernel_lengths
  if mixer.kernels is None or not agreed:
    return False
  return why_not(mixer, time) is None


class Inputs(NamedTuple):
  """What a comparison reads: a mixer's parameters, a chunk, and what gradients begin with.

  x, weights: [B, T, D]; the weights multiply outputs, and are zero at padding.
  carry_weights: like the leaves of the carry that are no integers.
  positions, segments: [B, T].
  """

  params: Any
  x: Array
  carry: Any
  weights: Array
  carry_weights: list[Array]
  positions: Array
  segments: Array


def results(
  make: Callable[[], SequenceMixer],
  shape: tuple[int, int, int],
  dtype: DType,
  options: MixerOptions,
  in_one_document: Array | bool = False,
) -> list[Array]:
  """`compute` of the inputs that `draw` draws."""
  inputs = draw(make, shape, dtype, options, in_one_document)
  return compute(make, options, inputs)


def draw(
  make: Callable[[], SequenceMixer],
  shape: tuple[int, int, int],
  dtype: DType,
  options: MixerOptions,
  in_one_document: Array | bool = False,
) -> Inputs:
  """Random inputs of the mixer of `make` for a chunk [B, T, D] = `shape`.

  Its rows go on in a document, begin another one, and end with padding; what was carried are tokens
  of several documents. Or all are in one document, of which a kernel may mask nothing.
  """
  rows, time, _ = shape
  key = jax.random.key(0)
  carry_key, x_key, weights_key, after_key = jax.random.split(key, 4)
  positions, segments = _places(rows, time, in_one_document)

  def used(leaf):
    random = 1.5 + jax.random.normal(carry_key, leaf.shape)
    values = random.astype(leaf.dtype)
    if jnp.issubdtype(leaf.dtype, jnp.integer):
      return jnp.where(in_one_document, 1, values)
    return values

  def initial_carry():
    return make().initial_carry(rows, dtype)

  empty = hk.transform(initial_carry).apply({}, None)
  carry = jax.tree.map(used, empty)
  x = jax.random.normal(x_key, shape, dtype)
  weights = jax.random.normal(weights_key, shape, dtype)
  is_token = segments > 0
  weights = jnp.where(is_token[..., None], weights, 0)
  carry_weights = [jax.random.normal(after_key, leaf.shape, leaf.dtype) for leaf in _floats(carry)]
  mixer = hk.transform(functools.partial(_read, make, options))
  params = mixer.init(carry_key, x, carry, positions, segments)
  return Inputs(params, x, carry, weights, carry_weights, positions, segments)


def compute(
  make: Callable[[], SequenceMixer],
  options: MixerOptions,
  inputs: Inputs,
) -> list[Array]:
  """Outputs, carries and gradients of the mixer of `make`, in float32."""
  mixer = hk.transform(functools.partial(_read, make, options))

  def apply(params, x):
    return mixer.apply(params, None, x, inputs.carry, inputs.positions, inputs.segments)

  (y, after), pull_back = jax.vjp(apply, inputs.params, inputs.x)
  outputs = jnp.where(inputs.weights == 0, 0, y)
  gradients = pull_back((inputs.weights, inputs.carry_weights))
  arrays = jax.tree.leaves((outputs, after, gradients))
  return [array.astype(jnp.float32) for array in arrays]


def _read(make, options, x, carry, positions, segments):
  """(the outputs, the floats of the carry after the chunk) of a mixer with these options."""
  mixer: Any = make()
  configure(mixer, options)
  y, after = mixer(x, carry, positions=positions, segment_ids=segments)
  return y, _floats(after)


def _floats(carry: Any) -> list[Array]:
  """The leaves of a carry that have gradients."""
  leaves = jax.tree.leaves(carry)
  return [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]


def _places(rows: int, time: int, in_one_document: Array | bool) -> tuple[Array, Array]:
  """The positions and the segments [B, T] of rows with two documents and padding, or with one."""
  row_steps = np.arange(time, dtype=np.int32)
  steps = np.tile(row_steps, (rows, 1))
  second_begin = time // 3
  padding_begin = time - time // 9
  is_second = steps >= second_begin  # the tokens of the second document, and after it
  in_second = steps - second_begin
  in_first = steps + 10**6
  positions = np.where(is_second, in_second, in_first)
  is_token = steps < padding_begin
  segments = np.where(is_token, 1 + is_second, 0).astype(np.int32)
  return jnp.where(in_one_document, in_first, positions), jnp.where(in_one_document, 1, segments)
