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
from valkyrie.models.layers import wide
from valkyrie.models.model import Model
from valkyrie.models.ngrams import mixed
from valkyrie.monitoring import memory
from valkyrie.monitoring.waiting import doing
from valkyrie.sharding.partitioner import Partitioner
from valkyrie.training import rounding, tbptt
from valkyrie.training.data_parallel import shard_map_step
from valkyrie.training.setup import Setup
from valkyrie.types import Array, Batch, Params, leaves_by_path

_MOVED = 0.02  # the deviation of what is added to parameters: a zero would hide what it multiplies
_SKETCH = 16  # at most 16 random projections that stand for an array

Numbers = Mapping[str, np.ndarray]  # by path: the loss, and sketches of gradients and carries


class Computation:
  """The numbers of forms in one precision; forms of one shape share a program."""

  def __init__(self, setup: Setup, dtype: str, refused: dict[str, str]):
    self._settings = setup.settings
    self._dtype = dtype
    self._programs = {}
    self._own = setup.partitioner
    self._refused = refused
    self._required = dtype == str(setup.model.about.compute_dtype)

  def __call__(self, form: Form) -> tuple[Numbers, Numbers] | None:
    """(the numbers, their largest changes if the parameters change in the last digit).

    None if the memory is too small, or if the model cannot compute in a precision that is not the
    run's, as where the module of a user keeps a state in float32.
    """
    try:
      with memory.explained(lambda: form.name), doing(f'computing {form.name} in {self._dtype}'):
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
    make = self._program('parameters', self._own, self._parameters(model, self._own))
    axes = model.parameter_axes(layout.parameter_axes)
    key = form.batch.inputs.shape, form.chunk_size, form.recomputes, form.learns, id(layout)
    read = self._program(key, layout, functools.partial(self._read, form, model))
    batch = form.batch._replace(weights=form.batch.weights.astype(wide(self._dtype)))
    batch = layout.place_batch(batch)

    def numbers(seed):
      params = make(seed)
      if layout is not self._own:  # whose program would round the initial values its own way
        params = jax.device_put(params, layout.shardings(params, axes))
      found = jax.device_get(read(params, batch))
      found = found if form.carry else found | {'carry': ()}
      return {path: np.asarray(leaf, np.float64) for path, leaf in leaves_by_path(found).items()}

    found, *others = (numbers(seed) for seed in (0, 1, 2))
    return found, {
      name: np.max([np.abs(other[name] - value) for other in others], axis=0)
      for name, value in found.items()
    }

  def _program(self, key: Any, layout: Partitioner, function: Callable) -> Callable:
    return self._programs.setdefault(key, layout.jit(function, compiler_options=compiler_options()))

  def _model(self, form: Form) -> Model:
    kept = {} if form.recomputes else {'remat_policy': None}
    model = self._settings.model
    return language_model.transform(
      functools.partial(
        model, compute_dtype=self._dtype, parameter_dtype='float32', unroll=1, **kept
      )
    )

  def _parameters(self, model: Model, layout: Partitioner) -> Callable[[Array], Params]:
    """The function of a seed that makes the parameters; with 0 their last digits are unchanged."""

    def make(seed):
      leaves, structure = jax.tree.flatten(rounding.wide(model.init(jax.random.key(0), 1)[0]))
      epsilon = jnp.where(seed == 0, 0.0, float(jnp.finfo(self._dtype).eps))
      for number, leaf in enumerate(leaves):
        own = jnp.promote_types(leaf.dtype, self._dtype)
        moved = leaf.astype(own) + _MOVED * _uniform(leaf.shape, 3 * number).astype(own)
        change = _uniform(leaf.shape, 3 * number + seed).astype(own)
        leaves[number] = moved * (1 + epsilon.astype(own) * change)
      params = structure.unflatten(leaves)
      axes = model.parameter_axes(layout.parameter_axes)
      return lax.with_sharding_constraint(params, layout.shardings(params, axes))

    return make

  def _read(self, form: Form, model: Model, params: Params, batch: Batch) -> dict[str, Any]:
    """The loss, gradients and carry of a form, traced."""
    rows, time = form.batch.inputs.shape

    def learns(module, name):
      return form.learns

    of_device = functools.partial(
      tbptt.gradients,
      model,
      backprop_chunks=time // form.chunk_size if form.learns else 1,
      remat_chunks=form.recomputes and self._settings.remat_chunks,
      keep_carries=self._settings.keep_carries,
      learns=learns,
    )
    carry = model.initial_carry(rows)
    gradient, carry, sums = shard_map_step(
      of_device, model, params, carry, batch, chunk_size=form.chunk_size, learns=learns
    )
    loss = sums.loss / jnp.maximum(sums.weight, 1)
    return {'loss': loss, 'gradient': _sketches(gradient), 'carry': _sketches(carry)}


def compiler_options() -> dict[str, Any] | None:
  """Of the compiler: on CPU, LLVM's optimizations are most of the time that `verify` takes."""
  return {'xla_backend_optimization_level': 0} if jax.default_backend() == 'cpu' else None


def _sketches(tree: Any) -> Any:
  """Sums of each array with _SKETCH patterns of signs: their norm is about the array's norm.

  So differences of arrays that no host could hold are seen in a few numbers (Johnson and
  Lindenstrauss 1984).
  """

  def of(leaf):
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
      return None
    shift = 16 + lax.broadcasted_iota(jnp.uint32, (_SKETCH, *leaf.shape), 0)
    bits = (_hashes(leaf.shape, 0)[None] >> shift) & 1
    values = leaf.astype(wide(leaf.dtype))[None]
    signed = jnp.where(bits == 1, values, -values)
    return jnp.sum(signed, axis=tuple(range(1, signed.ndim))) / _SKETCH**0.5

  return jax.tree.map(of, tree)


def _uniform(shape: tuple[int, ...], salt: int | Array) -> Array:
  """Numbers from -1 to 1."""
  return _hashes(shape, salt).astype(jnp.float32) / 2.0**31 - 1


def _hashes(shape: tuple[int, ...], salt: int | Array) -> Array:
  """32 random bits at each place, the same in every layout.

  jax.random has better numbers, and programs whose compilation takes much longer.
  """
  place = jnp.broadcast_to(jnp.asarray(salt).astype(jnp.uint32), shape)
  for dimension in range(len(shape)):
    place = place * jnp.uint32(shape[dimension])
    place += lax.broadcasted_iota(jnp.uint32, shape, dimension)
  return mixed(place)
