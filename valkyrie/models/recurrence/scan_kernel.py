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
  given = _Problem(_planes(growth), reset.astype(jnp.int32), _planes(inputs), _planes(initial))
  return _complex(_states(form, given))


def _planes(z: Complex) -> Array:
  """[..., P] -> [..., 2, P]. XLA sees through it if the parts are halves of one array."""
  pairs = jnp.concatenate(z, axis=-1)
  return pairs.reshape(*pairs.shape[:-1], 2, -1)


def _complex(planes: Array) -> Complex:
  pairs = planes.reshape(*planes.shape[:-2], -1)
  real, imaginary = jnp.split(pairs, 2, axis=-1)
  return Complex(real, imaginary)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _states(form, given):
  states, _ = _forward(form, given)
  return states


def _forward(form, given):
  entering = _entering(form, given)
  (states,) = _write(form, given, entering)
  return states, (given.growth, given.reset, entering, states)


def _backward(form, residuals, cotangent):
  """With c the cotangent of the states, that of the inputs is h_t = c_t + k_{t+1}.

  k_t = keep_t conj(1 + g_t) h_t goes to the step before it, and k_1 to the initial state. The
  cotangent of g_t is keep_t conj(x_{t-1}) h_t.
  """
  growth, reset, *before = residuals
  form = form._replace(adjoint=True, reverse=True)
  given = _Problem(growth, reset, cotangent, jnp.zeros_like(cotangent[0]))
  entering = _entering(form, given)
  adjoint, d_growth = _write(form, given, entering, *before)
  if not _varies(growth):
    d_growth = jnp.sum(d_growth, axis=(0, 1), keepdims=True)
  first = _complex(adjoint[0])
  decayed = first + _complex(growth[0]).conj() * first
  d_initial = _planes(_unless(reset[0, :, None], decayed))
  return (_Problem(d_growth, None, adjoint, d_initial),)


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


def _entering(form: _Form, given: _Problem) -> Array:
  """What enters each block of N: [N, B, 2, P]."""
  time = len(given.inputs)
  block = _steps_of_block(form, time)
  if block == time:
    return given.initial[None]
  ends, *growth = _ends(form, given)
  if not growth:
    growth = [_repeated(form, given.growth, block)]
  reset = given.reset.reshape(-1, block, *given.reset.shape[1:])
  blocks = _Problem(growth[0], jnp.max(reset, axis=1), ends, given.initial)
  form = form._replace(adjoint=False)
  (after,) = _write(form, blocks, _entering(form, blocks))
  if form.reverse:
    return jnp.concatenate([after[1:], given.initial[None]])
  return jnp.concatenate([given.initial[None], after[:-1]])


def _repeated(form: _Form, growth: Array, count: int) -> Array:
  """The growth over so many steps, a power of two: (1 + g)^2 = 1 + (2 g + g^2)."""
  g = _complex(growth)
  if form.adjoint:
    g = g.conj()
  for _ in range(count.bit_length() - 1):
    g = g + g + g * g
  return _planes(g)


def _ends(form: _Form, given: _Problem) -> list[Array]:
  """The states after blocks that begin with zero, and growths if these differ: [N, B, 2, P]."""
  results = ['block'] * (1 + _varies(given.growth))
  kernel = functools.partial(_ends_kernel, form)
  operands = [given.growth, given.reset, given.inputs]
  return _call(kernel, form, operands, ['growth', 'reset', 'step'], results)


def _write(form: _Form, given: _Problem, entering: Array, *before: Array) -> list[Array]:
  """The states [T, B, 2, P] of blocks that begin with `entering`, or their adjoints.

  With `before`, what entered the blocks of the states, and the states, also the cotangent of the
  growth: of each step, or, if it is the same at every step, the sums of blocks [N, B, 2, P].
  """
  operands = [given.growth, given.reset, given.inputs, entering, *before]
  kinds = ['growth', 'reset', 'step', 'block', 'block', 'step'][: len(operands)]
  results = ['step']
  kernel = functools.partial(_states_kernel, form)
  if before:
    results.append('step' if _varies(given.growth) else 'block')
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
  time, rows, _, states = inputs.shape
  block = _steps_of_block(form, time)
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
  sizes = {'step': time, 'block': time // block}
  return pallas.pallas_call(
    kernel,
    grid=(time // block, rows, states // lanes),
    in_specs=[specs[kind] for kind in kinds],
    out_specs=[specs[kind] for kind in results],
    out_shape=[
      jax.ShapeDtypeStruct((sizes[kind], *inputs.shape[1:]), inputs.dtype) for kind in results
    ],
    compiler_params=triton.CompilerParams(num_warps=max(1, lanes // 32)),
    interpret=form.interpret,
    name=kernel.func.__name__.strip('_'),
  )(*operands)


def _ends_kernel(form, growth, reset, inputs, ends, *growth_of_block):
  zero = _zero(inputs)

  def visit(step, now, over):
    return over + (now.growth + now.growth * over)

  end, over = _walk(form, growth, reset, inputs, zero, visit)
  _store(ends, end)
  for ref in growth_of_block:  # else what is not used is not computed
    _store(ref, over)


def _states_kernel(form, growth, reset, inputs, entering, states):
  def visit(step, now, nothing):
    _store(states, now.emitted, step)
    return nothing

  _walk(form, growth, reset, inputs, _load(entering), visit)


def _gradient_kernel(form, growth, reset, inputs, entering, entered, states, adjoint, d_growth):
  varies = len(d_growth.shape) == 3
  before_block = _load(entered)

  def read(step):
    """The state before a step."""
    before = _load(states, jnp.maximum(step - 1, 0))
    return jax.tree.map(functools.partial(jnp.where, step == 0), before_block, before)

  def visit(step, now, total):
    _store(adjoint, now.emitted, step)
    product = _unless(now.reset, now.read.conj() * now.emitted)
    if varies:
      _store(d_growth, product, step)
      return total
    return total + product

  _, total = _walk(form, growth, reset, inputs, _load(entering), visit, read)
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
  steps = inputs.shape[0]
  group = math.gcd(steps, _GROUP)
  groups = steps // group
  varies = growth.shape[0] > 1

  def now(step):
    g = _load(growth, step if varies else 0)
    if form.adjoint:
      g = g.conj()
    return _Step(g, reset[step], _load(inputs, step), read(step))

  def in_group(number, carried):
    state, gathered = carried
    if form.reverse:
      number = groups - 1 - number
    numbers = [group * number + n for n in range(group)]
    if form.reverse:
      numbers.reverse()
    for step, of_step in zip(numbers, list(map(now, numbers)), strict=True):
      emitted, state = _step(form, of_step, state)
      gathered = visit(step, of_step._replace(emitted=emitted), gathered)
    return state, gathered

  return lax.fori_loop(0, groups, in_group, (state, _zero(inputs)))


def _step(form: _Form, now: _Step, state: Complex) -> tuple[Complex, Complex]:
  """(what a step emits, the state that it hands on)."""
  if form.adjoint:
    added = now.inputs + state
    return added, _unless(now.reset, added + now.growth * added)
  kept = _unless(now.reset, state)
  after = kept + (now.inputs + now.growth * kept)
  return after, after


def _zero(planes: Any) -> Complex:
  zero = jnp.zeros(planes.shape[-1], planes.dtype)
  return Complex(zero, zero)


def _load(planes: Any, *step: Any) -> Complex:
  return Complex(planes[*step, 0], planes[*step, 1])


def _store(planes: Any, z: Complex, *step: Any) -> None:
  planes[*step, 0] = z.re
  planes[*step, 1] = z.im
