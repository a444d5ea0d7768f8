"""The diagonal recurrence of `scan` by kernels of Pallas, for NVIDIA GPUs: few passes over memory.

Time is cut into blocks, which all run at once, each step by step in registers. A first kernel finds
what each block ends with if it begins with zero. The same recurrence over these ends, with fewer
steps, gives what enters each block, and a second kernel goes on from there and writes the states:
the inputs are read twice, and the states are written once. `scan`'s associative form has the same
arithmetic, but XLA writes and reads parts of blocks between its steps.

The gradient is the recurrence in the other direction of time. Its second kernel sums the cotangent
of the growth in registers, too.

Products read the states in a narrow dtype. The kernels write them so, beside the exact ones that
the gradient reads, and read a narrow cotangent: XLA would need another pass over memory to convert
what a kernel reads or writes.

As in `scan`, no step rounds 1 + g, and a document start selects.
"""

from collections.abc import Callable, Sequence
import functools
import importlib
import math
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from valkyrie.models.recurrence import scan_steps
from valkyrie.models.recurrence.scan import Complex, state_after
from valkyrie.models.recurrence.scan_steps import LAST, START, KernelForm, unless_start
from valkyrie.types import Array, DType

BLOCK = 64  # steps of a block
_LANES = 128  # states of a program, one for each of its threads


class _Problem(NamedTuple):
  """A complex number is two planes.

  growth: [T, B, 2, P], or [1, 1, 2, P], the same at every step.
  marks: int32 [T, B]: `START` where a document starts, `LAST` at the last step before padding.
  inputs: [T, B, 2, P], of growth's dtype or a narrower one.
  at_last: [B, 2, P], is added to the inputs of the steps that are marked as last ones.
  initial: the state [B, 2, P] that enters.
  """

  growth: Array
  marks: Any
  inputs: Array
  at_last: Array
  initial: Array


def scan(
  growth: Complex,
  inputs: Complex,
  initial: Complex,
  reset: Array,
  length: Array,
  dtype: DType,
  *,
  interpret: bool = False,
  block: int = BLOCK,
) -> tuple[Complex, Complex]:
  """(the states [T, B, P] in a dtype, the exact state [B, P] after `length`), see `scan.read`.

  Args:
    growth: [T, B, P], or [1, 1, P].
    inputs: [T, B, P].
    initial: the state [B, P] before the first step.
    reset: bool [T, B].
    length: int32 [B], the steps before padding.
    dtype: of the states; growth's, or a narrower one.
    interpret: in Pallas's interpreter, on any device, slowly.
    block: steps of a block, a power of two; fewer if the steps of a chunk are no multiple.
  """
  form = KernelForm(adjoint=False, reverse=False, dtype=dtype, interpret=interpret, block=block)
  time = len(reset)
  step = jnp.arange(time)[:, None]
  is_last = step == length[None] - 1
  starts = jnp.where(reset, START, 0)
  marks = starts + jnp.where(is_last, LAST, 0)
  entering = _planes(initial)
  problem = _Problem(
    growth=_planes(growth),
    marks=marks.astype(jnp.int32),
    inputs=_planes(inputs),
    at_last=jnp.zeros_like(entering),
    initial=entering,
  )
  results: Any = _states(form, problem, length)
  states, after = results
  return _complex(states), _complex(after)


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
def _states(form, problem, length):
  results, _ = _forward(form, problem, length)
  return results


def _forward(form, problem, length):
  entering = _entering(form, problem)
  states, *narrow = _write(form, problem, entering)
  after = state_after(states, problem.initial, length)
  # A layer that saves them does not run the kernels again.
  entering = checkpoint_name(entering, 'states')
  states = checkpoint_name(states, 'states')
  residuals = (problem.growth, problem.marks, length, entering, states)
  (for_products,) = narrow or [states]
  return (for_products, after), residuals


def _backward(form, residuals, cotangents):
  """With c the cotangent of the states, the cotangent of the inputs is h_t = c_t + k_{t+1}.

  k_t = keep_t conj(1 + g_t) h_t goes to the step before it, and k_1 to the initial state. The
  cotangent of g_t is keep_t conj(x_{t-1}) h_t.
  """
  growth, marks, length, *before = residuals
  of_states, of_after = cotangents
  form = form._replace(adjoint=True, reverse=True, dtype=growth.dtype)
  nothing = jnp.zeros_like(of_after)
  problem = _Problem(growth, marks, of_states, of_after, nothing)
  entering = _entering(form, problem)
  adjoint, d_growth = _write(form, problem, entering, *before)
  if not _varies(growth):
    d_growth = jnp.sum(d_growth, axis=(0, 1), keepdims=True)
  first = _complex(adjoint[0])
  first_growth = _complex(growth[0])
  decayed = first + first_growth.conj() * first
  first_marks = marks[0, :, None]
  d_initial = _planes(unless_start(first_marks, decayed))
  is_empty = length[:, None, None] == 0
  d_initial = jnp.where(is_empty, d_initial + of_after, d_initial)
  d_problem = _Problem(d_growth, None, adjoint, nothing, d_initial)
  return d_problem, None


_states.defvjp(_forward, _backward)


def _varies(growth: Array) -> bool:
  """Whether steps, or rows, have growths of their own."""
  return growth.shape[:2] != (1, 1)


def _steps_of_block(form: KernelForm, time: int) -> int:
  block = math.gcd(time, form.block)
  if block == 1 or time <= 2 * form.block:
    return time
  return block


def _entering(form: KernelForm, problem: _Problem) -> Array:
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
  starts = problem.marks & START
  rest = starts.shape[1:]
  starts_of_blocks = starts.reshape(-1, block, *rest)
  marks = jnp.max(starts_of_blocks, axis=1)
  nothing = jnp.zeros_like(problem.at_last)
  blocks = _Problem(growth, marks, ends, nothing, problem.initial)
  form = form._replace(adjoint=False, dtype=growth.dtype)
  entering_blocks = _entering(form, blocks)
  (after,) = _write(form, blocks, entering_blocks)
  if form.reverse:
    later = after[1:]
    return jnp.concatenate([later, initial])
  earlier = after[:-1]
  return jnp.concatenate([initial, earlier])


def _repeated(form: KernelForm, growth: Array, count: int) -> Array:
  """The growth over so many steps, a power of two: (1 + g)^2 = 1 + (2 g + g^2)."""
  g = _complex(growth)
  if form.adjoint:
    g = g.conj()
  for _ in range(count.bit_length() - 1):
    g = g + g + g * g
  return _planes(g)


def _ends(form: KernelForm, problem: _Problem) -> list[Array]:
  """The states after blocks that begin with zero, and growths if these differ: [N, B, 2, P]."""
  results = ['block']
  if _varies(problem.growth):
    results.append('block')
  kernel = functools.partial(scan_steps.ends_kernel, form)
  operands = [problem.growth, problem.marks, problem.inputs, problem.at_last]
  kinds = ['growth', 'mark', 'step', 'row']
  return _call(kernel, form, operands, kinds, results)


def _write(form: KernelForm, problem: _Problem, entering: Array, *before: Array) -> list[Array]:
  """The states [T, B, 2, P] of blocks that begin with `entering`, or their adjoints.

  If products read states of another dtype, also those. With `before`, what entered the blocks of
  the states, and the states, also the cotangent of the growth: of each step, or, if it is the same
  at every step, the sums of blocks [N, B, 2, P].
  """
  operands = [problem.growth, problem.marks, problem.inputs, problem.at_last, entering]
  kinds = ['growth', 'mark', 'step', 'row', 'block']
  results = ['step']
  if form.dtype != problem.growth.dtype:
    results.append('narrow')
  kernel = functools.partial(scan_steps.states_kernel, form)
  if before:
    operands += before
    kinds += ['block', 'step']
    kind_of_growth = 'step' if _varies(problem.growth) else 'block'
    results.append(kind_of_growth)
    kernel = functools.partial(scan_steps.gradient_kernel, form)
  return _call(kernel, form, operands, kinds, results)


def _call(
  kernel: Callable[..., None],
  form: KernelForm,
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
    'narrow': step,
    'growth': step,
    'mark': pallas.BlockSpec((block, None), lambda t, b, p: (t, b)),
    'row': pallas.BlockSpec((None, 2, lanes), lambda t, b, p: (b, 0, p)),
    'block': pallas.BlockSpec((None, None, 2, lanes), lambda t, b, p: (t, b, 0, p)),
  }
  growth = operands[0]
  if not _varies(growth):
    specs['growth'] = pallas.BlockSpec((1, None, 2, lanes), lambda t, b, p: (0, 0, 0, p))
  shapes = {
    'step': jax.ShapeDtypeStruct((time, *rest), growth.dtype),
    'narrow': jax.ShapeDtypeStruct((time, *rest), form.dtype),
    'block': jax.ShapeDtypeStruct((blocks, *rest), growth.dtype),
  }
  warps = max(1, lanes // 32)
  name = kernel.func.__name__
  compiled = pallas.pallas_call(
    kernel,
    grid=(blocks, rows, states // lanes),
    in_specs=[specs[kind] for kind in kinds],
    out_specs=[specs[kind] for kind in results],
    out_shape=[shapes[kind] for kind in results],
    compiler_params=triton.CompilerParams(num_warps=warps),
    interpret=form.interpret,
    name=name,
  )
  return compiled(*operands)
