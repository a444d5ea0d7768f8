"""The kernels of `scan_kernel`: a block of the recurrence, step by step in registers.

In each, refs are arrays in memory: growth [steps or 1, 2, P], marks [steps], inputs [steps, 2, P],
`at_last` and what enters the block [2, P], see `scan_kernel`.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from valkyrie.models.recurrence.scan import Complex
from valkyrie.types import Array, DType

_GROUP = 8  # steps whose inputs are read before the first of them is computed
# Bits of a step's mark: a document starts there; it is the last step before padding.
START = 1
LAST = 2


class KernelForm(NamedTuple):
  """What the steps of a kernel do.

  adjoint: a step decays what it has added to, by the conjugate; otherwise it adds to what it has
    decayed.
  reverse: the last step is the first.
  dtype: of the states for products.
  interpret, block: see `scan_kernel.scan`.
  """

  adjoint: bool
  reverse: bool
  dtype: DType
  interpret: bool
  block: int


def unless_start(marks: Array, z: Complex) -> Complex:
  """z, or zero where a document starts."""
  continues = marks & START == 0
  return z.map(lambda part: jnp.where(continues, part, 0))


def ends_kernel(form, growth, marks, inputs, at_last, ends, *growth_of_block):
  """Writes what a block that begins with zero ends with [2, P], and its whole growth if asked."""
  zero = _zero(growth)

  def visit(_, step, total_growth):
    further = step.growth + step.growth * total_growth
    return total_growth + further

  end, total_growth = _walk(form, growth, marks, inputs, at_last, zero, visit)
  _store(ends, end)
  for ref in growth_of_block:  # else what is not used is not computed
    _store(ref, total_growth)


def states_kernel(form, growth, marks, inputs, at_last, entering, *results):
  """Writes the states [steps, 2, P] of a block into each of the results, in its dtype."""

  def visit(number, step, nothing):
    for states in results:
      _store(states, step.emitted, number)
    return nothing

  state = _load(entering)
  _walk(form, growth, marks, inputs, at_last, state, visit)


def gradient_kernel(
  form,
  growth,
  marks,
  inputs,
  at_last,
  entering,
  entered,
  states,
  adjoint,
  d_growth,
):
  """Writes the adjoints of a block, and the cotangent of its growth: of each step, or summed."""
  varies = len(d_growth.shape) == 3
  before_block = _load(entered)

  def read(number):
    """The state before a step."""
    last = jnp.maximum(number - 1, 0)
    before = _load(states, last)
    select = functools.partial(jnp.where, number == 0)
    return jax.tree.map(select, before_block, before)

  def visit(number, step, total):
    _store(adjoint, step.emitted, number)
    product = unless_start(step.marks, step.read.conj() * step.emitted)
    if varies:
      _store(d_growth, product, number)
      return total
    return total + product

  state = _load(entering)
  _, total = _walk(form, growth, marks, inputs, at_last, state, visit, read)
  if not varies:
    _store(d_growth, total)


class _Step(NamedTuple):
  growth: Complex  # the conjugate in an adjoint
  marks: Array
  inputs: Complex
  read: Any  # what the kernel reads besides
  emitted: Any = None


def _walk(
  form,
  growth,
  marks,
  inputs,
  at_last,
  state,
  visit,
  read=lambda step: None,
):
  """The steps of a block from `state` on -> (the state after them, what `visit` has gathered).

  `visit` takes the number of a step, its `_Step` and what was gathered, at first zero.
  """
  count = inputs.shape[0]
  group = math.gcd(count, _GROUP)
  groups = count // group
  varies = growth.shape[0] > 1
  zero = _zero(growth)
  added_at_last = _load(at_last)

  def load(number):
    g = _load(growth, number if varies else 0)
    if form.adjoint:
      g = g.conj()
    mark = marks[number]
    is_last = mark & LAST != 0
    added = added_at_last.map(lambda part: jnp.where(is_last, part, 0))
    values = added + _load(inputs, number).map(lambda part: part.astype(g.re.dtype))
    return _Step(g, mark, values, read(number))

  def in_group(index, carried):
    state, gathered = carried
    if form.reverse:
      index = groups - 1 - index
    numbers = [group * index + n for n in range(group)]
    if form.reverse:
      numbers.reverse()
    steps = [load(number) for number in numbers]
    for number, step in zip(numbers, steps, strict=True):
      emitted, state = _step(form, step, state)
      emitting = step._replace(emitted=emitted)
      gathered = visit(number, emitting, gathered)
    return state, gathered

  initial = (state, zero)
  return lax.fori_loop(0, groups, in_group, initial)


def _step(form: KernelForm, step: _Step, state: Complex) -> tuple[Complex, Complex]:
  """(what a step emits, the state that it hands on)."""
  if form.adjoint:
    added = step.inputs + state
    decayed = added + step.growth * added
    return added, unless_start(step.marks, decayed)
  kept = unless_start(step.marks, state)
  change = step.inputs + step.growth * kept
  after = kept + change
  return after, after


def _zero(planes: Any) -> Complex:
  zero = jnp.zeros(planes.shape[-1], planes.dtype)
  return Complex(zero, zero)


def _load(planes: Any, *step: Any) -> Complex:
  real = planes[*step, 0]
  imaginary = planes[*step, 1]
  return Complex(real, imaginary)


def _store(planes: Any, z: Complex, *step: Any) -> None:
  planes[*step, 0] = z.re.astype(planes.dtype)
  planes[*step, 1] = z.im.astype(planes.dtype)
