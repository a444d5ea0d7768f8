"""A model as pure functions of its parameters and its carry."""

from collections.abc import Callable, Mapping
import functools
import math
from typing import Any, NamedTuple
import zlib

import haiku as hk
import jax

from valkyrie.errors import ConfigurationError
from valkyrie.models.declarations import FIRST_CARRY, Declared, Kind, Parameter, Parameters
from valkyrie.models.features import Description, Features
from valkyrie.models.parts import is_of_model
from valkyrie.sharding import ambient
from valkyrie.sharding.sequence_parallel import is_over_time
from valkyrie.types import Array, Axes, Batch, Carry, Params


class Model(NamedTuple):
  """A language model as pure functions.

  init: (rng, batch_size) -> (params, carry of rows that have read nothing).
  initial_carry: batch_size -> only that carry.
  apply: (params, carry, inputs, positions, segment_ids, rng=None, with_insert=True,
    activations=(), masks=None) -> (Features, carry), see `LanguageModel`. `with_insert` and
    `activations` are static. With an rng, dropout acts.
  parameters: () -> {module: {name: Parameter}}.
  insert_rests: whether `apply` leaves the insert out.
  """

  init: Callable[[Array, int], tuple[Params, Carry]]
  initial_carry: Callable[[int], Carry]
  apply: Callable[..., tuple[Features, Carry]]
  parameters: Callable[[], Parameters]
  about: Description
  insert_rests: bool = False

  def read(
    self,
    params: Params,
    carry: Carry,
    batch: Batch,
    *options: Any,
    **named: Any,
  ) -> tuple[Features, Carry]:
    """`apply` to a batch."""
    tokens = (batch.inputs, batch.positions, batch.segment_ids)
    return self.apply(params, carry, *tokens, *options, **named)

  def without_insert(self) -> 'Model':
    """This model, whose insert takes no part: its carry is reset, and its parameters rest."""
    apply = functools.partial(self.apply, with_insert=False)
    return self._replace(apply=apply, insert_rests=True)

  def extended(
    self,
    name: str,
    init: Callable[[Array], Params],
    parameters: Callable[[], Parameters],
    initial_carry: Callable[[int], Carry] | None = None,
  ) -> 'Model':
    """This model with further parameters, and with a carry under this name; see `created`.

    Raises a ConfigurationError if their modules have names that are taken: the modules of this
    model have them, or they begin with 'model/'.
    """
    known = self.parameters()
    taken = [module for module in parameters() if module in known or is_of_model(module)]
    if taken:
      names = ', '.join(taken)
      raise ConfigurationError(
        f'{name} adds modules to the model whose names are taken: {names}. Give them '
        "other names, which do not begin with 'model/'."
      )

    def all_carries(batch_size):
      carry = {**self.initial_carry(batch_size)}
      if initial_carry is not None:
        carry[name] = initial_carry(batch_size)
      return carry

    def init_all(rng, batch_size):
      params, _ = self.init(rng, batch_size)
      seed = zlib.crc32(name.encode())
      further = init(jax.random.fold_in(rng, seed))
      carry = all_carries(batch_size)
      return {**params, **further}, carry

    def all_parameters():
      return {**self.parameters(), **parameters()}

    return self._replace(init=init_all, initial_carry=all_carries, parameters=all_parameters)

  def sharing(self, arrays: Params) -> 'Model':
    """This model, with arrays among its parameters that every device has whole; see `extended`."""

    def declared(leaf):
      shape = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
      axes = (None,) * leaf.ndim
      return Parameter(shape, axes, None)

    shared = jax.tree.map(declared, arrays)

    def parameters():
      return {**self.parameters(), **shared}

    return self._replace(parameters=parameters)

  def own(self, params: Params) -> Params:
    """The parameters of this model among a run's, whose objective may add others."""
    return {module: params[module] for module in self.parameters()}

  def cast(self, params: Params) -> Params:
    """The parameters in the dtypes to which every use casts them; `apply` computes the same."""

    def cast(_, declared, leaf):
      if declared.cast is None:
        return leaf
      return leaf.astype(declared.cast)

    return self._each(cast, params)

  def kinds(self, params: Params) -> Any:
    """A pytree like params of `declarations.Kind`, which an optimizer distinguishes."""
    insert = self.about.insert

    def kind(path, declared, _):
      axes = declared.axes
      stacked = int('layers/' in path)
      if axes is not None:
        stacked = axes.count('layers')
      others = {'vocabulary', 'ngrams', FIRST_CARRY}  # a vector for each token, or a state
      is_other = axes is not None and not others.isdisjoint(axes)
      dimensions = len(declared.shape.shape) - stacked
      is_matrix = dimensions > 1 and not is_other
      if insert is None or not path.startswith(f'{insert}/'):
        return Kind(is_matrix, stacked)
      _, _, name = insert.rpartition('/')
      return Kind(is_matrix, stacked, part=name, rests=self.insert_rests)

    return self._each(kind, params)

  def counts(self) -> Mapping[str, Mapping[str, int]]:
    """How many numbers each parameter has, {module: {name: count}}, without rows of padding."""

    def count(_, declared, __):
      sizes = list(declared.shape.shape)
      if declared.axes and 'vocabulary' in declared.axes:
        axis = declared.axes.index('vocabulary')
        sizes[axis] = min(sizes[axis], self.about.vocabulary_size)
      return math.prod(sizes)

    return self._each(count, self.parameters())

  def parameter_axes(self, resolve: Callable[[str, Axes | None, tuple[int, ...]], Axes]) -> Any:
    """The logical axes of each parameter, after `resolve(path, declared axes, shape)`."""

    def axes(path, declared, _):
      return resolve(f'params/{path}', declared.axes, declared.shape.shape)

    return self._each(axes, self.parameters())

  def _each(self, function: Callable[[str, Parameter, Any], Any], params: Any) -> Any:
    """A pytree like params of `function(path, declaration, leaf)`."""
    known = self.parameters()

    def by_path(module, name, leaf):
      path = f'{module}/{name}'
      declared = known[module][name]
      return function(path, declared, leaf)

    return hk.data_structures.map(by_path, params)

  def carry_axes(self, carry: Carry) -> Any:
    """The logical axes of each leaf of a carry: layers where it is stacked, and rows.

    Of what is `OverTime`, also the axis of time.
    """

    def axes(leaf, over_time, one, two):
      sizes = zip(one.shape, two.shape, strict=True)
      is_equal = [a == b for a, b in sizes]
      stacked = is_equal.index(False)
      layer_axes = ('layers',) * stacked
      split = ('batch', 'time') if over_time else ('batch',)
      whole = leaf.ndim - stacked - len(split)
      other_axes = (None,) * whole
      return layer_axes + split + other_axes

    def shapes(rows):
      initial_carry = functools.partial(self.initial_carry, rows)
      return jax.eval_shape(initial_carry)

    # A carry of one row and one of two rows differ in size along the rows.
    one_row = shapes(1)
    two_rows = shapes(2)
    return jax.tree.map(axes, carry, is_over_time(carry), one_row, two_rows)


def created(make: Callable[[], Any]) -> tuple[Callable[[Array], Params], Callable[[], Parameters]]:
  """The functions `init` and `parameters` of the parameters that `make` creates, for `extended`.

  `make` calls Haiku modules, or `layers.parameter` inside them.
  """
  declarations: dict[str, Declared] = {}  # by path

  def creator(
    create,
    shape,
    dtype,
    init,
    context,
  ):
    if isinstance(init, Declared):
      # Inside a layer stack, Haiku names modules relative to it.
      prefix = context.lifted_prefix_name or ''
      path = prefix + context.full_name
      declarations[path] = init
    return create(shape, dtype, init)

  def noted():
    with hk.custom_creator(creator):
      make()

  @jax.jit
  def init(rng):
    params, _ = hk.transform_with_state(noted).init(rng)
    return params

  def parameter(module, name, leaf):
    declared = declarations.get(f'{module}/{name}')
    if declared is None:
      return Parameter(leaf, None, None)
    layer_axes = len(leaf.shape) - len(declared.axes)
    stacked = ('layers',) * layer_axes
    axes = stacked + declared.axes
    return Parameter(leaf, axes, declared.cast, declared.matrix, declared.in_blocks)

  @functools.cache
  def parameters():
    with ambient.within(partitioner=None, time=(), weights=()):
      key = jax.random.key(0)
      shapes = jax.eval_shape(init, key)
    return hk.data_structures.map(parameter, shapes)

  return init, parameters
