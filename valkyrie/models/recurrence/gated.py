"""A recurrence behind a short convolution, beside a gate: the recurrent block of Griffin.

    y = W_out (silu(W_gate x) ∘ recurrence(f(convolution(W_in x))))

De et al. 2024 (Griffin), figure 2, where f changes nothing. In Gu & Dao 2023 (Mamba) it is silu,
whose output has a mean, and a long memory adds that up. The convolution tells the recurrence which
tokens stand together, and the gate what to read of it.
"""

from collections.abc import Callable
from typing import NamedTuple

import gin
import haiku as hk
import jax

from valkyrie.errors import ConfigurationError
from valkyrie.models.layers import check_sizes, project
from valkyrie.models.recurrence.convolution import CausalConvolution, Tail
from valkyrie.types import Array, Carry, DType, SequenceMixer

ACTIVATIONS = {'silu': jax.nn.silu, 'linear': lambda x: x}


class GatedCarry(NamedTuple):
  """tail: of the convolution; state: the carry of the recurrence."""

  tail: Tail
  state: Carry


@gin.configurable
class GatedRecurrence(hk.Module):
  """A sequence mixer made of another one; see the module."""

  def __init__(
    self,
    recurrence: Callable[[], SequenceMixer],
    width: int,
    taps: int = 4,
    activation: str = 'linear',
    name: str | None = None,
  ):
    """Configures the mixer.

    Args:
      recurrence: the class of the mixer inside (`@S5` in gin).
      width: F, of the convolution, the recurrence and the gate.
      taps: tokens that the convolution reads.
      activation: f, 'linear' or 'silu'.
      name: Haiku's.
    """
    super().__init__(name)
    check_sizes('GatedRecurrence', width=width, taps=taps)
    if activation not in ACTIVATIONS:
      raise ConfigurationError(
        f'GatedRecurrence.activation={activation!r} is unknown. Use one of {list(ACTIVATIONS)}.'
      )
    self.width = width
    self.activate = ACTIVATIONS[activation]
    self.recurrence = recurrence()
    self.convolution = CausalConvolution(taps)
    self.causal = self.recurrence.causal
    self.sequence_parallel = getattr(self.recurrence, 'sequence_parallel', False)
    self.dropout = self.recurrence.dropout
    self.horizon = getattr(self.recurrence, 'horizon', None)

  def initial_carry(self, batch_size: int, dtype: DType) -> GatedCarry:
    """The carries of the convolution and of the recurrence at a document start."""
    return GatedCarry(
      self.convolution.initial_carry(batch_size, self.width, dtype),
      self.recurrence.initial_carry(batch_size, dtype),
    )

  def forward_flops(self, width: int) -> int:
    """Three products of width x F, the convolution and the recurrence."""
    inside = self.convolution.forward_flops(self.width) + self.recurrence.forward_flops(self.width)
    return 6 * width * self.width + inside

  def __call__(
    self, x: Array, carry: GatedCarry, *, positions: Array, segment_ids: Array
  ) -> tuple[Array, GatedCarry]:
    """Mixes a chunk; see `types.SequenceMixer`."""
    where = {'positions': positions, 'segment_ids': segment_ids}
    inner, gate = project(x, ('embed', 'mlp'), inner=self.width, gate=self.width)
    convolved, tail = self.convolution(inner, carry.tail, **where)
    mixed, state = self.recurrence(self.activate(convolved), carry.state, **where)
    (out,) = project(mixed * jax.nn.silu(gate), ('mlp', 'embed'), out=x.shape[-1])
    return out, GatedCarry(tail, state)
