"""Matrices that multiply activations: plain, adapted, decomposed, and in 8 bits (`quantization`).

Every kind of matrix has the array that is stored, and says how a product with this array becomes
the product with the matrix. So a module multiplies by a matrix without asking for its kind: by
`products`, or by a product of its own, followed by `Matrix.adjust`.
"""

from collections.abc import Callable, Sequence
import dataclasses
import itertools
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np

from valkyrie.models.precision import matmul, wide
from valkyrie.sharding.split_products import split_product
from valkyrie.types import Array, Axes, DType


def unchanged(x: Any) -> Any:
  """x itself."""
  return x


class Layout(NamedTuple):
  """How the inputs and the results of a module's own product are arranged.

  inputs: makes rows [..., D_in] of the inputs.
  results: makes rows [..., D_out] of the results.
  from_rows: the inverse of `results`.
  """

  inputs: Callable[[Any], Array] = unchanged
  results: Callable[[Any], Array] = unchanged
  from_rows: Callable[[Array], Any] = unchanged


ROWS = Layout()


@dataclasses.dataclass(frozen=True)
class Matrix:
  """A matrix W [D_in, D_out] that is used as it is stored."""

  whole: Any  # W as stored; the arrays that make up W, where a module has its own product

  is_changed: ClassVar[bool] = False  # whether `adjust` changes a product

  @property
  def shape(self) -> tuple[int, ...]:
    """The shape of the stored array, which Haiku compares with the shape that a module asks for."""
    return self.whole.shape

  def sum_dtype(self, dtype: DType) -> DType:
    """The dtype of the product with the stored array, for a result of this dtype."""
    return dtype

  def adjust(
    self,
    x: Any,
    y: Any,
    axes: Axes = (None, None),
    *,
    layout: Layout = ROWS,
    scale: Callable[[Array], Array] = unchanged,
  ) -> Any:
    """The product of x with this matrix, from the product y with the stored array.

    Args:
      axes: the logical axes of W.
      layout: of x and y.
      scale: what y has besides x W: a linear function of rows [..., D_out].
    """
    return y

  @classmethod
  def multiply(
    cls,
    x: Array,
    groups: Sequence[Sequence['Matrix']],
    axes: Axes,
    dtype: DType,
  ) -> list[Array]:
    """The products of x [..., D_in] with the stored arrays of each group, side by side."""
    stored = [_stored(group) for group in groups]

    def product(x, stored):
      side_by_side = jnp.concatenate(stored, axis=1)
      y = matmul(x, side_by_side, dtype)
      return split_columns(y, stored)

    return split_product(product, x, stored, axes)


class _Changed(Matrix):
  """A matrix that differs from the stored array; its kinds define `_change`."""

  is_changed = True

  def adjust(
    self,
    x,
    y,
    axes=(None, None),
    *,
    layout=ROWS,
    scale=unchanged,
  ):
    """See `Matrix.adjust`."""
    rows = layout.results(y)
    inputs = layout.inputs(x)
    changed = self._change(inputs, rows, axes, scale)
    return layout.from_rows(changed)

  def _change(
    self,
    x: Array,
    y: Array,
    axes: Axes,
    scale: Callable[[Array], Array],
  ) -> Array:
    """`adjust` of rows. It acts on activations, so no second matrix of this size is made."""
    raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Adapted(_Changed):
  """A matrix W + A B, kept apart: a small A B would vanish in the rounding of their sum."""

  down: Array  # A [D_in, rank]
  up: Array  # B [rank, D_out]

  def sum_dtype(self, dtype: DType) -> DType:
    """Wide: the sum is rounded once, so that A B has an effect as exact as the products are."""
    return wide(dtype)

  def _change(
    self,
    x,
    y,
    axes,
    scale,
  ):
    axis_in, axis_out = axes
    low = split_product(matmul, x, self.down, (axis_in, None))

    def outwards(low, up):
      return matmul(low, up, y.dtype)

    adaptation = split_product(outwards, low, self.up, (None, axis_out))
    return y + scale(adaptation)


class Masks(NamedTuple):
  """The masks of a site's tokens, see `sites`."""

  components: Array  # m [..., C]
  delta: Array  # d [...]
  route: Array  # q [...], bool: where it is false, the product is x W


@dataclasses.dataclass(frozen=True)
class Decomposed(_Changed):
  """A site of a decomposition: a matrix beside the factors of its components, see `sites`."""

  v: Array  # V [D_in, C]
  u: Array  # U [C, D_out]
  masks: Masks | None  # without masks, the product is x W
  note: Callable[[Array], None]  # is called with what the site multiplies

  def _change(
    self,
    x,
    y,
    axes,
    scale,
  ):
    self.note(x)
    if self.masks is None:
      return y
    components, delta, route = self.masks
    axis_in, axis_out = axes
    v_axes = (axis_in, component_axis(axis_in))
    u_axes = (component_axis(axis_out), axis_out)
    delta = delta[..., None].astype(y.dtype)

    def outwards(inner, u):
      return matmul(inner, u, y.dtype)

    inner = split_product(matmul, x, self.v, v_axes)
    # ((x V) m) U + d (x W - (x V) U) with one product by U.
    factor = components - delta
    inner = inner * factor.astype(inner.dtype)
    low = split_product(outwards, inner, self.u, u_axes)
    is_masked = route[..., None]
    masked = delta * y + scale(low)
    return jnp.where(is_masked, masked, y)


def component_axis(other: str | None) -> str:
  """The logical axis of a factor's components: one that layouts split unlike the `other` axis."""
  return 'mlp' if other == 'embed' else 'embed'


def as_matrix(w: Matrix | Array) -> Matrix:
  """The matrix itself, or an array as a plain matrix."""
  if isinstance(w, Matrix):
    return w
  return Matrix(w)


Group = Matrix | Array | Sequence[Matrix | Array]


def products(
  x: Array,
  weights: Sequence[Group],
  axes: Axes = (None, None),
  out_dtype: DType | None = None,
) -> list[Array]:
  """x [..., D_in] @ w for each weight w [D_in, width], cast to x's dtype, in one matrix product.

  Side by side the weights make one wide product, with one sum in the backward pass; a product for
  each would read x again and write its gradient again.

  The results of several weights in one entry stand side by side in one. `axes` are the logical axes
  of the weights, by which `split_product` splits their product.
  """
  groups = [_matrices(entry) for entry in weights]
  matrices = list(itertools.chain.from_iterable(groups))
  dtype: DType = x.dtype
  if out_dtype is not None:
    dtype = out_dtype
  sum_dtypes = [w.sum_dtype(dtype) for w in matrices]
  sum_dtype = jnp.result_type(*sum_dtypes)
  # The matrices of one module are of one kind, or are stored in the same way.
  results = matrices[0].multiply(x, groups, axes, sum_dtype)
  if not any(w.is_changed for w in matrices):
    return results

  def adjusted(group, y):
    columns = split_columns(y, group)
    pairs = zip(group, columns, strict=True)
    parts = [w.adjust(x, part, axes) for w, part in pairs]
    joined = _joined(parts, axis=-1)
    return joined.astype(dtype)

  return [adjusted(group, y) for group, y in zip(groups, results, strict=True)]


def _matrices(entry: Group) -> list[Matrix]:
  if isinstance(entry, Sequence):
    return [as_matrix(w) for w in entry]
  return [as_matrix(entry)]


def split_columns(y: Array, weights: Sequence[Any]) -> list[Array]:
  """The columns of a product with matrices side by side, for each of the matrices."""
  widths = [w.shape[1] for w in weights]
  ends = np.cumsum(widths)
  return jnp.split(y, ends[:-1], axis=-1)


def _stored(group: Sequence[Matrix]) -> Array:
  arrays = [w.whole for w in group]
  return _joined(arrays, axis=1)


def _joined(parts: Sequence[Array], axis: int) -> Array:
  if len(parts) == 1:
    return parts[0]
  return jnp.concatenate(parts, axis=axis)
