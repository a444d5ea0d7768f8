"""The diagonal recurrence of `scan` by kernels of Pallas, for NVIDIA GPUs: few passes over memory.

Time is cut into blocks, which all run at once, each step by step in registers. A first kernel finds
what each block ends with if it begins with zero. The same recurrence over these ends, with fewer
steps, gives what enters each block, and a second kernel goes on from there and writes the states:
the inputs are read twice, and the states are written once. `scan`'s associative form has the same
arithmetic, but XLA writes and reads parts of blocks between its steps.

The gradient is the recurrence in the other direction of time. Its second kernel sums the cotangent
of the growth in registers, too.

As in `scan`, no step rounds 1 + g, and a document start selects.
"""

from collections.abc import Callable, Sequence
import functools
import importlib
import math
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from valkyrie.models.recurrence.scan import Complex
from valkyrie.types import Array

BLOCK = 64  # steps of a block
_GROUP = 8  # steps whose inputs are read before the first of them is computed
_LANES = 128  # states of a program, one for each of its threads


class _Form(NamedTuple):
  """What the steps of a kernel do.

  adjoint: a step decays what it has added to, by the conjugate; otherwise it adds to what it has
    decayed.
  reverse: the last step is the first.
  interpret, block: see `scan`.
  """

  adjoint: bool
  reverse: bool
  interpret: bool
  block: int


class _Problem(NamedTuple):
  """A complex number is two planes.

  growth: [T, B, 2, P], or [1, 1, 2, P], the same at every step.
  reset: int32 [T, B], 1 where a document starts.
  inputs: [T, B, 2, P].
  initial: the state [B, 2, P] that enters.
  """

  growth: Array
  reset: Any
  inputs: Array
  initial: Array


def scan(
  growth: Complex,
  inputs: Complex,
  initial: Complex,
  reset: Array,
  *,
  interpret: bool = False,
  block: int = BLOCK,
) -> Complex:
  """The states [T, B, P], as those of `scan.diagonal_scan`, but for growths of [1, 1, P].

  Args:
    growth: [T, B, P], or [1, 1, P].
    inputs: [T, B, P].
    initial: the state [B, P] before the first step.
    reset: bool [T, B].
    interpret: in Pallas's interpreter, on any device, slowly.
    block: steps of a block, a power of two; fewer if the steps of a chunk are no multiple.
  """
  form = _Form(adjoint=False, reverse=False, interpret=interpret, block=block)
  problem = _Problem(
    growth=_planes(growth),
    reset=reset.astype(jnp.int32),
    inputs=_planes(inputs),
    initial=_planes(initial),
  )
  states: Any = _states(form, problem)
  return _complex(states)


def _planes(z: Complex) -> Array:
  """[..., P] -> [..., 2, P]. XLA sees through it if the parts are halves of one array."""
  pairs = jnp.concatenate(z, axis=-1)
  leading = pairs.shape[:-1]
  return pairs.reshape(*leading, 2, -1)


def _complex(planes: Array) -> Complex:
  leading = planes.shape[:-2]
  pairs = planes.reshape(*leading, -1)
  real, imaginary = jnp.split(pairs, 2, axis=-1)
  return Complex(real, imaginary)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _states(form, problem):
  states, _ = _forward(form, problem)
  return states


def _forward(form, problem):
  entering = _entering(form, problem)
  (states,) = _write(form, problem, entering)
  # A layer that saves them does not run the kernels again.
  entering = checkpoint_name(entering, 'states')
  states = checkpoint_name(states, 'states')
  residuals = (problem.growth, problem.reset, entering, states)
  return states, residuals


def _backward(form, residuals, cotangent):
  """With c the cotangent of the states, the cotangent of the inputs is h_t = c_t + k_{t+1}.

  k_t = keep_t conj(1 + g_t) h_t goes to the step before it, and k_1 to the initial state. The
  cotangent of g_t is keep_t conj(x_{t-1}) h_t.
  """
  growth, reset, *before = residuals
  form = form._replace(adjoint=True, reverse=True)
  nothing = jnp.zeros_like(cotangent[0])
  problem = _Problem(growth, reset, cotangent, nothing)
  entering = _entering(form, problem)
  adjoint, d_growth = _write(form, problem, entering, *before)
  if not _varies(growth):
    d_growth = jnp.sum(d_growth, axis=(0, 1), keepdims=True)
  first = _complex(adjoint[0])
  first_growth = _complex(growth[0])
  decayed = first + first_growth.conj() * first
  starts = reset[0, :, None]
  d_initial = _planes(_unless(starts, decayed))
  d_problem = _Problem(d_growth, None, adjoint, d_initial)
  return (d_problem,)


_states.defvjp(_forward, _backward)


def _unless(reset: Array, z: Complex) -> Complex:
  """z, or zero where `reset` is not 0."""
  return z.map(lambda part: jnp.where(reset == 0, part, 0))


def _varies(growth: Array) -> bool:
  """Whether steps, or rows, have growths of their own."""
  return growth.shape[:2] != (1, 1)


def _steps_of_block(form: _Form, time: int) -> int:
  block = math.gcd(time, form.block)
  if block == 1 or time <= 2 * form.block:
    return time
  return block


def _entering(form: _Form, problem: _Problem) -> Array:
  """What enters each block of N: [N, B, 2, P]."""
  time = len(problem.inputs)
  block = _steps_of_block(form, time)
  initial = problem.initial[None]
  if block == time:
    return initial
  ends, *growths = _ends(form, problem)
  if growths:
    (growth,) = growths
  else:
    growth = _repeated(form, problem.growth, block)
  reset = problem.reset
  rest = reset.shape[1:]
  reset_blocks = reset.reshape(-1, block, *rest)
  is_reset = jnp.max(reset_blocks, axis=1)
  blocks = _Problem(growth, is_reset, ends, problem.initial)
  form = form._replace(adjoint=False)
  entering_blocks = _entering(form, blocks)
  (after,) = _write(form, blocks, entering_blocks)
  if form.reverse:
    later = after[1:]
    return jnp.concatenate([later, initial])
  earlier = after[:-1]
  return jnp.concatenate([initial, earlier])


def _repeated(form: _Form, growth: Array, count: int) -> Array:
  """The growth over so many steps, a power of two: (1 + g)^2 = 1 + (2 g + g^2)."""
  g = _complex(growth)
  if form.adjoint:
    g = g.conj()
  for _ in range(count.bit_length() - 1):
    g = g + g + g * g
  return _planes(g)


def _ends(form: _Form, problem: _Problem) -> list[Array]:
  """The states after blocks that begin with zero, and growths if these differ: [N, B, 2, P]."""
  results = ['block']
  if _varies(problem.growth):
    results.append('block')
  kernel = functools.partial(_ends_kernel, form)
  operands = [problem.growth, problem.reset, problem.inputs]
  kinds = ['growth', 'reset', 'step']
  return _call(kernel, form, operands, kinds, results)


def _write(form: _Form, problem: _Problem, entering: Array, *before: Array) -> list[Array]:
  """The states [T, B, 2, P] of blocks that begin with `entering`, or their adjoints.

  With `before`, what entered the blocks of the states, and the states, also the cotangent of the
  growth: of each step, or, if it is the same at every step, the sums of blocks [N, B, 2, P].
  """
  operands = [problem.growth, problem.reset, problem.inputs, entering]
  kinds = ['growth', 'reset', 'step', 'block']
  results = ['step']
  kernel = functools.partial(_states_kernel, form)
  if before:
    operands += before
    kinds += ['block', 'step']
    kind_of_growth = 'step' if _varies(problem.growth) else 'block'
    results.append(kind_of_growth)
    kernel = functools.partial(_gradient_kernel, form)
  return _call(kernel, form, operands, kinds, results)


def _call(
  kernel: Callable[..., None],
  form: _Form,
  operands: Sequence[Array],
  kinds: Sequence[str],
  results: Sequence[str],
) -> list[Array]:
  """A kernel over all blocks, rows and groups of states."""
  pallas = importlib.import_module('jax.experimental.pallas')
  triton = importlib.import_module('jax.experimental.pallas.triton')
  inputs = operands[2]
  time, *rest = inputs.shape
  rows, _, states = rest
  block = _steps_of_block(form, time)
  blocks = time // block
  lanes = math.gcd(states, _LANES)
  step = pallas.BlockSpec((block, None, 2, lanes), lambda t, b, p: (t, b, 0, p))
  specs = {
    'step': step,
    'growth': step,
    'reset': pallas.BlockSpec((block, None), lambda t, b, p: (t, b)),
    'block': pallas.BlockSpec((None, None, 2, lanes), lambda t, b, p: (t, b, 0, p)),
  }
  if not _varies(operands[0]):
    specs['growth'] = pallas.BlockSpec((1, None, 2, lanes), lambda t, b, p: (0, 0, 0, p))
  sizes = {'step': time, 'block': blocks}
  out_shapes = []
  for kind in results:
    shape = (sizes[kind], *rest)
    out_shapes.append(jax.ShapeDtypeStruct(shape, inputs.dtype))
  warps = max(1, lanes // 32)
  name = kernel.func.__name__
  compiled = pallas.pallas_call(
    kernel,
    grid=(blocks, rows, states // lanes),
    in_specs=[specs[kind] for kind in kinds],
    out_specs=[specs[kind] for kind in results],
    out_shape=out_shapes,
    compiler_params=triton.CompilerParams(num_warps=warps),
    interpret=form.interpret,
    name=name.strip('_'),
  )
  return compiled(*operands)


def _ends_kernel(form, growth, reset, inputs, ends, *growth_of_block):
  zero = _zero(inputs)

  def visit(_, step, total_growth):
    further = step.growth + step.growth * total_growth
    return total_growth + further

  end, total_growth = _walk(form, growth, reset, inputs, zero, visit)
  _store(ends, end)
  for ref in growth_of_block:  # else what is not used is not computed
    _store(ref, total_growth)


def _states_kernel(form, growth, reset, inputs, entering, states):
  def visit(number, step, nothing):
    _store(states, step.emitted, number)
    return nothing

  state = _load(entering)
  _walk(form, growth, reset, inputs, state, visit)


def _gradient_kernel(form, growth, reset, inputs, entering, entered, states, adjoint, d_growth):
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
    product = _unless(step.reset, step.read.conj() * step.emitted)
    if varies:
      _store(d_growth, product, number)
      return total
    return total + product

  state = _load(entering)
  _, total = _walk(form, growth, reset, inputs, state, visit, read)
  if not varies:
    _store(d_growth, total)


class _Step(NamedTuple):
  growth: Complex  # the conjugate in an adjoint
  reset: Array
  inputs: Complex
  read: Any  # what the kernel reads besides
  emitted: Any = None


def _walk(form, growth, reset, inputs, state, visit, read=lambda step: None):
  """The steps of a block from `state` on -> (the state after them, what `visit` has gathered).

  `visit` takes the number of a step, its `_Step` and what was gathered, at first zero.
  """
  count = inputs.shape[0]
  group = math.gcd(count, _GROUP)
  groups = count // group
  varies = growth.shape[0] > 1

  def load(number):
    g = _load(growth, number if varies else 0)
    if form.adjoint:
      g = g.conj()
    return _Step(g, reset[number], _load(inputs, number), read(number))

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

  initial = (state, _zero(inputs))
  return lax.fori_loop(0, groups, in_group, initial)


def _step(form: _Form, step: _Step, state: Complex) -> tuple[Complex, Complex]:
  """(what a step emits, the state that it hands on)."""
  if form.adjoint:
    added = step.inputs + state
    decayed = added + step.growth * added
    return added, _unless(step.reset, decayed)
  kept = _unless(step.reset, state)
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
  planes[*step, 0] = z.re
  planes[*step, 1] = z.im
