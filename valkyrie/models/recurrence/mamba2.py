"""Mamba-2, a selective state space with one decay for each head, as a sequence mixer.

    z, x, B, C, Δ = projections of the input      x, B, C = silu(convolution(x, B, C))
    Δ_t = softplus(Δ_t + bias)      S_t = exp(-Δ_t exp(log_rate)) S_{t-1} + Δ_t B_t x_t^T
    y_t = S_t^T C_t + D x_t         output = RMSNorm(y ∘ silu(z)) W_out

Dao & Gu 2024 (arXiv 2405.21060), figure 6 and section 7, as `Mamba2` of state-spaces/mamba. Heads
can form groups, which have B, C and a mean square of the norm each.

`ssd` computes S and S_t^T C_t by matrix products (section 6 and listing 1). A chunk is cut into
slices of Q tokens. Inside a slice, y is a masked product, as in attention: the weight of token j
for token i is (C_i · B_j) exp(a_{j+1} + .. + a_i), a_t = -Δ_t exp(log_rate). Between slices only
the states pass, one for each slice.
"""

import dataclasses
import functools
from typing import Any

import gin
import jax
from jax import lax
import jax.numpy as jnp

from valkyrie.config.ranges import PositiveInt
from valkyrie.errors import ConfigurationError
from valkyrie.models.layers import RMSNorm, broadcast, parameter, project
from valkyrie.models.precision import einsum, wide
from valkyrie.models.recurrence.convolution import ConvolvedCarry
from valkyrie.models.recurrence.sharded_scan import Piece, then
from valkyrie.models.recurrence.time_constants import DecayingHeads
from valkyrie.models.slices import cut, join
from valkyrie.sharding import sequence_parallel
from valkyrie.types import Array, DType


@gin.configurable
@dataclasses.dataclass(eq=False)
class Mamba2(DecayingHeads):
  """The Mamba-2 layer; its decays and steps are drawn as published by default.

  Attributes, besides the ones of `DecayingHeads`:
    head_width: K; H x K is twice the model width in the publication.
    state_size: P, rows of a head's state.
    groups: G, dividing H; neighboring heads, as many in each group, share B and C.
  """

  head_width: PositiveInt = 64
  state_size: PositiveInt = 128
  groups: PositiveInt = 1

  def __post_init__(self):
    super().__post_init__()
    if self.heads % self.groups:
      raise ConfigurationError(
        f'Mamba2.heads={self.heads} must be a multiple of Mamba2.groups={self.groups}.'
      )
    self._inner = self.heads * self.head_width
    self._states = self.groups * self.state_size
    self._convolved = self._inner + 2 * self._states
    self._state_shape = (self.heads, self.state_size, self.head_width)

  def forward_flops(self, width: int) -> int:
    """The projections, the convolution, the state written and read, and the pairs of a slice."""
    projected = 2 * self._inner + self._convolved + self.heads
    projections = 2 * width * projected
    convolution = self._convolution.forward_flops(self._convolved)
    states = 4 * self.state_size * self._inner
    pairs = 2 * self.slice_size * (self._states + self._inner)
    return projections + convolution + states + pairs

  def __call__(
    self,
    x: Array,
    carry: ConvolvedCarry,
    *,
    positions: Array,
    segment_ids: Array,
  ) -> tuple[Array, ConvolvedCarry]:
    """Mixes a chunk; see `types.SequenceMixer`."""
    batch, time, width = x.shape
    dtype = wide(x.dtype)
    is_token = segment_ids > 0
    widths = {
      'z': self._inner,
      'xbc': self._convolved,
      'dt': self.heads,
    }
    z, xbc, dt = project(x, ('embed', 'mlp'), **widths)
    xbc, tail = self._convolution(
      xbc,
      carry.tail,
      positions=positions,
      segment_ids=segment_ids,
    )
    active = jax.nn.silu(xbc)
    inner_end = self._inner
    b_end = inner_end + self._states
    inner, b, c = jnp.split(active, [inner_end, b_end], axis=-1)
    inner = inner.reshape(batch, time, self.heads, self.head_width)

    log_rate, step_bias = self._rates_and_steps()
    skip = parameter('skip', (self.heads,), jnp.ones, axes=('norm',))
    biased = dt.astype(dtype) + broadcast(step_bias, dt)
    dt = jax.nn.softplus(biased)
    # A step of length zero changes no state.
    dt = jnp.where(is_token[..., None], dt, 0)
    stepped = dt[..., None] * inner
    stepped = stepped.astype(x.dtype)
    rate = jnp.exp(log_rate)
    log_decay = -broadcast(rate, dt) * dt
    starts = (positions == 0) & is_token
    y, state = self._read(stepped, log_decay, b, c, starts, carry.state)
    y += broadcast(skip, dt)[..., None] * inner
    y = y.reshape(z.shape)
    gate = jax.nn.silu(z.astype(dtype))
    normed = RMSNorm()(y * gate, self.groups)
    normed = normed.astype(x.dtype)
    (out,) = project(normed, ('mlp', 'embed'), out=width)
    next_carry = ConvolvedCarry(tail, state)
    return out, next_carry

  def _read(
    self,
    x: Array,
    log_decay: Array,
    b: Array,
    c: Array,
    reset: Array,
    carry: Array,
  ) -> tuple[Array, Array]:
    """`ssd` of each group, with b and c [B, T, G P]."""
    first = self.first_state(carry)

    def read(
      x,
      log_decay,
      b,
      c,
      carry,
      first,
    ):
      return ssd(
        x,
        log_decay,
        b,
        c,
        reset,
        carry,
        slice_size=self.slice_size,
        first=first,
      )

    if self.groups == 1:
      return read(x, log_decay, b, c, carry, first)

    def by_group(array, axis):
      leading = array.shape[:axis]
      trailing = array.shape[axis + 1 :]
      return array.reshape(*leading, self.groups, -1, *trailing)

    first_by_group = None
    if first is not None:
      first_by_group = by_group(first, 0)
    read_groups = jax.vmap(
      read,
      in_axes=(2, 2, 2, 2, 1, 0),
      out_axes=(2, 1),
    )
    y, state = read_groups(
      by_group(x, 2),
      by_group(log_decay, 2),
      by_group(b, 2),
      by_group(c, 2),
      by_group(carry, 1),
      first_by_group,
    )
    y = y.reshape(x.shape)
    state = state.reshape(carry.shape)
    return y, state


@jax.named_scope('scan')
def ssd(
  x: Array,
  log_decay: Array,
  b: Array,
  c: Array,
  reset: Array,
  carry: Array,
  *,
  slice_size: int,
  first: Array | None = None,
) -> tuple[Array, Array]:
  """(y [B, T, H, K], the state after the chunk [B, H, P, K]), both in the dtype of `log_decay`.

  Under sequence parallelism, the arrays are this device's piece of the chunk.

  Args:
    x: [B, T, H, K], the inputs; products are in their dtype, accumulated in float32.
    log_decay: a [B, T, H], float32, not above 0; 0 at padding, where x is zero.
    b, c: [B, T, P], which all heads share.
    reset: bool [B, T], true where the state before the token is replaced by zero.
    carry: [B, H, P, K], the state before the chunk; correct on device 0, as is the state after it.
    first: [H, P, K], the state before each document; None is zero.
  """
  time = x.shape[1]
  heads = x.shape[2]
  narrow = x.dtype
  dtype = log_decay.dtype
  dot = functools.partial(einsum, out_dtype=dtype)
  count = -(-time // slice_size)
  size = -(-time // count)  # the last slice is padded the least
  x = cut(x, size)
  b = cut(b.astype(narrow), size)
  c = cut(c.astype(narrow), size)
  starts = cut(reset, size)
  # The sums of logarithms stay float32, and only differences that are not positive are
  # exponentiated. A reset is no -inf among them: tokens are compared by the count of resets before.
  log_decay = cut(log_decay, size)
  total, lost = _sums(log_decay, starts[..., None])  # [N, B, Q, H]
  document = jnp.cumsum(starts, axis=2)  # [N, B, Q]
  reads, remains = _shares(total, lost, document)
  # All heads share B and C, so one product serves all.
  rows = x.shape[:3]
  kept = remains[..., None] * x
  kept = kept.astype(narrow).reshape(*rows, -1)
  written = dot('nbqp,nbqf->nbpf', b, kept)
  states_shape = written.shape
  by_head = written.reshape(*states_shape[:3], heads, -1)
  decay = _over_states(reads)
  slices = Piece(decay, by_head)
  if first is not None:  # a share is kept by the documents that start in the slice
    started = document > 0
    first_share = jnp.where(started[..., None], jnp.exp(total), 0)
    first = jnp.swapaxes(first, 0, 1)
    to_end = _over_states(first_share)
    state = slices.state + to_end * first[None, None]
    slices = slices._replace(state=state)
  carried = jnp.swapaxes(carry, 1, 2)
  before, after = _between_slices(slices, carried.astype(dtype), narrow)
  before = before.reshape(*states_shape)
  from_before = dot('nbqp,nbpf->nbqf', c, before)
  from_before = from_before.reshape(x.shape)

  within = _within_slices(x, b, c, total, lost, document)
  y = reads[..., None] * from_before + within
  if first is not None:
    from_first = dot('nbqp,phk->nbqhk', c, first.astype(narrow))
    y += first_share[..., None] * from_first
  y = join(y, time)
  state = jnp.swapaxes(after, 1, 2)
  return y, state


def _over_states(shares: Array) -> Array:
  """The shares [N, B, Q, H] at the last tokens of slices, beside states: [N, B, 1, H, 1]."""
  return shares[:, :, -1, None, :, None]


def _shares(total: Array, lost: Array, document: Array) -> tuple[Array, Array]:
  """The shares [N, B, Q, H] of states in a slice.

  The first is of the state before the slice, as each token reads it; the second is of each token,
  as it remains in the state after the slice.
  """
  in_first = document == 0
  reads = jnp.where(in_first[..., None], jnp.exp(total), 0)
  last_document = document[..., -1:]
  in_last = (document == last_document)[..., None]
  to_total = total[:, :, -1:] - total
  to_lost = lost[:, :, -1:] - lost
  to_last = jnp.where(in_last, to_total + to_lost, 0)
  remains = jnp.where(in_last, jnp.exp(to_last), 0)
  return reads, remains


def _within_slices(
  x: Array,
  b: Array,
  c: Array,
  total: Array,
  lost: Array,
  document: Array,
) -> Array:
  """y_i = Σ_j (C_i · B_j) exp(total_i - total_j) x_j over the j <= i of a document in a slice.

  x and the result are [N, B, Q, H, K].
  """
  dot = functools.partial(einsum, out_dtype=total.dtype)
  size = x.shape[2]
  order = jnp.tri(size, dtype=bool)
  same_document = document[..., :, None] == document[..., None, :]
  sees = order[None, None] & same_document
  products = dot('nbip,nbjp->nbij', c, b)
  scores = jnp.where(sees, products, 0)
  log_decay = _differences(total) + _differences(lost)
  log_passed = jnp.where(sees[:, :, None], log_decay, 0)
  weights = scores[:, :, None] * jnp.exp(log_passed)
  weights = weights.astype(x.dtype)
  by_head = jnp.swapaxes(x, 2, 3)
  within = dot('nbhij,nbhjk->nbhik', weights, by_head)
  return jnp.swapaxes(within, 2, 3)


def _differences(x: Array) -> Array:
  """x_i - x_j of every two tokens of a slice: [N, B, Q, H] -> [N, B, H, Q, Q]."""
  by_head = jnp.moveaxis(x, 3, 2)
  rows = by_head[..., :, None]
  columns = by_head[..., None, :]
  return rows - columns


def _sums(x: Array, starts: Array) -> tuple[Array, Array]:
  """(the cumulative sums of x [N, B, Q, H] from each start [N, B, Q, 1], what they lost).

  A strong decay rounds the sums after it, whose differences can be small. So what rounding lost is
  summed, too (Knuth 1969, TwoSum), and differences are taken of both.
  """

  def then(first, second):
    r1, x1, lost1 = first
    r2, x2, lost2 = second
    total = x1 + x2
    exact = (x1, x2, total)
    a, b, s = lax.stop_gradient(exact)
    from_b = s - a
    from_a = s - from_b
    rounded_off = (a - from_a) + (b - from_b)
    lost = lost1 + lost2 + rounded_off
    total = jnp.where(r2, x2, total)
    lost = jnp.where(r2, lost2, lost)
    reset = r1 | r2
    return reset, total, lost

  nothing_lost = jnp.zeros_like(x)
  elements = (starts, x, nothing_lost)
  _, sums, lost = lax.associative_scan(then, elements, axis=2)
  return sums, lost


def _between_slices(slices: Piece, carry: Array, dtype: DType) -> tuple[Array, Array]:
  """(the states before each slice [N, B, P, H, K], the state after the chunk [B, P, H, K])."""
  pass_states = functools.partial(_pass_states, dtype, slices.decay, slices.state)
  if not sequence_parallel.axes():
    return pass_states(carry)
  known = sequence_parallel.select_first(carry, jnp.zeros_like(carry))
  _, last = pass_states(known)
  decay = jnp.prod(slices.decay, axis=0)
  piece = Piece(decay, last)
  entering = Piece(decay, carry)
  left, whole = sequence_parallel.device_prefix_scan(piece, then, entering)
  before, _ = pass_states(left.state)
  return before, whole.state


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _pass_states(dtype: DType, decay: Array, states: Array, carry: Array) -> tuple[Array, Array]:
  """(the states before each slice in `dtype`, the state after the last); sums keep `carry`'s.

  What products read, here and in the backward pass, is stored in their dtype: the states are the
  largest arrays of the layer. `ssd_state_passing.py` of state-spaces/mamba does so, too.
  """

  def step(before, piece):
    decay, state = piece
    after = decay * before + state
    return after, before.astype(dtype)

  after, before = lax.scan(step, carry, (decay, states))
  return before, after


def _pass_states_forward(dtype, decay, states, carry):
  results: Any = _pass_states(dtype, decay, states, carry)
  before, _ = results
  return results, (decay, before)


def _pass_states_backward(dtype, residuals, gradients):
  decay, before = residuals
  d_before, d_last = gradients

  def step(d_after, piece):
    decay, before, d_before = piece
    by_state = d_after * before
    d_decay = jnp.sum(by_state, axis=(1, 3), keepdims=True)
    return decay * d_after + d_before, (d_decay, d_after.astype(dtype))

  pieces = decay, before, d_before
  d_carry, (d_decay, d_states) = lax.scan(step, d_last, pieces, reverse=True)
  return d_decay, d_states.astype(d_carry.dtype), d_carry


_pass_states.defvjp(_pass_states_forward, _pass_states_backward)
