"""Declarations of parameters by their modules, and the parameters of a model with these."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp

from valkyrie.types import Array, Axes, DType, Params


@dataclasses.dataclass(frozen=True)
class Declared:
  """A Haiku initializer, through which Haiku's getters and creators see a declaration.

  Attributes:
    init: gives the first values, in float32.
    axes: the logical axis of each dimension; None is never split.
    cast: the dtype to which every use casts the parameter; None if it is used in float32.
    in_products: whether only `layers.products` uses it, which takes an `Adapted` matrix, too.
    matrix: the matrix [D_in, D_out] by which it multiplies activations, as a function of it, where
      its uses go through `layers.behind`; None without.
  """

  init: Callable
  axes: Axes
  cast: DType | None
  in_products: bool = False
  matrix: Callable[[Array], Array] | None = None

  def __call__(self, shape: Sequence[int], dtype: DType) -> Array:
    return self.init(shape, jnp.float32).astype(dtype)


@dataclasses.dataclass(frozen=True)
class Adapted:
  """A matrix W + A B, kept apart: a small A B would vanish in the rounding of their sum."""

  whole: Array
  down: Array
  up: Array

  @property
  def shape(self) -> tuple[int, ...]:
    """The shape of W."""
    return self.whole.shape


class Masks(NamedTuple):
  """Of the tokens of a site.

  components: m [..., C]; delta: d [...]; route: q [...], bool, where false the matrix is as it was.
  """

  components: Array
  delta: Array
  route: Array


@dataclasses.dataclass(frozen=True)
class Decomposed:
  """A site: the matrix as stored, its factors, its masks if it is live, and who gets its inputs."""

  whole: Array
  v: Array
  u: Array
  masks: Masks | None
  note: Callable[[Array], None]

  @property
  def shape(self) -> tuple[int, ...]:
    """The shape of the matrix, as stored."""
    return self.whole.shape


def stored_as(dtype: DType) -> Callable:
  """A Haiku creator that stores in this dtype the parameters that every use casts."""

  def creator(create, shape, own, init, context):
    del context
    cast = init.cast if isinstance(init, Declared) else None
    return create(shape, own if cast is None else dtype, init)

  return creator


class Parameter(NamedTuple):
  """The shape and dtype of a parameter, and its `axes`, `cast` and `matrix`, see `Declared`.

  The axes begin with the layer stack's; they are None where the module declares none.
  """

  shape: jax.ShapeDtypeStruct
  axes: Axes | None
  cast: DType | None
  matrix: Callable[[Array], Array] | None = None


@dataclasses.dataclass(frozen=True)
class Kind:
  """What an optimizer distinguishes.

  is_matrix: whether it has several dimensions in its own layer, and no vector for each token.
  stacked: its leading dimensions that are layers.
  in_planner: whether a planner has it.
  """

  is_matrix: bool
  stacked: int = 0
  in_planner: bool = False


class Declarations(dict[str, Declared]):
  """The declarations of the parameters that were created, by path."""

  def creator(self, create, shape, dtype, init, context: hk.GetterContext) -> Array:
    """A Haiku creator that adds what it sees."""
    if isinstance(init, Declared):
      # Inside a layer stack, Haiku names modules relative to it.
      self[(context.lifted_prefix_name or '') + context.full_name] = init
    return create(shape, dtype, init)

  def parameters(self, shapes: Params) -> Mapping[str, Mapping[str, Parameter]]:
    """The parameters of these shapes, {module: {name: Parameter}}."""

    def parameter(path: str, leaf: jax.ShapeDtypeStruct) -> Parameter:
      if path not in self:
        return Parameter(leaf, None, None)
      axes = self[path].axes
      stacked = ('layers',) * (len(leaf.shape) - len(axes))
      return Parameter(leaf, stacked + axes, self[path].cast, self[path].matrix)

    return {
      module: {name: parameter(f'{module}/{name}', leaf) for name, leaf in leaves.items()}
      for module, leaves in shapes.items()
    }
