"""The numbers of a form that the run mode `verify` compares, and how far roundings move them."""

from collections.abc import Callable, Mapping
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from valkyrie.errors import ConfigurationError, message_of
from valkyrie.lab.verification.verify_forms import RUN, Form, refuse
from valkyrie.models import language_model
from valkyrie.models.model import Model
from valkyrie.models.ngrams import mixed
from valkyrie.models.precision import wide
from valkyrie.monitoring import memory
from valkyrie.monitoring.waiting import doing
from valkyrie.sharding.partitioner import Partitioner
from valkyrie.training import rounding, tbptt
from valkyrie.training.data_parallel import shard_map_step
from valkyrie.training.setup import Setup
from valkyrie.types import Array, Batch, Params, leaves_by_path

_MOVED = 0.02  # the deviation of what is added to parameters: a zero would hide what it multiplies
_SKETCH = 16  # random projections of an array, at most 16

Numbers = Mapping[str, np.ndarray]  # by path: the loss, and sketches of gradients and carries


class Computation:
  """Computes the numbers of forms in one precision; forms of one shape share a program."""

  def __init__(self, setup: Setup, dtype: str, refused: dict[str, str]):
    self._settings = setup.settings
    self._dtype = dtype
    self._programs = {}
    self._layout = setup.partitioner
    self._refused = refused
    self._required = dtype == str(setup.model.about.compute_dtype)

  def __call__(self, form: Form) -> tuple[Numbers, Numbers] | None:
    """(the numbers, their largest changes if the parameters change in the last digit).

    None if the memory is too small, or if the model cannot compute in a precision other than the
    run's: a user's module may keep a state in float32.
    """
    try:
      explained = memory.explained(lambda: form.name)
      with explained, doing(f'computing {form.name} in {self._dtype}'):
        return self._numbers(form)
    except ConfigurationError as error:
      if self._required and form.name == RUN:
        raise
      reason = message_of(error)
    except (TypeError, ValueError) as error:
      if self._required:
        raise
      first, _, _ = str(error).partition('\n')
      reason = f'the model computes only in the precision of the run: {first}'
    refuse(self._refused, f'{form.name} in {self._dtype}', reason)
    return None

  def _numbers(self, form: Form) -> tuple[Numbers, Numbers]:
    model = self._model(form)
    layout = form.layout
    make_parameters = self._parameters(model, self._layout)
    make = self._program('parameters', self._layout, make_parameters)
    axes = model.parameter_axes(layout.parameter_axes)
    shape = form.batch.inputs.shape
    key = (shape, form.chunk_size, form.recomputes, form.learns, id(layout))
    read_form = functools.partial(self._read, form, model)
    read = self._program(key, layout, read_form)
    weights = form.batch.weights.astype(wide(self._dtype))
    wide_batch = form.batch._replace(weights=weights)
    batch = layout.place_batch(wide_batch)

    def compute(seed):
      params = make(seed)
      if layout is not self._layout:
        # The parameters come from the run's layout: each layout rounds initial values its own way.
        shardings = layout.shardings(params, axes)
        params = jax.device_put(params, shardings)
      results = jax.device_get(read(params, batch))
      if not form.carry:
        results['carry'] = ()
      leaves = leaves_by_path(results)
      numbers = {}
      for path, leaf in leaves.items():
        numbers[path] = np.asarray(leaf, np.float64)
      return numbers

    numbers = compute(0)
    spread = {}
    for path, value in numbers.items():
      spread[path] = np.zeros_like(value)
    for seed in (1, 2):
      for path, value in compute(seed).items():
        change = np.abs(value - numbers[path])
        spread[path] = np.maximum(spread[path], change)
    return numbers, spread

  def _program(self, key: Any, layout: Partitioner, function: Callable) -> Callable:
    """The compiled function; `key` says which forms share it."""
    if key not in self._programs:
      options = compiler_options()
      self._programs[key] = layout.jit(function, compiler_options=options)
    return self._programs[key]

  def _model(self, form: Form) -> Model:
    changes: dict[str, Any] = {'compute_dtype': self._dtype, 'parameter_dtype': 'float32'}
    changes['unroll'] = 1
    if not form.recomputes:
      changes['remat_policy'] = None
    make = functools.partial(self._settings.model, **changes)
    return language_model.transform(make)

  def _parameters(self, model: Model, layout: Partitioner) -> Callable[[Array], Params]:
    """The function of a seed that makes the parameters; with 0 their last digits are unchanged."""
    last_digit = float(jnp.finfo(self._dtype).eps)

    def make(seed):
      key = jax.random.key(0)
      params, _ = model.init(key, 1)
      leaves, structure = jax.tree.flatten(rounding.wide(params))
      epsilon = jnp.where(seed == 0, 0.0, last_digit)
      moved = []
      for number, leaf in enumerate(leaves):
        salt = 3 * number
        moved.append(self._moved(leaf, salt, seed, epsilon))
      moved_params = structure.unflatten(moved)
      axes = model.parameter_axes(layout.parameter_axes)
      shardings = layout.shardings(moved_params, axes)
      return lax.with_sharding_constraint(moved_params, shardings)

    return make

  def _moved(
    self,
    leaf: Array,
    salt: int,
    seed: Array,
    epsilon: Array,
  ) -> Array:
    """A parameter away from its initial value, and changed by at most epsilon of itself."""
    dtype = jnp.promote_types(leaf.dtype, self._dtype)
    added = _uniform(leaf.shape, salt).astype(dtype)
    change = _uniform(leaf.shape, salt + seed).astype(dtype)
    moved = leaf.astype(dtype) + _MOVED * added
    factor = 1 + epsilon.astype(dtype) * change
    return moved * factor

  def _read(
    self,
    form: Form,
    model: Model,
    params: Params,
    batch: Batch,
  ) -> dict[str, Any]:
    """The loss, gradients and carry of a form, traced."""
    rows, time = form.batch.inputs.shape
    backprop_chunks = 1
    if form.learns:
      backprop_chunks = time // form.chunk_size

    def learns(module, name):
      return form.learns

    gradients_on_device = functools.partial(
      tbptt.gradients,
      model,
      backprop_chunks=backprop_chunks,
      remat_chunks=form.recomputes and self._settings.remat_chunks,
      keep_carries=self._settings.keep_carries,
      learns=learns,
    )
    carry = model.initial_carry(rows)
    gradient, carry, sums = shard_map_step(
      gradients_on_device,
      model,
      params,
      carry,
      batch,
      chunk_size=form.chunk_size,
      learns=learns,
    )
    loss = sums.loss / jnp.maximum(sums.weight, 1)
    return {'loss': loss, 'gradient': _sketches(gradient), 'carry': _sketches(carry)}


def compiler_options() -> dict[str, Any] | None:
  """The options of the compiler: on CPU, LLVM's optimizations would take most of the time."""
  if jax.default_backend() == 'cpu':
    return {'xla_backend_optimization_level': 0}
  return None


def _sketches(tree: Any) -> Any:
  """Sums of each array with _SKETCH patterns of signs: their norm is about the array's norm.

  So a few numbers show the differences of arrays that are too large for a host (Johnson and
  Lindenstrauss 1984).
  """

  def sketch(leaf):
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
      return None
    places = lax.broadcasted_iota(jnp.uint32, (_SKETCH, *leaf.shape), 0)
    shift = 16 + places
    hashes = _hashes(leaf.shape, 0)[None]
    bits = (hashes >> shift) & 1
    wide_leaf = leaf.astype(wide(leaf.dtype))
    values = wide_leaf[None]
    signed = jnp.where(bits == 1, values, -values)
    all_but_first = tuple(range(1, signed.ndim))
    sums = jnp.sum(signed, axis=all_but_first)
    return sums / _SKETCH**0.5

  return jax.tree.map(sketch, tree)


def _uniform(shape: tuple[int, ...], salt: int | Array) -> Array:
  """Numbers from -1 to 1."""
  hashes = _hashes(shape, salt).astype(jnp.float32)
  return hashes / 2.0**31 - 1


def _hashes(shape: tuple[int, ...], salt: int | Array) -> Array:
  """32 random bits at each place, the same in every layout.

  jax.random has better numbers, and programs whose compilation takes much longer.
  """
  salt_bits = jnp.asarray(salt).astype(jnp.uint32)
  place = jnp.broadcast_to(salt_bits, shape)
  for dimension in range(len(shape)):
    place = place * jnp.uint32(shape[dimension])
    place += lax.broadcasted_iota(jnp.uint32, shape, dimension)
  return mixed(place)
