"""S5, a diagonal state-space layer, as a sequence mixer.

Smith, Warrington & Linderman, ICLR 2023, with every option of the published implementation, and
with three of later work: normalized inputs, a horizon of any length, and steps that depend on the
input. `init` and `state_space` compute the mathematics, as functions of arrays.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any, ClassVar

import gin
import haiku as hk
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np

from valkyrie.config.ranges import PositiveFloat, PositiveInt, ProperFraction
from valkyrie.errors import ConfigurationError, check_choice
from valkyrie.models import kernel_choice
from valkyrie.models.kernel_choice import Limits
from valkyrie.models.layers import Module, dropout, matrix, parameter, projections
from valkyrie.models.matrices import Matrix, products
from valkyrie.models.precision import wide
from valkyrie.models.recurrence import scan, scan_kernel
from valkyrie.models.recurrence.scan import Complex
from valkyrie.models.recurrence.time_constants import check_time_constants
from valkyrie.models.s5 import init, state_space
from valkyrie.models.s5.state_space import DISCRETIZATIONS, StateSpace
from valkyrie.types import Array, DType

# The output variants, and the D x D matrices that each learns.
ACTIVATIONS = {
  'linear': (),
  'gelu': (),
  'half_glu1': ('gate',),
  'half_glu2': ('gate',),
  'full_glu': ('gate', 'value'),
}


def activate(
  y: Array,
  weights: Sequence[Matrix],
  *,
  activation: str,
  drop: Callable[[Array], Array] = lambda x: x,
) -> Array:
  """The output variants of the reference implementation; gates have no bias, as in the paper.

    linear      drop(y)                           none of theirs: for a layer with a gate around it
    gelu        g                                 g = drop(gelu(y))
    half_glu1   drop(g ∘ σ(g W_gate))
    half_glu2   drop(y ∘ σ(g W_gate))
    full_glu    drop(g W_value ∘ σ(g W_gate))

  y is [B, T, D], and `weights` are the matrices [D, D] of `ACTIVATIONS`. Every `drop` draws again.
  """
  if activation == 'linear':
    return drop(y)
  active = drop(jax.nn.gelu(y))
  if activation == 'gelu':
    return active
  logits, *projected = products(active, weights)
  values = {
    'half_glu1': [active],
    'half_glu2': [y],
    'full_glu': projected,
  }
  (value,) = values[activation]
  gate = jax.nn.sigmoid(logits)
  return drop(value * gate)


@gin.configurable
@dataclasses.dataclass(eq=False)
class S5(Module):
  """The S5 layer. Its carry is the state, `Complex` of [B, P] float32; bidirectional, nothing.

  Attributes:
    state_size: P, stored complex states.
    hippo_blocks: J, HiPPO-LegS blocks on the diagonal at initialization; divides P.
    conj_sym: store one state of each conjugate pair, and imply the other.
    discretization: 'zoh' or 'bilinear' as published, or 'normalized', see `state_space`. The
      last learns log(-Re Λ), so that every state decays; the others learn Re Λ.
    horizon: the longest time constant at initialization, in tokens: how far the layer remembers.
    shortest: the shortest one. They spread evenly in the logarithm; 20 and 2000 are the published
      steps of 0.1 and 0.001.
    selective: every state's step depends on the input, see `state_space.discretized`.
    step_rescale: a factor on Δ: 2 reads a signal sampled at half the rate of training.
    clip_eigenvalues: keep the real parts of Λ below zero, so that no state can grow.
    output_init: of C: 'trunc_standard_normal', 'lecun_normal' or 'complex_normal'.
    activation: 'gelu', or the gated 'half_glu1', 'half_glu2' or 'full_glu'.
    dropout: the share of channels zeroed in training, with one draw for all tokens of a chunk.
    bidirectional: a second scan reads each document from its end. Not for language models.
    scan_form: a key of `scan.FORMS`; None takes the fastest for the platform.
    kernels: 'prefer' trains by the kernels of `scan_kernel`, for GPUs, where they agree with this
      form; 'require' ends the run if they do not; 'interpret' is for tests; None uses none.
  """

  state_size: PositiveInt
  hippo_blocks: PositiveInt = 1
  conj_sym: bool = True
  discretization: str = 'zoh'
  horizon: PositiveFloat = 2000.0
  shortest: PositiveFloat = 20.0
  selective: bool = False
  step_rescale: PositiveFloat = 1.0
  clip_eigenvalues: bool = False
  output_init: str = 'trunc_standard_normal'
  activation: str = 'gelu'
  dropout: ProperFraction = 0.0
  bidirectional: bool = False
  scan_form: str | None = None
  kernels: str | None = None

  kernel_limits: ClassVar[Limits] = Limits(('gpu',), scan_kernel.BLOCK)

  def __post_init__(self):
    super().__post_init__()
    self.causal = self.sequence_parallel = not self.bidirectional
    self._scans = 2 if self.bidirectional else 1
    check_choice('S5.discretization', self.discretization, DISCRETIZATIONS)
    check_choice('S5.output_init', self.output_init, init.OUTPUT_INITS)
    check_choice('S5.activation', self.activation, ACTIVATIONS)
    check_choice('S5.scan_form', self.scan_form, (None, *scan.FORMS))
    check_choice('S5.kernels', self.kernels, kernel_choice.CHOICES)
    check_time_constants(self)
    if self.state_size % self.hippo_blocks:
      raise ConfigurationError(
        f'S5.state_size={self.state_size} must be a multiple of S5.hippo_blocks='
        f'{self.hippo_blocks}: HiPPO blocks have equal sizes.'
      )

  def initial_carry(self, batch_size: int, dtype: DType) -> Complex | tuple[()]:
    """The zero state: float32 or wider, since rounding would accumulate."""
    if not self.causal:
      return ()
    return self._zero_state(batch_size, dtype)

  def _zero_state(self, batch_size: int, dtype: DType) -> Complex:
    zero = jnp.zeros((batch_size, self.state_size), wide(dtype))
    return Complex(zero, zero)

  def forward_flops(self, width: int) -> int:
    """Real products of B and C, D x 2P each, the recurrence (8 for each state), and the gates."""
    states = self.state_size
    states_read = states * self._scans
    inputs = 4 * width * states
    outputs = 4 * width * states_read
    recurrence = 8 * states_read
    gate_matrices = len(ACTIVATIONS[self.activation])
    gates = 2 * gate_matrices * width * width
    if self.selective:
      gates += 2 * width * states
    return inputs + recurrence + outputs + gates

  def __call__(
    self,
    x: Array,
    carry: Complex | tuple[()],
    *,
    positions: Array,
    segment_ids: Array,
  ) -> tuple[Array, Complex | tuple[()]]:
    """Mixes a chunk; see `types.SequenceMixer`."""
    width = x.shape[-1]
    system = self._parameters(width)
    log_factor = None
    if self.selective:
      log_factor = self._log_factor(x)
    discrete = state_space.discretized(
      system,
      method=self.discretization,
      step_rescale=self.step_rescale,
      clip_eigenvalues=self.clip_eigenvalues,
      log_factor=log_factor,
    )
    initial: Any = carry
    ends = None
    if not self.causal:
      initial = self._zero_state(x.shape[0], x.dtype)
      ends = _document_ends(positions, segment_ids)
    starts = positions == 0
    is_token = segment_ids > 0
    length = jnp.sum(is_token, axis=1)
    y, after = state_space.read_chunk(
      system,
      discrete,
      x,
      initial,
      starts,
      length,
      ends,
      form=self._form(x.shape[1]),
      conj_sym=self.conj_sym,
      first=self.first_state(carry) or None,
    )
    widths = dict.fromkeys(ACTIVATIONS[self.activation], width)
    weights = projections(x, ('embed', None), **widths)

    def drop(value):
      return dropout(value, self.dropout, shared=(1,))

    y = checkpoint_name(y.astype(x.dtype), 'states')
    y = activate(y, weights, activation=self.activation, drop=drop)
    if not self.causal:
      return y, ()
    return y, after

  def _form(self, time: int) -> scan.Form:
    if not kernel_choice.is_used(self, time):
      return self.scan_form
    interpret = self.kernels == 'interpret'
    return functools.partial(scan_kernel.scan, interpret=interpret)

  def _log_factor(self, x: Array) -> Array:
    """What each token of x [B, T, D] adds to log Δ, before the softplus: float32 [T, B, P]."""
    weights = projections(x, ('embed', 'state'), jnp.zeros, step=self.state_size)
    (factor,) = products(x, weights, out_dtype=wide(x.dtype))
    return jnp.swapaxes(factor, 0, 1)

  def _parameters(self, width: int) -> StateSpace:
    eigenvalues, basis = init.block_diagonal(
      self.state_size, self.hippo_blocks, conj_sym=self.conj_sym
    )
    rates = -np.real(eigenvalues)

    def log_step_init(*_):
      key = hk.next_rng_key()
      return init.log_steps(key, rates, self.shortest, self.horizon)

    if self.discretization == 'normalized':
      # Re Λ = -exp(log_rate): every state decays.
      log_rate = self._state_parameter('log_rate', np.log(rates))
      real_part = -jnp.exp(log_rate)
    else:
      real_part = self._state_parameter('lambda_re', np.real(eigenvalues))
    imaginary_part = self._state_parameter('lambda_im', np.imag(eigenvalues))
    b = self._input_matrix(basis, width)
    c = self._output_matrix(basis, width)
    normal = hk.initializers.RandomNormal()
    d = parameter('d', (width,), normal, axes=('activation',))
    log_step = parameter('log_step', (self.state_size,), log_step_init, axes=('state',))
    learned_eigenvalues = Complex(real_part, imaginary_part)
    return StateSpace(learned_eigenvalues, b, c, d, log_step)

  def _state_parameter(self, name: str, value: np.ndarray) -> Array:
    """A parameter with a number for each state, which begins with this value."""
    constant = hk.initializers.Constant(np.asarray(value, np.float32))
    return parameter(name, (self.state_size,), constant, axes=('state',))

  def _input_matrix(self, basis: np.ndarray, width: int) -> Matrix:
    """B̃, with its real and its imaginary part on the first axis."""

    def b_init(*_):
      key = hk.next_rng_key()
      b = init.input_matrix(key, basis, self.hippo_blocks, width)
      return jnp.stack(b)

    shape = (2, self.state_size, width)
    axes = (None, 'state', 'embed')
    return matrix('b', shape, b_init, axes=axes, form=state_space.input_matrix)

  def _output_matrix(self, basis: np.ndarray, width: int) -> Matrix:
    """C̃ of one scan or of both, with its real and its imaginary part on the first axis."""

    def c_of_one_scan():
      key = hk.next_rng_key()
      method = self.output_init
      c = init.output_matrix(key, basis, self.hippo_blocks, width, method=method)
      return jnp.stack(c)

    def c_init(*_):
      scans = [c_of_one_scan() for _ in range(self._scans)]
      return jnp.concatenate(scans, axis=-1)

    shape = (2, width, self.state_size * self._scans)
    axes = (None, 'embed', 'state')
    form = functools.partial(state_space.output_matrix, conj_sym=self.conj_sym)
    return matrix('c', shape, c_init, axes=axes, form=form)


def _document_ends(positions: Array, segment_ids: Array) -> Array:
  """Whether each token is the last one of a document, of the chunk, or before padding; [B, T]."""
  next_is_start = positions[:, 1:] == 0
  next_is_padding = segment_ids[:, 1:] == 0
  ends = next_is_start | next_is_padding
  return jnp.pad(ends, ((0, 0), (0, 1)), constant_values=True)
