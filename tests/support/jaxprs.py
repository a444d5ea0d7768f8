"""Equations and sizes of jaxprs."""

from collections.abc import Iterator

import jax
from jax.extend import core
import numpy as np


def size(variable: core.Var) -> int:
  """The number of elements of a variable."""
  return int(np.prod(variable.aval.shape, dtype=np.int64))


def sizes(jaxpr: core.Jaxpr) -> Iterator[int]:
  """The number of elements of every value in a jaxpr, including those inside its loops."""
  for equation in equations(jaxpr):
    yield from map(size, equation.outvars)


def equations(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
  """All equations of a jaxpr; those inside its loops and branches once each."""
  for equation in jaxpr.eqns:
    yield equation
    for inner in jax.tree.leaves(tuple(equation.params.values())):
      if isinstance(inner, core.ClosedJaxpr):
        yield from equations(inner.jaxpr)
      elif isinstance(inner, core.Jaxpr):
        yield from equations(inner)
