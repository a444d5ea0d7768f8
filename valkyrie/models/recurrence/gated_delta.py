"""Gated DeltaNet, a matrix-valued memory with the gated delta rule, as a sequence mixer.

    q, k, v = silu(convolution(W x))          q and k of length 1, for each head
    log α = -exp(log_rate) softplus(w_α x + step_bias)            β = σ(w_β x)
    S_t = α_t (I - β_t k_t k_tᵀ) S_{t-1} + β_t k_t v_tᵀ           S [K, Z]
    y = W_out (RMSNorm(S_tᵀ q_t / √K) ∘ silu(W_gate x))

With n times as many heads of values, n neighbors of them share the queries and keys of one head.

Yang, Kautz & Hatamizadeh 2024 (arXiv 2412.06464), section 3.4 and figure 1, with the decays of
Mamba-2 (Dao & Gu 2024): a token decays the memory, erases a share β of the value stored at its key,
and stores its own.

`gated_delta_rule` reads slices of Q tokens (section 3.3, the WY form by the UT transform of
Joffrain et al. 2006). In a slice every token stores u_t at k_t, and

    (I + L) U = β (V - e K S_0)            L_ij = β_i D_ij k_i·k_j for j < i
    Y = e Q S_0 + (D ∘ Q Kᵀ) U             D_ij = α_{j+1} .. α_i      e_i = α_1 .. α_i

where S_0 is the state before the slice. With I + L inverted once, the state after the slice is an
affine function of S_0, S_0 + E S_0 + B. Only that runs slice after slice; all else is products over
all slices at once. E, like the growth of `scan`, is small where memories are long, so neither the
decay of a slice nor a product of low precision rounds the state away. A document that starts inside
a slice is a mask on D and e, since a decay of zero has no logarithm; the state after it is B.
"""

import dataclasses
import functools

import gin
import haiku as hk
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from valkyrie.config.ranges import Fraction, PositiveInt
from valkyrie.errors import ConfigurationError, check_choice
from valkyrie.models import kernel_choice, slices
from valkyrie.models.layers import RMSNorm, broadcast, project, projections
from valkyrie.models.matrices import products
from valkyrie.models.precision import HIGHEST, einsum, wide
from valkyrie.models.recurrence import delta_kernel
from valkyrie.models.recurrence.convolution import ConvolvedCarry
from valkyrie.models.recurrence.delta_states import SliceEffects, states_between
from valkyrie.models.recurrence.lower_inverse import unit_lower_inverse
from valkyrie.models.recurrence.time_constants import DecayingHeads
from valkyrie.types import Array

WRITE_GATES = {
  'sigmoid': jax.nn.sigmoid,
  'hard': lambda x: jnp.clip(2 * x - 0.5, 0, 1),
  'double': lambda x: 2 * jax.nn.sigmoid(x),
}


@gin.configurable
@dataclasses.dataclass(eq=False)
class GatedDeltaNet(DecayingHeads):
  """The Gated DeltaNet layer; see the module.

  Attributes, besides the ones of `DecayingHeads`, whose `slice_size` is Q, a power of two:
    heads: H, of queries and keys.
    key_width: K, of the queries and keys of a head.
    value_width: Z, of the values of a head. The paper has HK = 3D/4 and HZ = 3D/2.
    write_gate: β, 'sigmoid' as published, 'hard', min(max(2 x - 1/2, 0), 1), or 'double', 2 σ(x).
      At a hard 0 a token writes and erases nothing: what a head holds only decays by α, over the
      time constants from `shortest` to `horizon`. Weight decay closes the gate. Above 1, I - β k kᵀ
      has a negative eigenvalue, which tracks parities and swaps (Grazzi et al. 2024, arXiv
      2411.12537).
    value_heads: of values, decays, gates and states, a multiple of H; None means H.
    norm_epsilon: of the norm in the layer; None means `RMSNorm.epsilon`.
    kernels: 'prefer' trains by the kernels of `delta_kernel`, for TPUs, where they agree with this
      form; 'require' ends the run if they do not; 'interpret' is for tests; None uses none.
  """

  key_width: PositiveInt
  value_width: PositiveInt
  write_gate: str = 'sigmoid'
  value_heads: PositiveInt | None = None
  norm_epsilon: Fraction | None = None
  kernels: str | None = None

  @functools.cached_property
  def kernel_limits(self) -> kernel_choice.Limits:
    """Where its kernels run."""
    learned_carry = self.mixer_options.learned_carry
    return delta_kernel.limits(self.key_width, self.value_width, learned_carry=learned_carry)

  def __post_init__(self):
    super().__post_init__()
    check_choice('GatedDeltaNet.write_gate', self.write_gate, WRITE_GATES)
    check_choice('GatedDeltaNet.kernels', self.kernels, kernel_choice.CHOICES)
    if self.slice_size & (self.slice_size - 1):
      raise ConfigurationError(
        f'GatedDeltaNet.slice_size={self.slice_size} must be a power of two. Use 64.'
      )
    self._value_heads = self.value_heads or self.heads
    if self._value_heads % self.heads:
      raise ConfigurationError(
        f'GatedDeltaNet.value_heads={self.value_heads} must be a multiple of '
        f'GatedDeltaNet.heads={self.heads}.'
      )
    self._keys = self.heads * self.key_width
    self._values = self._value_heads * self.value_width
    self._convolved = 2 * self._keys + self._values
    self._state_shape = (self._value_heads, self.key_width, self.value_width)

  def forward_flops(self, width: int) -> int:
    """The products with weights, the convolution, and the products of whole slices."""
    k = self.key_width
    z = self.value_width
    q = self.slice_size
    gate_and_out = 2 * self._values
    step_and_beta = 2 * self._value_heads
    outputs_of_weights = self._convolved + gate_and_out + step_and_beta
    weights = width * outputs_of_weights
    # Multiply-adds of a token and head of values.
    decays_and_inverse = 2 * q * q
    pairs = 2 * q * k  # K Kᵀ and Q Kᵀ
    solved = q * (k + z)  # the inverse times β (V, e K)
    stored = k * (k + z)
    state = k * k * z // q  # once a slice
    read = 2 * k * z
    from_slice = q * z
    of_head = decays_and_inverse + pairs + solved + stored + state + read + from_slice
    rule = self._value_heads * of_head
    convolution = self._convolution.forward_flops(self._convolved)
    return 2 * (weights + rule) + convolution

  def __call__(
    self,
    x: Array,
    carry: ConvolvedCarry,
    *,
    positions: Array,
    segment_ids: Array,
  ) -> tuple[Array, ConvolvedCarry]:
    """Mixes a chunk x [B, T, D]; see `types.SequenceMixer`."""
    batch, time, width = x.shape
    keys = self._keys
    is_token = segment_ids > 0

    widths = {
      'query': keys,
      'key': keys,
      'value': self._values,
      'gate': self._values,
    }
    *qkv_weights, gate_weights = projections(x, ('embed', 'heads'), **widths)
    qkv, gate = products(x, [qkv_weights, gate_weights])
    qkv, tail = self._convolution(qkv, carry.tail, positions=positions, segment_ids=segment_ids)
    active = jax.nn.silu(qkv)
    q, k, v = jnp.split(active, (keys, 2 * keys), axis=-1)
    q = q.reshape(batch, time, self.heads, -1)
    k = k.reshape(batch, time, self.heads, -1)
    v = v.reshape(batch, time, self._value_heads, -1)
    q = _unit(q, self.key_width**-0.5)
    k = _unit(k)
    # Padding neither decays nor writes: log α = β = 0.
    of_token = is_token[..., None]
    log_decay, beta = self._decays(x)
    log_decay = jnp.where(of_token, log_decay, 0)
    beta = jnp.where(of_token, beta, 0)
    q = self._for_values(q)
    k = self._for_values(k)
    starts = (positions == 0) & is_token
    first = self.first_state(carry.state)
    rule = functools.partial(gated_delta_rule, slice_size=self.slice_size, first=first)
    if kernel_choice.is_used(self, time):
      rule = delta_kernel.gated_delta_rule
    y, state = rule(q, k, v, log_decay, beta, carry.state, starts)
    y = y.reshape(batch, -1, self.value_width)
    normed = self._norm(y).reshape(gate.shape)
    gate = jax.nn.silu(gate.astype(y.dtype))
    gated = normed * gate
    gated = gated.astype(x.dtype)
    (out,) = project(gated, ('heads', 'embed'), out=width)
    next_carry = ConvolvedCarry(tail, state)
    return out, next_carry

  @hk.transparent
  def _norm(self, y: Array) -> Array:
    if self.norm_epsilon is None:
      return RMSNorm(name='norm')(y)
    return RMSNorm(self.norm_epsilon, name='norm')(y)

  def _for_values(self, x: Array) -> Array:
    """Queries or keys [B, T, H, K], for each head of values."""
    times = self._value_heads // self.heads
    return jnp.repeat(x, times, axis=2)

  def _decays(self, x: Array) -> tuple[Array, Array]:
    """log α and β of x [B, T, D], float32, for each head of values."""
    log_rate, step_bias = self._rates_and_steps()
    widths = {'step': self._value_heads, 'beta': self._value_heads}
    weights = projections(x, ('embed', None), **widths)
    step, beta = products(x, weights, out_dtype=wide(x.dtype))
    biased = step + broadcast(step_bias, step)
    step = jax.nn.softplus(biased)
    rate = jnp.exp(log_rate)
    log_decay = -broadcast(rate, step) * step
    write = WRITE_GATES[self.write_gate]
    return log_decay, write(beta)


def _unit(x: Array, length: float = 1.0) -> Array:
  """x [..., K] at this length, in float32."""
  x = x.astype(wide(x.dtype))
  squares = jnp.square(x)
  square = jnp.sum(squares, axis=-1, keepdims=True)
  scale = length * lax.rsqrt(square + 1e-6)
  return x * scale


@jax.named_scope('scan')
def gated_delta_rule(
  q: Array,
  k: Array,
  v: Array,
  log_decay: Array,
  beta: Array,
  initial: Array,
  reset: Array,
  *,
  slice_size: int,
  first: Array | None = None,
) -> tuple[Array, Array]:
  """(y [B, T, H, Z], the state after the chunk or this device's piece of one), both in float32.

  Args:
    q, k: [B, T, H, K], keys of length 1.
    v: [B, T, H, Z], in the dtype of the factors of products, which are accumulated in float32. Only
      the inverse has float32 factors.
    log_decay, beta: log α <= 0 and β in [0, 2], [B, T, H]; both 0 at padding.
    initial: [B, H, K, Z], the state before the chunk; like the one after, correct on device 0.
    reset: bool [B, T], true where the state before the token is replaced by zero.
    slice_size: Q, a power of two; a shorter chunk is one slice.
    first: [H, K, Z], the state before each document; None is zero.
  """
  time = q.shape[1]
  whole = 1 << (time - 1).bit_length()  # the least power of two that holds the chunk
  size = min(slice_size, whole)

  def cut(x):  # [B, T, H, ...] -> [N, B, H, Q, ...]
    return jnp.swapaxes(slices.cut(x, size), 2, 3)

  dtype = log_decay.dtype
  narrow = v.dtype

  def product(a, b, out_dtype=dtype):
    return einsum('nbhij,nbhjk->nbhik', a.astype(narrow), b.astype(narrow), out_dtype)

  q = cut(q.astype(narrow))
  k = cut(k.astype(narrow))
  v = cut(v)
  log_decay = cut(log_decay)
  beta = cut(beta)
  reset = cut(reset[..., None])
  within, entering, growth = _decays(log_decay, reset)
  across = jnp.swapaxes(k, -1, -2)
  if first is not None:  # a share is kept by the documents that start in the slice
    started = jnp.where(reset, jnp.exp(log_decay), 0)
    kept = within @ started[..., None]
    first = first[None, None]
    v = v - kept * (k @ first)

  # (I + L) U = β (V - e K S_0): solved for V and for e K, before S_0 is known.
  written_share = beta[..., None]
  likeness = product(k, across)
  lower = jnp.tril(written_share * within * likeness, -1)
  entering_keys = entering[..., None] * k
  inverse = unit_lower_inverse(lower)
  solved_values = product(inverse, written_share * v, narrow)
  solved_keys = product(inverse, written_share * entering_keys, narrow)
  # The state after a slice is (1 + growth) S_0 + Kᵀ D U, with D to the slice's end.
  to_end = within[..., -1, :, None] * k
  to_end = jnp.swapaxes(to_end, -1, -2)
  erased = product(to_end, solved_keys, narrow)
  written = product(to_end, solved_values)
  if first is not None:
    written += kept[..., -1:, :] * first
  starts = jnp.any(reset, axis=-1)
  starts = starts[..., None, None]
  growth = jnp.where(starts, 0, growth[..., None, None])
  erased = jnp.where(starts, 0, erased)
  effects = SliceEffects(starts, growth, erased, written)
  states, after = states_between(effects, initial.astype(dtype))

  u = solved_values - product(solved_keys, states)
  entering_queries = entering[..., None] * q
  from_before = product(entering_queries, states)
  scores = product(q, across)
  weights = within * scores
  from_slice = product(weights, u)
  y = from_before + from_slice
  if first is not None:
    y += (kept * q) @ first
  y = jnp.swapaxes(y, 2, 3)
  return slices.join(y, time), after


def _decays(log_decay: Array, reset: Array) -> tuple[Array, Array, Array]:
  """(D [N, B, H, Q, Q], e [N, B, H, Q], the decay of each slice less 1, [N, B, H]).

  The arguments are log α [N, B, H, Q] and the resets [N, B, 1, Q]. D and e are 0 across the start
  of a document.
  """
  # Every exponent is a sum of logarithms, none a difference of two sums: those would lose the
  # digits of a weak decay behind a strong one, and could be above zero.
  log_decay = jnp.where(reset, 0, log_decay)  # no decay crosses a start
  document = jnp.cumsum(reset, axis=-1)
  size = log_decay.shape[-1]
  pairs = (size, size)
  all_pairs = np.ones(pairs, bool)
  causal = np.tril(all_pairs)
  causal = causal[None, None, None]
  columns = log_decay[..., None, :]
  up_to_i = jnp.where(causal, columns, 0)
  ones = np.ones(pairs, log_decay.dtype)
  after_j = np.tril(ones, -1)
  sums = jnp.einsum('...ik,kj->...ij', up_to_i, after_j, precision=HIGHEST)
  total = jnp.cumsum(log_decay, axis=-1)
  of_row = document[..., :, None]
  of_column = document[..., None, :]
  visible = causal & (of_row == of_column)
  within = jnp.where(visible, jnp.exp(sums), 0)
  in_first = document == 0
  entering = jnp.where(in_first, jnp.exp(total), 0)
  of_slice = total[..., -1]
  growth = jnp.expm1(of_slice)
  return within, entering, growth
