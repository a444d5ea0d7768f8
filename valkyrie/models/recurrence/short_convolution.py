"""A gated short convolution as a sequence mixer: the convolution block of LFM2.

    y = W_out (c ∘ convolution(b ∘ x))          b, c, x = projections of the input

Liquid AI 2025 (arXiv 2511.23404). It reads the last few tokens; attention in other layers reads the
tokens before these.
"""

import dataclasses

import gin

from valkyrie.config.ranges import PositiveInt
from valkyrie.models.layers import Module, project
from valkyrie.models.recurrence.convolution import CausalConvolution, Tail
from valkyrie.types import Array, DType


@gin.configurable
@dataclasses.dataclass(eq=False)
class ShortConvolution(Module):
  """A sequence mixer; see the module.

  Attributes:
    width: F, of the convolution and its gates; LFM2 has the model's.
    taps: tokens that the convolution reads.
  """

  width: PositiveInt
  taps: PositiveInt = 3

  causal = True
  sequence_parallel = True
  dropout = 0.0

  def __post_init__(self):
    super().__post_init__()
    self._convolution = CausalConvolution(self.taps)

  def initial_carry(self, batch_size: int, dtype: DType) -> Tail:
    """The carry of the convolution at a document start."""
    return self._convolution.initial_carry(batch_size, self.width, dtype)

  def forward_flops(self, width: int) -> int:
    """Four products of width x F, and the convolution."""
    return 8 * width * self.width + self._convolution.forward_flops(self.width)

  def __call__(
    self,
    x: Array,
    carry: Tail,
    *,
    positions: Array,
    segment_ids: Array,
  ) -> tuple[Array, Tail]:
    """Mixes a chunk; see `types.SequenceMixer`."""
    width = x.shape[-1]
    widths = {
      'input_gate': self.width,
      'output_gate': self.width,
      'inner': self.width,
    }
    input_gate, output_gate, inner = project(x, ('embed', 'mlp'), **widths)
    gated = input_gate * inner
    where = {'positions': positions, 'segment_ids': segment_ids}
    convolved, tail = self._convolution(gated, carry, **where)
    read = output_gate * convolved
    (out,) = project(read, ('mlp', 'embed'), out=width)
    return out, tail
