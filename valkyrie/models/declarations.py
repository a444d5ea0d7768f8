"""The declared parameters of a model, from a trace of its initialization."""

from collections.abc import Callable, Mapping
import contextvars
import dataclasses
from typing import NamedTuple

import jax

from valkyrie.models.layers import recorded
from valkyrie.types import Axes, DType, Params


class Parameter(NamedTuple):
  """One parameter of a model.

  shape: its shape and dtype.
  axes: its logical axes, with the axis of the layer stack; None where its module declares none.
  cast: the dtype to which every use casts it: a copy in that dtype computes the same. None if it is
    used in float32.
  """

  shape: jax.ShapeDtypeStruct
  axes: Axes | None
  cast: DType | None


@dataclasses.dataclass(frozen=True)
class Kind:
  """What an optimizer distinguishes.

  is_matrix: whether the parameter has several dimensions in its own layer, and is no table with a
    vector for each token (a step touches only a few).
  stacked: its leading dimensions that are layers.
  in_planner: whether a planner has it.
  """

  is_matrix: bool
  stacked: int = 0
  in_planner: bool = False


def declared(init: Callable[[], Params]) -> Mapping[str, Mapping[str, Parameter]]:
  """The parameters that `init` makes, {module: {name: Parameter}}; nothing is computed."""

  def trace():
    made = {}
    recorded.set(made)
    return made, jax.eval_shape(init)

  made, shapes = contextvars.Context().run(trace)  # no mesh of the caller applies

  def find(module: str, name: str, leaf: jax.ShapeDtypeStruct) -> Parameter:
    # Inside a layer stack, Haiku names modules relative to it.
    known = [m for m, n in made if n == name and f'/{module}'.endswith(f'/{m}')]
    if not known:
      return Parameter(leaf, None, None)
    axes, cast = made[max(known, key=len), name]
    return Parameter(leaf, ('layers',) * (len(leaf.shape) - len(axes)) + axes, cast)

  return {
    module: {name: find(module, name, leaf) for name, leaf in leaves.items()}
    for module, leaves in shapes.items()
  }
