"""Truncated backpropagation through time over the chunks of a row.

A step reads N chunks of C tokens. The carry passes through all chunks. The gradient passes through
groups of `backprop_chunks` consecutive chunks, and is cut between groups:

    carry -> [chunk, chunk, ...] -> | -> [chunk, chunk, ...] -> | -> ... -> carry of the next step
              gradient flows       cut

One group of all N chunks gives the exact gradient of the step. The loss of each group is divided by
the weight of the whole step, which is known beforehand, so gradients add up in one pass.
"""

from collections.abc import Callable
import functools
from typing import Any

import haiku as hk
import jax
from jax import lax
import jax.numpy as jnp

from valkyrie.models.model import Model
from valkyrie.sharding.sequence_parallel import is_over_time
from valkyrie.training import rewinding, rounding
from valkyrie.training.objective import PREDICTION, Sums, Terms, read
from valkyrie.types import Array, Batch, Carry, Params

Learns = Callable[[str, str], bool]  # whether a parameter learns, by its module and its name


def split_chunks(batch: Batch, chunk_size: int) -> Batch:
  """[B, N·C] -> [N, B, C]."""

  def split(leaf):
    in_chunks = leaf.reshape(leaf.shape[0], -1, chunk_size)
    return jnp.moveaxis(in_chunks, 1, 0)

  return jax.tree.map(split, batch)


def gradients(
  model: Model,
  params: Params,
  carry: Carry,
  batch: Batch,
  total: Array,
  rng: Array | None = None,
  *,
  chunk_size: int,
  backprop_chunks: int,
  remat_chunks: bool,
  keep_carries: bool = False,
  terms: Terms = PREDICTION,
  learns: Learns = lambda module, name: True,
) -> tuple[Params, Carry, Sums]:
  """The gradient of the step's mean loss, cut between groups of `backprop_chunks` chunks.

  Args:
    params: the parameters, or a copy with some in the compute dtype.
    carry: after the step before.
    batch: [B, N·C], where C is the chunk_size.
    total: float32, the weight of the whole step, by which the sum of losses is divided.
    rng: the key of the step, for dropout; None for none.
    backprop_chunks: the chunks of a group, dividing N.
    remat_chunks: recompute chunks in the backward pass (see `_add_recomputed`), or save their
      activations.
    keep_carries: keep the carries of all chunks that are recomputed.
    terms: the terms of the objective.
    learns: the parameters without a gradient need no memory for one.

  Returns:
    (gradients in float32 of the parameters that learn, the carry after the last chunk, the sums
    over all chunks).
  """
  chunks = split_chunks(batch, chunk_size)
  rngs = None
  if rng is not None:
    count = chunks.inputs.shape[0]
    key_of_chunk = functools.partial(jax.random.fold_in, rng)
    rngs = jax.vmap(key_of_chunk)(jnp.arange(count))
  groups = _grouped((chunks, rngs), backprop_chunks)

  recomputes = remat_chunks and backprop_chunks > 1
  add_gradient = _add_saved
  if recomputes:
    length = segment_length(backprop_chunks)
    if keep_carries:
      length = 1
    add_gradient = functools.partial(_add_recomputed, length, chunk_size)

  learning, constant = learned_and_frozen(params, learns)

  def read_chunk(learning, carry, chunk_and_rng):
    """One chunk -> (its share of the loss, (the carry after it, its sums))."""
    chunk, rng = chunk_and_rng
    all_params = hk.data_structures.merge(constant, learning)
    return read(
      terms,
      model,
      all_params,
      carry,
      chunk,
      rng,
      total=total,
      # Saved chunks would each hold a gradient of the unembedding.
      in_one_pass=recomputes or backprop_chunks == 1,
    )

  def accumulate(so_far, chunks):
    carry, gradient = so_far
    gradient, carry, sums = add_gradient(read_chunk, learning, carry, chunks, gradient)
    return (carry, gradient), sums

  nothing = zero_gradients(learning)
  (carry, gradient), sums = _scan(accumulate, (carry, nothing), groups)
  return gradient, carry, _total(sums)


def _grouped(tree: Any, length: int) -> Any:
  """[N, ...] -> [N / length, length, ...]."""

  def group(leaf):
    _, *rest = leaf.shape
    return leaf.reshape(-1, length, *rest)

  return jax.tree.map(group, tree)


def _scan(step: Callable, carry: Any, steps: Any, **options: Any) -> tuple[Any, Any]:
  """`lax.scan`, without a loop for a single step."""
  # XLA removes such a loop too, but too late to see that the backward pass unstacks the activations
  # that the forward pass stacks over the layers.
  leaves = jax.tree.leaves(steps)
  if len(leaves[0]) > 1:
    return lax.scan(step, carry, steps, **options)
  only_step = jax.tree.map(lambda x: x[0], steps)
  carry, result = step(carry, only_step)
  results = jax.tree.map(lambda x: x[None], result)
  return carry, results


def _total(sums: Sums) -> Sums:
  """The sums of several chunks, stacked, as one."""
  return jax.tree.map(lambda parts: jnp.sum(parts, axis=0), sums)


def learned_and_frozen(params: Params, learns: Learns) -> tuple[Params, Params]:
  """The parameters that learn, and the others."""

  def is_learned(module, name, _):
    return learns(module, name)

  return hk.data_structures.partition(is_learned, params)


def zero_gradients(params: Params) -> Params:
  """The accumulators of gradients: never narrower than float32."""

  def zeros(p):
    dtype = jnp.promote_types(p.dtype, jnp.float32)
    return jnp.zeros(p.shape, dtype)

  return jax.tree.map(zeros, params)


def _add(sums: Params, more: Params) -> Params:
  def add(total, part):
    return total + part.astype(total.dtype)

  return jax.tree.map(add, sums, more)


def _add_saved(
  read: Callable,
  params: Params,
  carry: Carry,
  chunks: Any,
  gradient: Params,
) -> tuple[Params, Carry, Sums]:
  """Adds a group's gradient to `gradient`; saves the activations of every chunk."""

  def group_loss(wide, carry):
    def step(before, chunk):
      # Cast inside the loop, so that the loop accumulates the gradient of the wide parameters.
      narrow = jax.tree.map(lambda w, p: w.astype(p.dtype), wide, params)
      loss, (after, sums) = read(narrow, before, chunk)
      return after, (loss, sums)

    wide_carry = _wide(carry)
    after, (losses, sums) = _scan(step, wide_carry, chunks)
    loss = jnp.sum(losses)
    narrow_after = _narrow(after, carry)
    return loss, (narrow_after, _total(sums))

  wide = rounding.wide(params)
  gradient_of = jax.value_and_grad(group_loss, has_aux=True)
  (_, (carry, sums)), more = gradient_of(wide, carry)
  return _add(gradient, more), carry, sums


def _add_recomputed(
  length: int,
  tokens: int,
  read: Callable,
  params: Params,
  carry: Carry,
  chunks: Any,
  gradient: Params,
) -> tuple[Params, Carry, Sums]:
  """Does the same from n / length + length carries of n chunks, and without saved activations.

  The chunks, of so many tokens, form segments of this length. The forward pass saves the carry
  before each segment; of what is `Rewindable`, only what the segment replaces. The backward pass
  recomputes the carries of a segment from its first, then each chunk from its own carry, and passes
  the carry's cotangent to the chunk before it.
  """
  # The loops are written out: the derivative of nested loops would accumulate the parameters'
  # gradient once in each loop.
  segments = _grouped(chunks, length)

  def forwards(before, chunk):
    _, (after, sums) = read(params, before, chunk)
    return after, (rewinding.kept(before, tokens), sums)

  def segment_forwards(first, segment):
    after, (_, sums) = _scan(forwards, first, segment)
    return after, (rewinding.kept(first, length * tokens), _total(sums))

  carry, (firsts, sums) = lax.scan(segment_forwards, carry, segments)

  def backwards(later, inputs):
    rewindable, d_after, gradient = later
    kept, chunk = inputs
    before = rewinding.rewound(rewindable, kept)
    floats, rebuild = floats_of(before)

    def loss_and_next(params, floats):
      carry = rebuild(floats)
      loss, (after, _) = read(params, carry, chunk)
      next_floats, _ = floats_of(after)
      return loss, next_floats

    (loss, _), pull_back = jax.vjp(loss_and_next, params, floats)
    cotangents = (jnp.ones_like(loss), d_after)
    d_params, d_before = pull_back(cotangents)
    rewindable_before = rewinding.rewindable(before)
    earlier = (rewindable_before, d_before, _add(gradient, d_params))
    return earlier, None

  def segment_backwards(later, inputs):
    rewindable, *_ = later
    kept, segment = inputs
    first = rewinding.rewound(rewindable, kept)
    # Only the carry of this pass over a chunk is used; XLA removes the rest.
    _, (carries, _) = _scan(forwards, first, segment)
    return _scan(backwards, later, (carries, segment), reverse=True)

  last_floats, _ = floats_of(carry)
  zero = [jnp.zeros_like(leaf) for leaf in last_floats]
  end = (rewinding.rewindable(carry), zero, gradient)
  (_, _, gradient), _ = lax.scan(segment_backwards, end, (firsts, segments), reverse=True)
  return gradient, carry, _total(sums)


def segment_length(count: int) -> int:
  """The chunks of a segment, dividing `count`, that minimize the saved carries."""
  divisors = [length for length in range(1, count + 1) if count % length == 0]

  def saved(length):
    segments = count // length
    return length + segments

  return min(divisors, key=saved)


def _wide(carry: Carry) -> Carry:
  """The carry, with what is `OverTime` in float32.

  Every chunk of a document adds to the gradient of its keys, which bfloat16 would round each time.
  A mixer casts them where it reads them.
  """

  def widen(over_time, leaf):
    is_float = jnp.issubdtype(leaf.dtype, jnp.inexact)
    if not over_time or not is_float:
      return leaf
    wide = jnp.promote_types(leaf.dtype, jnp.float32)
    return leaf.astype(wide)

  return jax.tree.map(widen, is_over_time(carry), carry)


def _narrow(wide: Carry, carry: Carry) -> Carry:
  """The inverse of `_wide`, in the dtypes of `carry`."""

  def narrowed(leaf, before):
    return leaf.astype(before.dtype)

  return jax.tree.map(narrowed, wide, carry)


def floats_of(carry: Carry) -> tuple[list[Array], Callable[[list[Array]], Carry]]:
  """The leaves with a gradient, `_wide`, and the function that replaces them in the carry."""
  leaves, structure = jax.tree.flatten(_wide(carry))
  flows = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]

  def rebuild(floats: list[Array]) -> Carry:
    replacements = iter(floats)
    rebuilt = []
    for flow, leaf in zip(flows, leaves, strict=True):
      replacement = next(replacements) if flow else leaf
      rebuilt.append(replacement)
    return structure.unflatten(rebuilt)

  pairs = zip(flows, leaves, strict=True)
  floats = [leaf for flow, leaf in pairs if flow]
  return floats, rebuild
