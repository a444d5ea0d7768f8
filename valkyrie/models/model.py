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
    self, params: Params, carry: Carry, batch: Batch, *options: Any, **named: Any
  ) -> tuple[Features, Carry]:
    """`apply` to a batch."""
    where = batch.inputs, batch.positions, batch.segment_ids
    return self.apply(params, carry, *where, *options, **named)

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
      raise ConfigurationError(
        f'{name} adds modules to the model whose names are taken: {", ".join(taken)}. Give them '
        "other names, which do not begin with 'model/'."
      )

    def carries(batch_size):
      carry = {**self.initial_carry(batch_size)}
      if initial_carry is not None:
        carry[name] = initial_carry(batch_size)
      return carry

    def both(rng, batch_size):
      own = jax.random.fold_in(rng, zlib.crc32(name.encode()))
      return {**self.init(rng, batch_size)[0], **init(own)}, carries(batch_size)

    return self._replace(
      init=both, initial_carry=carries, parameters=lambda: {**self.parameters(), **parameters()}
    )

  def sharing(self, arrays: Params) -> 'Model':
    """This model, with arrays among its parameters that every device has whole; see `extended`."""

    def declared(leaf):
      return Parameter(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (None,) * leaf.ndim, None)

    shared = jax.tree.map(declared, arrays)
    return self._replace(parameters=lambda: {**self.parameters(), **shared})

  def own(self, params: Params) -> Params:
    """The parameters of this model among a run's, whose objective may add others."""
    return {module: params[module] for module in self.parameters()}

  def cast(self, params: Params) -> Params:
    """The parameters in the dtypes to which every use casts them; `apply` computes the same."""

    def cast(_, declared, leaf):
      return leaf if declared.cast is None else leaf.astype(declared.cast)

    return self._each(cast, params)

  def kinds(self, params: Params) -> Any:
    """A pytree like params of `declarations.Kind`, which an optimizer distinguishes."""
    insert = self.about.insert

    def kind(path, declared, _):
      shape, axes = declared[:2]
      stacked = int('layers/' in path)
      if axes is not None:
        stacked = axes.count('layers')
      others = {'vocabulary', 'ngrams', FIRST_CARRY}  # a vector for each token, or a state
      is_other = axes is not None and not others.isdisjoint(axes)
      is_matrix = len(shape.shape) - stacked > 1 and not is_other
      if insert is None or not path.startswith(f'{insert}/'):
        return Kind(is_matrix, stacked)
      _, _, name = insert.rpartition('/')
      return Kind(is_matrix, stacked, part=name, rests=self.insert_rests)

    return self._each(kind, params)

  def counts(self) -> Mapping[str, Mapping[str, int]]:
    """How many numbers each parameter has, {module: {name: count}}, without rows of padding."""

    def count(_, declared, __):
      shape = declared.shape.shape
      sizes = zip(shape, declared.axes or (None,) * len(shape), strict=True)
      most = self.about.vocabulary_size
      return math.prod(min(size, most) if axis == 'vocabulary' else size for size, axis in sizes)

    return self._each(count, self.parameters())

  def parameter_axes(self, resolve: Callable[[str, Axes | None, tuple[int, ...]], Axes]) -> Any:
    """The logical axes of each parameter, after `resolve(path, declared axes, shape)`."""

    def axes(path, declared, _):
      return resolve(f'params/{path}', declared.axes, declared.shape.shape)

    return self._each(axes, self.parameters())

  def _each(self, of: Callable[[str, Parameter, Any], Any], params: Any) -> Any:
    """A pytree like params of `of(path, declaration, leaf)`."""
    known = self.parameters()
    return hk.data_structures.map(
      lambda module, name, leaf: of(f'{module}/{name}', known[module][name], leaf), params
    )

  def carry_axes(self, carry: Carry) -> Any:
    """The logical axes of each leaf of a carry: layers where it is stacked, and rows.

    Of what is `OverTime`, also the axis of time.
    """

    def of(leaf, over_time, one, two):
      stacked = [a == b for a, b in zip(one.shape, two.shape, strict=True)].index(False)
      of_rows = ('batch', 'time') if over_time else ('batch',)
      whole = leaf.ndim - stacked - len(of_rows)
      return ('layers',) * stacked + of_rows + (None,) * whole

    # A carry of one row and one of two rows differ in size along the rows.
    of_rows = [jax.eval_shape(functools.partial(self.initial_carry, rows)) for rows in (1, 2)]
    return jax.tree.map(of, carry, is_over_time(carry), *of_rows)


def created(make: Callable[[], Any]) -> tuple[Callable[[Array], Params], Callable[[], Parameters]]:
  """The functions `init` and `parameters` of the parameters that `make` creates, for `extended`.

  `make` calls Haiku modules, or `layers.parameter` inside them.
  """
  declarations: dict[str, Declared] = {}  # by path

  def creator(create, shape, dtype, init, context):
    if isinstance(init, Declared):
      # Inside a layer stack, Haiku names modules relative to it.
      declarations[(context.lifted_prefix_name or '') + context.full_name] = init
    return create(shape, dtype, init)

  def noted():
    with hk.custom_creator(creator):
      make()

  @jax.jit
  def init(rng):
    return hk.transform_with_state(noted).init(rng)[0]

  def parameter(module, name, leaf):
    declared = declarations.get(f'{module}/{name}')
    if declared is None:
      return Parameter(leaf, None, None)
    stacked = ('layers',) * (len(leaf.shape) - len(declared.axes))
    return Parameter(leaf, stacked + declared.axes, declared.cast, declared.matrix)

  @functools.cache
  def parameters():
    with ambient.within(partitioner=None, time=(), weights=()):
      shapes = jax.eval_shape(init, jax.random.key(0))
    return hk.data_structures.map(parameter, shapes)

  return init, parameters
