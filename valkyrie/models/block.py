"""One layer: pre-norm residual mixers in the given order, then an MLP."""

from collections.abc import Callable, Mapping, Sequence

import gin
import haiku as hk

from valkyrie.config.ranges import PositiveInt, ProperFraction, check
from valkyrie.models import layers
from valkyrie.models.layers import MLP, GatedMLP, MixerOptions, RMSNorm
from valkyrie.models.mixer_check import check_members, check_result
from valkyrie.types import Array, Carry, DType, SequenceMixer


@gin.configurable
class Block(hk.Module):
  """x += mixer(norm(x)) for each mixer, then x += mlp(norm(x)).

  `mixers` are the classes of the sequence mixers (`@S5` in gin, not `@S5()`), applied in this
  order, `mlp` is the class of the MLP, and `mlp_width` its width. `dropout` is the share of what
  the mixers and the MLP add to the residual stream, and of the MLP's inner values, that is zeroed
  in training. A mixer that lacks an attribute raises a ConfigurationError.
  """

  def __init__(
    self,
    mixers: Sequence[Callable[[], SequenceMixer]],
    mlp_width: PositiveInt,
    dropout: ProperFraction = 0.0,
    mlp: Callable[..., MLP] = GatedMLP,
    name: str | None = None,
  ):
    super().__init__(name)
    check('Block.mlp_width', mlp_width, PositiveInt)
    check('Block.dropout', dropout, ProperFraction)
    self.dropout = dropout
    self.mixers = tuple(make() for make in mixers)
    for mixer in self.mixers:
      check_members(mixer)
    self.mlp = mlp(mlp_width, dropout, name='mlp')

  @property
  def has_dropout(self) -> bool:
    """Whether the block or a mixer draws random numbers in training."""
    return any(part.dropout for part in (self, *self.mixers))

  def configure(self, options: MixerOptions) -> None:
    """Gives the mixers the options of the model."""
    for mixer in self.mixers:
      layers.configure(mixer, options)

  def initial_carry(self, batch_size: int, dtype: DType) -> tuple[Carry, ...]:
    """The carry of each mixer at a document start."""
    return tuple(mixer.initial_carry(batch_size, dtype) for mixer in self.mixers)

  def forward_flops(self, width: int) -> int:
    """Operations of one token in a forward pass."""
    mixing = sum(mixer.forward_flops(width) for mixer in self.mixers)
    return mixing + self.mlp.forward_flops(width)

  def __call__(
    self,
    x: Array,
    carry: tuple[Carry, ...],
    *,
    positions: Array,
    segment_ids: Array,
    found: Mapping[str, list[Array]] | None = None,
  ) -> tuple[Array, tuple[Carry, ...]]:
    """x [B, T, D] and the carry of each mixer -> the same, after this layer.

    Adds to `found` the values of its kinds, see `features.ACTIVATIONS`. A mixer whose outputs or
    carry have another form than its inputs raises a ConfigurationError.
    """
    inputs = x
    after = []
    for mixer, before in zip(self.mixers, carry, strict=True):
      y, mixer_carry = mixer(
        RMSNorm(name='mixer_norm')(x), before, positions=positions, segment_ids=segment_ids
      )
      check_result(type(mixer).__name__, x, before, y, mixer_carry)
      x = x + layers.dropout(y.astype(x.dtype), self.dropout)
      after.append(mixer_carry)
    mixed = x
    added = self.mlp(RMSNorm(name='mlp_norm')(mixed))
    added = layers.dropout(added, self.dropout)
    x = mixed + added
    if found:
      activations = {'mixers': mixed - inputs, 'mlp': added, 'stream': x}
      for kind, values in found.items():
        values.append(activations[kind])
    return x, tuple(after)
