"""Operations that a traced function does, with its loops multiplied out.

XLA's own `cost_analysis` counts the body of a loop once. A jaxpr says how long every scan is, so
here a product inside of scans counts as often as it is done, and one that the backward pass
recomputes counts again: it is work that is executed, though not work that the model is.
"""

from collections.abc import Iterator
import math
from typing import Any, NamedTuple

import jax
from jax.extend import core

# One operation for each number that they make. What only moves numbers is not work.
_ELEMENTWISE = """
abs acos acosh add add_any and asin asinh atan atan2 atanh ceil clamp cos cosh cumlogsumexp cummax
cummin cumprod cumsum digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt integer_pow
is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter not or pow rem round rsqrt
select_n sign sin sinh sqrt square sub tan tanh xor
"""
# One for each number that they read.
_REDUCTIONS = (
  'argmax',
  'argmin',
  'reduce_and',
  'reduce_max',
  'reduce_min',
  'reduce_or',
  'reduce_prod',
  'reduce_sum',
)


_Closed = core.ClosedJaxpr  # pyright: ignore[reportPrivateImportUsage]
_Jaxpr = core.Jaxpr | _Closed


class Operations(NamedTuple):
  """Sums over all devices.

  products: multiplications and additions of matrix products and convolutions, two for each pair.
  elementwise: one for each number that arithmetic makes or a reduction reads.
  loops_once: loops of a length that is known only when they run, which are counted once.
  """

  products: int = 0
  elementwise: int = 0
  loops_once: int = 0

  def plus(self, other: 'Operations', times: int = 1) -> 'Operations':
    """This, and `times` times the other."""
    return Operations(
      self.products + times * other.products,
      self.elementwise + times * other.elementwise,
      self.loops_once + other.loops_once,
    )


def of_jaxpr(jaxpr: Any) -> Operations:
  """The operations of a jaxpr.

  Scans count with their length, a `cond` as its largest branch, a `shard_map` once for each device
  of the mesh axes that it is over, and a Pallas kernel once for each step of its grid. Outside of a
  `shard_map` shapes are those of the whole program: what XLA's partitioner would do more than once
  is not seen here.
  """
  total = Operations()
  for equation in (jaxpr.jaxpr if isinstance(jaxpr, _Closed) else jaxpr).eqns:
    total = total.plus(_of_equation(equation))
  return total


def _of_equation(equation: core.JaxprEqn) -> Operations:
  name, params = equation.primitive.name, equation.params
  if name in _PRODUCTS:
    return Operations(products=_PRODUCTS[name](equation))
  if name in _ARITHMETIC or name in _REDUCTIONS:
    counted = equation.outvars if name in _ARITHMETIC else equation.invars
    return Operations(elementwise=sum(map(_count, counted)))
  if name == 'cond':
    branches = [of_jaxpr(branch) for branch in params['branches']]
    return max(branches, key=lambda branch: (branch.products, branch.elementwise))
  inner = Operations(loops_once=int(name == 'while'))
  for jaxpr in _jaxprs(params):
    inner = inner.plus(of_jaxpr(jaxpr))
  return Operations().plus(inner, _times(name, params))


def _times(name: str, params: dict[str, Any]) -> int:
  """How often, on all devices together, an equation does what its jaxpr says."""
  if name == 'scan':
    return params['length']
  if name == 'shard_map':
    return math.prod(params['mesh'].shape[axis] for axis in params['newly_manual_axes'])
  if name == 'pallas_call':
    return math.prod(params['grid_mapping'].grid)
  return 1


def _jaxprs(params: dict[str, Any]) -> Iterator[Any]:
  """The jaxprs of an equation that are run: that of a `jit`, the cond and the body of a `while`.

  A custom derivative rule holds its function as it was and, until it is differentiated, a rule that
  is not a jaxpr.
  """
  for leaf in jax.tree.leaves(list(params.values()), is_leaf=lambda x: isinstance(x, _Jaxpr)):
    if isinstance(leaf, _Jaxpr):
      yield leaf


def _count(variable: Any) -> int:
  return math.prod(variable.aval.shape)


def _dot_general(equation: core.JaxprEqn) -> int:
  (contracted, _), _ = equation.params['dimension_numbers']
  (out,), left = equation.outvars, equation.invars[0].aval.shape  # type: ignore
  return 2 * _count(out) * math.prod(left[number] for number in contracted)


def _convolution(equation: core.JaxprEqn) -> int:
  """Every number of the output reads the whole kernel of its channel, padding included."""
  (out,), kernel = equation.outvars, equation.invars[1].aval.shape  # type: ignore
  channels = kernel[equation.params['dimension_numbers'].rhs_spec[0]]
  return 2 * _count(out) * math.prod(kernel) // channels


_ARITHMETIC = frozenset(_ELEMENTWISE.split())
_PRODUCTS = {'dot_general': _dot_general, 'conv_general_dilated': _convolution}
