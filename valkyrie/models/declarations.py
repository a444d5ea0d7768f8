"""Declarations of parameters by their modules, and the parameters of a model with these."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from valkyrie.types import Array, Axes, DType

FIRST_CARRY = 'first_carry'  # the first axis of a state that is learned, which is not a matrix


@dataclasses.dataclass(frozen=True)
class Declared:
  """A Haiku initializer, through which Haiku's getters and creators see a declaration.

  `matrix` makes of a parameter the matrix [D_in, D_out] by which it multiplies activations, if its
  module takes every kind of `matrices.Matrix`. With `in_blocks` it is the blocks [blocks, inputs,
  outputs] of a block-diagonal matrix that multiplies activations.
  """

  init: Callable  # gives the first values, in float32
  axes: Axes  # the logical axis of each dimension; None is never split
  cast: DType | None  # the dtype to which every use casts it; None if it is used in float32
  in_products: bool = False  # it is multiplied only by `matrices.products`
  matrix: Callable[[Array], Array] | None = None
  in_blocks: bool = False

  def __call__(self, shape: Sequence[int], dtype: DType) -> Array:
    return self.init(shape, jnp.float32).astype(dtype)


def stored_as(dtype: DType) -> Callable:
  """A Haiku creator that stores in this dtype the parameters that every use casts."""

  def creator(
    create,
    shape,
    own,
    init,
    context,
  ):
    is_cast = isinstance(init, Declared) and init.cast is not None
    return create(shape, dtype if is_cast else own, init)

  return creator


class Parameter(NamedTuple):
  """The shape and dtype of a parameter, and its declaration, see `Declared`.

  The axes begin with the layer stack's; they are None where the module declares none.
  """

  shape: jax.ShapeDtypeStruct
  axes: Axes | None
  cast: DType | None
  matrix: Callable[[Array], Array] | None = None
  in_blocks: bool = False


Parameters = Mapping[str, Mapping[str, Parameter]]  # {module: {name: its parameter}}


@dataclasses.dataclass(frozen=True)
class Kind:
  """What an optimizer distinguishes."""

  is_matrix: bool  # it has several dimensions in its own layer, and is no table and no state
  stacked: int = 0  # its leading dimensions that are layers
  part: str = ''  # the part of the model that has it, if that may rest
  rests: bool = False  # whether that part takes no part in the step
