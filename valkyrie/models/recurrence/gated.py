"""A recurrence behind a short convolution, beside a gate: the recurrent block of Griffin.

    y = W_out (silu(W_gate x) ∘ recurrence(f(convolution(W_in x))))

De et al. 2024 (Griffin), figure 2, where f changes nothing. In Gu & Dao 2023 (Mamba) it is silu,
whose output has a mean, which a long memory accumulates.
"""

from collections.abc import Callable
import dataclasses

import gin
import jax

from valkyrie.config.ranges import PositiveInt
from valkyrie.errors import check_choice
from valkyrie.models.layers import MixerOptions, Module, configure, project
from valkyrie.models.recurrence.convolution import CausalConvolution, ConvolvedCarry
from valkyrie.types import Array, DType, SequenceMixer

ACTIVATIONS = {'silu': jax.nn.silu, 'linear': lambda x: x}


@gin.configurable
@dataclasses.dataclass(eq=False)
class GatedRecurrence(Module):
  """A sequence mixer made of another one; see the module.

  Attributes:
    recurrence: the class of the mixer inside (`@S5` in gin).
    width: F, of the convolution, the recurrence and the gate.
    taps: tokens that the convolution reads.
    activation: f, 'linear' or 'silu'.
  """

  recurrence: Callable[[], SequenceMixer]
  width: PositiveInt
  taps: PositiveInt = 4
  activation: str = 'linear'

  def __post_init__(self):
    super().__post_init__()
    check_choice('GatedRecurrence.activation', self.activation, ACTIVATIONS)
    self.inner = self.recurrence()
    self._convolution = CausalConvolution(self.taps)
    self.causal = self.inner.causal
    self.dropout = self.inner.dropout
    self.sequence_parallel = getattr(self.inner, 'sequence_parallel', False)
    self.horizon = getattr(self.inner, 'horizon', None)

  def configure(self, options: MixerOptions) -> None:
    """Gives the recurrence the options of the model."""
    configure(self.inner, options)

  def initial_carry(self, batch_size: int, dtype: DType) -> ConvolvedCarry:
    """The carries of the convolution and of the recurrence at a document start."""
    tail = self._convolution.initial_carry(batch_size, self.width, dtype)
    state = self.inner.initial_carry(batch_size, dtype)
    return ConvolvedCarry(tail, state)

  def forward_flops(self, width: int) -> int:
    """Three products of width x F, the convolution and the recurrence."""
    projections = 6 * width * self.width
    convolution = self._convolution.forward_flops(self.width)
    recurrence = self.inner.forward_flops(self.width)
    return projections + convolution + recurrence

  def __call__(
    self,
    x: Array,
    carry: ConvolvedCarry,
    *,
    positions: Array,
    segment_ids: Array,
  ) -> tuple[Array, ConvolvedCarry]:
    """Mixes a chunk; see `types.SequenceMixer`."""
    width = x.shape[-1]
    where = {'positions': positions, 'segment_ids': segment_ids}
    inner, gate = project(x, ('embed', 'mlp'), inner=self.width, gate=self.width)
    convolved, tail = self._convolution(inner, carry.tail, **where)
    activate = ACTIVATIONS[self.activation]
    active = activate(convolved)
    mixed, state = self.inner(active, carry.state, **where)
    gated = mixed * jax.nn.silu(gate)
    (out,) = project(gated, ('mlp', 'embed'), out=width)
    next_carry = ConvolvedCarry(tail, state)
    return out, next_carry
