"""Operations of a traced function, with its loops multiplied out.

XLA's `cost_analysis` counts the body of a loop once. A jaxpr has the length of every scan, so a
product inside scans is counted as often as it is executed. Products that the backward pass
recomputes are counted again.
"""

import math
from typing import Any, NamedTuple

import jax
from jax.extend import core

# One operation per element of the output. Primitives that only move data count nothing.
_ARITHMETIC = """
abs acos acosh add add_any and asin asinh atan atan2 atanh ceil clamp cos cosh cumlogsumexp cummax
cummin cumprod cumsum digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt integer_pow
is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter not or pow rem round rsqrt
select_n sign sin sinh sqrt square sub tan tanh xor
"""
# One operation per element of the input.
_REDUCTIONS = """
argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum
"""

_Closed = core.ClosedJaxpr  # pyright: ignore[reportPrivateImportUsage]
_Jaxpr = core.Jaxpr | _Closed


class Operations(NamedTuple):
  """Sums over all devices.

  products: operations of matrix products and convolutions; a multiply-add is two.
  elementwise: elements that elementwise arithmetic writes or a reduction reads.
  loops_once: number of loops whose length is unknown before they run. Their body is counted once.
  """

  products: int = 0
  elementwise: int = 0
  loops_once: int = 0

  def plus(self, other: 'Operations', times: int = 1) -> 'Operations':
    """The sum of these operations and `times` times the other ones."""
    return Operations(
      self.products + times * other.products,
      self.elementwise + times * other.elementwise,
      self.loops_once + other.loops_once,
    )


def of_jaxpr(jaxpr: Any) -> Operations:
  """The operations of a jaxpr.

  The body of a scan is multiplied by its length, that of a `shard_map` by the number of devices of
  its mesh axes, and a Pallas kernel by the steps of its grid. A `cond` counts as its largest
  branch. Outside a `shard_map` shapes are global: operations that XLA's partitioner replicates are
  counted once.
  """
  total = Operations()
  for equation in (jaxpr.jaxpr if isinstance(jaxpr, _Closed) else jaxpr).eqns:
    total = total.plus(_of_equation(equation))
  return total


def _of_equation(equation: core.JaxprEqn) -> Operations:
  name, params = equation.primitive.name, equation.params
  if name in _PRODUCTS:
    return Operations(products=_PRODUCTS[name](equation))
  if name in _ARITHMETIC.split():
    return Operations(elementwise=sum(map(_count, equation.outvars)))
  if name in _REDUCTIONS.split():
    return Operations(elementwise=sum(map(_count, equation.invars)))
  if name == 'cond':
    branches = [of_jaxpr(branch) for branch in params['branches']]
    return max(branches, key=lambda branch: (branch.products, branch.elementwise))
  # The jaxpr of a `jit`, the cond and the body of a `while`; of an equation with a custom
  # derivative, that of its function. The rule is not a jaxpr.
  total = Operations(loops_once=int(name == 'while'))
  for jaxpr in jax.tree.leaves(list(params.values()), is_leaf=lambda x: isinstance(x, _Jaxpr)):
    if isinstance(jaxpr, _Jaxpr):
      total = total.plus(of_jaxpr(jaxpr), _times(name, params))
  return total


def _times(name: str, params: dict[str, Any]) -> int:
  """The number of executions of an equation's jaxpr, over all devices."""
  if name == 'scan':
    return params['length']
  if name == 'shard_map':
    return math.prod(params['mesh'].shape[axis] for axis in params['newly_manual_axes'])
  if name == 'pallas_call':
    return math.prod(params['grid_mapping'].grid)
  return 1


def _count(variable: Any) -> int:
  return math.prod(variable.aval.shape)


def _dot_general(equation: core.JaxprEqn) -> int:
  (contracted, _), _ = equation.params['dimension_numbers']
  (out,), left = equation.outvars, equation.invars[0].aval.shape  # type: ignore
  return 2 * _count(out) * math.prod(left[number] for number in contracted)


def _convolution(equation: core.JaxprEqn) -> int:
  """Each output element reads the whole kernel of its channel, padding included."""
  (out,), kernel = equation.outvars, equation.invars[1].aval.shape  # type: ignore
  channels = kernel[equation.params['dimension_numbers'].rhs_spec[0]]
  return 2 * _count(out) * math.prod(kernel) // channels


_PRODUCTS = {'dot_general': _dot_general, 'conv_general_dilated': _convolution}
