"""One layer: residual mixers in the given order, then an MLP, with norms before them or after."""

from collections.abc import Callable, Sequence

import gin
import haiku as hk
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from valkyrie.config.ranges import PositiveInt, ProperFraction, check
from valkyrie.errors import ConfigurationError, check_choice
from valkyrie.models import layers
from valkyrie.models.layers import MLP, GatedMLP, MixerOptions, RMSNorm
from valkyrie.models.mixer_check import check_members, check_result
from valkyrie.sharding.mesh import platform
from valkyrie.types import Array, Carry, DType, SequenceMixer

NORMS = ('before', 'after', 'both')


@gin.configurable
class Block(hk.Module):
  """x += mixer(norm(x)) for each mixer, then x += mlp(norm(x)).

  `mixers` are the classes of the sequence mixers (`@S5` in gin, not `@S5()`), applied in this
  order; it may be (). `mlp` is the class of the MLP, and `mlp_width` its width; without one, mlp is
  None, and no width is needed. `dropout` is the share of what the mixers and the MLP add to the
  residual stream, and of the MLP's inner values, that is zeroed in training. `norm` is 'before',
  'after', x += norm(mixer(x)), as in OLMo 2 (arXiv 2501.00656), or 'both', as in Gemma 2 (arXiv
  2408.00118). A mixer that lacks an attribute raises a ConfigurationError.
  """

  def __init__(
    self,
    mixers: Sequence[Callable[[], SequenceMixer]],
    mlp_width: PositiveInt | None = None,
    dropout: ProperFraction = 0.0,
    mlp: Callable[..., MLP] | None = GatedMLP,
    norm: str = 'before',
    name: str | None = None,
  ):
    super().__init__(name)
    check('Block.mlp_width', mlp_width, PositiveInt)
    check('Block.dropout', dropout, ProperFraction)
    check_choice('Block.norm', norm, NORMS)
    if mlp is not None and mlp_width is None:
      raise ConfigurationError('Block.mlp_width is not set. Set it, or set Block.mlp = None.')
    if mlp is None and not mixers:
      raise ConfigurationError(
        'A Block has neither mixers nor an MLP. Set Block.mixers or Block.mlp.'
      )
    self.dropout = dropout
    self.norm = norm
    self.mixers = tuple(make() for make in mixers)
    for mixer in self.mixers:
      check_members(mixer)
    self.mlp = None
    if mlp is not None:
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
    flops = sum(mixer.forward_flops(width) for mixer in self.mixers)
    if self.mlp is not None:
      flops += self.mlp.forward_flops(width)
    return flops

  def __call__(
    self,
    x: Array,
    carry: tuple[Carry, ...],
    *,
    positions: Array,
    segment_ids: Array,
    found: dict[str, list[Array]] | None = None,
  ) -> tuple[Array, tuple[Carry, ...]]:
    """x [B, T, D] and the carry of each mixer -> the same, after this layer.

    Adds to `found` the values of its kinds, see `features.ACTIVATIONS`. A mixer whose outputs or
    carry have another form than its inputs raises a ConfigurationError.
    """
    inputs = x
    carries = []
    for mixer, before in zip(self.mixers, carry, strict=True):
      read = self._normed_before(x, 'mixer_norm')
      y, mixer_carry = mixer(read, before, positions=positions, segment_ids=segment_ids)
      check_result(type(mixer).__name__, x, before, y, mixer_carry)
      y = y.astype(x.dtype)
      y = self._normed_after(y, 'post_mixer_norm')
      y = layers.dropout(y, self.dropout)
      x = self._added(x, y)
      carries.append(mixer_carry)
    mixed = x
    if self.mlp is None:
      added = jnp.zeros_like(x)
    else:
      read = self._normed_before(mixed, 'mlp_norm')
      added = self.mlp(read)
      added = self._normed_after(added, 'post_mlp_norm')
      added = layers.dropout(added, self.dropout)
      x = self._added(mixed, added)
    if found:
      activations = {
        'mixers': mixed - inputs,
        'mlp': added,
        'stream': x,
      }
      for kind, values in found.items():
        value = activations[kind]
        values.append(value)
    return x, tuple(carries)

  @hk.transparent
  def _normed_before(self, x: Array, name: str) -> Array:
    """What a mixer or the MLP reads."""
    if self.norm == 'after':
      return x
    return RMSNorm(name=name)(x)

  @hk.transparent
  def _normed_after(self, y: Array, name: str) -> Array:
    """What a mixer or the MLP adds to the residual stream."""
    if self.norm == 'before':
      return y
    return RMSNorm(name=name)(y)

  def _added(self, x: Array, y: Array) -> Array:
    """x + y [B, T, D]."""
    shape = x.shape
    if platform() == 'gpu':
      # As rows, which products are: the one that ends y then adds x, too.
      rows = (-1, shape[-1])
      x = x.reshape(rows)
      y = y.reshape(rows)
    total = x + y
    if self.norm == 'before':
      # Nothing else needs y: a layer that saves the sum does not save y.
      total = checkpoint_name(total, 'stream')
    return total.reshape(shape)
