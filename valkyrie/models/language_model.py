"""The language model: embedding, stacked layers, norm, and memory from chunk to chunk in hk.State.

Only `LanguageModel` touches `hk.State`: one pytree, `carry`, whose leaves are [repeats, B, ...]; a
planner, which stands between the layers' halves, adds its own and divides that of the layers.
The mixers below it take and return carries as values, since `hk.layer_stack` would otherwise store
the state after the first call as the initial one.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import gin
import haiku as hk
import jax
import jax.numpy as jnp

from valkyrie.errors import ConfigurationError
from valkyrie.models.attention.full import FullAttention
from valkyrie.models.attention.longformer import LongformerAttention
from valkyrie.models.block import Block
from valkyrie.models.layers import RMSNorm
from valkyrie.models.planner.planner import Drafts, Planner
from valkyrie.models.sizes import check_sizes
from valkyrie.sharding.partitioner import constrain
from valkyrie.types import Array, Carry, Params

_KEPT = {
  'products': jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    jax.checkpoint_policies.save_only_these_names('attention'),
  ),
  'nothing': jax.checkpoint_policies.nothing_saveable,
}
_COMPUTE_DTYPES = ('float32', 'bfloat16', 'float64')  # float64 for tests, where JAX is told so
_LANES = 128  # the width of a TPU's vector registers, to which the vocabulary is padded


class Features(NamedTuple):
  """What the loss and the sampler turn into logits: hidden @ unembedding.T.

  hidden: [B, T, D] in the compute dtype; unembedding: [V, D] float32, V padded to lanes.
  drafts: what a planner said of the same tokens, for training to add losses to; None without one.
  """

  hidden: Array
  unembedding: Array
  drafts: Drafts | None = None


@gin.configurable
class LanguageModel(hk.Module):
  """A causal language model over chunks of token streams."""

  def __init__(
    self,
    vocabulary_size: int,
    d_model: int,
    layers: int,
    pattern: Sequence[Callable[..., Block]] = (Block,),
    planner: Callable[..., Planner] | None = None,
    compute_dtype: str = 'float32',
    remat: str | None = 'products',
    unroll: int = 1,
    name: str | None = None,
  ):
    """Configures the model.

    Args:
      vocabulary_size: tokens that exist; the embedding is padded to a multiple of 128.
      d_model: D.
      layers: L, a multiple of the pattern's length.
      pattern: block classes (`@Block` in gin), repeated until there are `layers` of them.
      planner: a class (`@Planner` in gin): its plans are made of what the lower half of the
        repeats found, and read before the upper half; None builds nothing.
      compute_dtype: 'float32' or 'bfloat16', of activations; parameters stay float32.
      remat: what the backward pass finds kept of a layer: 'products' keeps matrix products and
        what attention found, and recomputes what is cheap; 'nothing' recomputes all of the layer;
        None keeps every activation.
      unroll: repeats of the pattern that are compiled one after the other, in a loop over the
        rest. A loop copies what the backward pass needs in and out of stacked arrays; few layers
        on a CPU gain by doing without, and many would take long to compile.
      name: Haiku's.

    Raises:
      ConfigurationError: where the layers are not whole repeats of the pattern, a name is not
        known, or a planner has no layers above it.
    """
    super().__init__(name)
    if remat is not None and remat not in _KEPT:
      raise ConfigurationError(
        f'LanguageModel: remat={remat!r} is not known; it is {list(_KEPT)} or None.'
      )
    if compute_dtype not in _COMPUTE_DTYPES:
      raise ConfigurationError(
        f'LanguageModel: compute_dtype={compute_dtype!r} is not known; it is one of '
        f'{list(_COMPUTE_DTYPES)}.'
      )
    check_sizes('LanguageModel', vocabulary_size=vocabulary_size, d_model=d_model, unroll=unroll)
    check_sizes('LanguageModel.pattern', blocks=len(pattern))
    self.repeats, left = divmod(layers, len(pattern))
    if left or layers < 1:
      raise ConfigurationError(
        f'LanguageModel: layers={layers} must be a multiple of the {len(pattern)} blocks of '
        'LanguageModel.pattern, and at least 1.'
      )
    if planner is not None and self.repeats < 2:
      raise ConfigurationError(
        f'LanguageModel: layers={layers} are one repeat of the {len(pattern)} blocks of '
        'LanguageModel.pattern, but a planner stands between two. Have twice as many layers.'
      )
    self.vocabulary_size = vocabulary_size
    self.d_model = d_model
    self.pattern = tuple(pattern)
    self.compute_dtype = jnp.dtype(compute_dtype)
    self.remat = remat
    self.unroll = unroll
    self.planner = None if planner is None else planner(name='planner')
    self.upper_repeats = 0 if planner is None else self.repeats // 2

  def __call__(
    self, inputs: Array, positions: Array, segment_ids: Array, *, plan: bool = True
  ) -> Features:
    """Reads one chunk of every row, and moves the carry in `hk.State` past it.

    Args:
      inputs, positions, segment_ids: int32 [B, T], see `types.Batch`.
      plan: False passes over the planner, and leaves it the carry of a document start.

    Returns:
      The features of every position.
    """
    rows = -(-self.vocabulary_size // _LANES) * _LANES
    init = hk.initializers.RandomNormal(self.d_model**-0.5)
    embedding = hk.get_parameter('embedding', (rows, self.d_model), jnp.float32, init)
    x = embedding[inputs].astype(self.compute_dtype)

    def layer(x, carry):
      x, carry = self._apply_blocks(x, carry, positions, segment_ids)
      return constrain(x, 'batch', 'time', 'activation'), carry

    if self.remat is not None:
      layer = hk.remat(layer, policy=_KEPT[self.remat])
    fresh = self.initial_carry(inputs.shape[0])

    def remembered(memory: str) -> Carry:
      return hk.get_state(memory, (), self.compute_dtype, init=lambda *_: fresh[memory])

    def through(layers, repeats, memory, x):
      stack = hk.layer_stack(repeats, with_per_layer_inputs=True, unroll=self.unroll, name=layers)
      x, after = stack(layer)(x, remembered(memory))
      hk.set_state(memory, after)
      return x

    x, drafts = through('layers', self.repeats - self.upper_repeats, 'carry', x), None
    if self.planner is not None:
      after = fresh['planner']
      if plan:
        read, after, drafts = self.planner(
          x, remembered('planner'), positions=positions, segment_ids=segment_ids
        )
        x += read
      hk.set_state('planner', after)
      x = through('upper_layers', self.upper_repeats, 'upper_carry', x)
    return Features(RMSNorm(name='final_norm')(x), embedding, drafts)

  def initial_carry(self, batch_size: int) -> dict[str, Any]:
    """What `hk.State` holds of rows that have read nothing.

    Returns:
      'carry': over the pattern, leaves [repeats, B, ...]. With a planner it is of the layers below
      it; then 'planner' is its own carry, and 'upper_carry' that of the layers above it.
    """
    carries = self._of_blocks(
      lambda blocks: tuple(b.initial_carry(batch_size, self.compute_dtype) for b in blocks)
    )

    def repeated(times):
      return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (times, *leaf.shape)), carries)

    if self.planner is None:
      return {'carry': repeated(self.repeats)}
    return {
      'carry': repeated(self.repeats - self.upper_repeats),
      'planner': self.planner.initial_carry(batch_size, self.d_model, self.compute_dtype),
      'upper_carry': repeated(self.upper_repeats),
    }

  def forward_flops(self) -> int:
    """Operations a token costs in one forward pass, the unembedding included."""
    layers = self._of_blocks(lambda blocks: sum(b.forward_flops(self.d_model) for b in blocks))
    planner = 0 if self.planner is None else self.planner.forward_flops(self.d_model)
    return self.repeats * layers + planner + 2 * self.d_model * self.vocabulary_size

  def window(self) -> int:
    """How far back any token of a window is, in the whole pattern; 0 where nothing attends."""
    return max(self._of_mixers(lambda mixer: mixer.reach, LongformerAttention), default=0)

  def max_context(self) -> int | None:
    """The longest document that every mixer can read; None where nothing bounds it."""
    return min(self._of_mixers(lambda mixer: mixer.max_context, FullAttention), default=None)

  def draws(self) -> bool:
    """Whether training draws random numbers: for dropout, in any mixer."""
    return any(self._of_mixers(lambda mixer: mixer.dropout > 0))

  def whole_time(self) -> tuple[str, ...]:
    """The parts that cannot work on pieces of time, each named once."""
    mixers = self._of_mixers(
      lambda mixer: (type(mixer).__name__, getattr(mixer, 'shards_of_time', False))
    )
    parts = [kind for kind, on_pieces in mixers if not on_pieces]
    return tuple(dict.fromkeys(parts + ['Planner'] * (self.planner is not None)))

  def plan_block(self) -> int | None:
    """The planner's grain; None without one."""
    return None if self.planner is None else self.planner.plan_block

  def check_causal(self) -> None:
    """Raises ConfigurationError where a mixer would read the tokens that are to be predicted."""
    mixers = self._of_mixers(lambda mixer: (type(mixer).__name__, mixer.causal))
    for kind in [kind for kind, causal in mixers if not causal]:
      raise ConfigurationError(
        f'A language model predicts each token from those before it, but its mixer {kind} also '
        f'reads those after it. Put one in its place in Block.mixers that reads one way, such as '
        'LongformerAttention, or S5 with S5.bidirectional = False.'
      )

  def _of_mixers(self, ask: Callable[[Any], Any], kind: type = object) -> list[Any]:
    return self._of_blocks(
      lambda blocks: [ask(m) for block in blocks for m in block.mixers if isinstance(m, kind)]
    )

  @hk.transparent
  def _blocks(self) -> list[Block]:
    return [make(name=f'block_{i}') for i, make in enumerate(self.pattern)]

  @hk.transparent
  def _apply_blocks(self, x, carry, positions, segment_ids):
    after = []
    for block, before in zip(self._blocks(), carry, strict=True):
      x, block_carry = block(x, before, positions=positions, segment_ids=segment_ids)
      after.append(block_carry)
    return x, tuple(after)

  def _of_blocks(self, ask: Callable[[list[Block]], Any]) -> Any:
    """Asks the blocks something that needs no parameters, leaving no trace in this transform."""
    answer = []
    hk.transform(lambda: answer.append(ask(self._blocks()))).apply({}, None)
    return answer[0]


class Model(NamedTuple):
  """A language model as pure functions, and what its surroundings need to know of it.

  init: (rng, batch_size) -> (params, carry of rows that have read nothing).
  initial_carry: batch_size -> that carry alone.
  apply: (params, carry, inputs, positions, segment_ids, rng=None, plan=True) -> (Features, carry).
    With an rng dropout is at work, which is for training alone. `plan`, which is not traced, says
    whether a planner takes part.
  narrow: params -> a copy from which `apply` computes the same, with the matrices of the layers in
    the compute dtype already: half as much to send and to hold.
  forward_flops: operations a token costs in one forward pass.
  window: how far its attention sees; what is further back is remembered or lost.
  max_context: the longest document it can read, or None.
  draws: whether it has any dropout; where not, training makes no keys.
  plan_block: the grain of its planner, or None.
  whole_time: the parts that must have all of a row on one device, see `sharding.sequence_parallel`.
  """

  init: Callable[[Array, int], tuple[Params, Carry]]
  initial_carry: Callable[[int], Carry]
  apply: Callable[..., tuple[Features, Carry]]
  narrow: Callable[[Params], Params]
  vocabulary_size: int
  forward_flops: int
  window: int
  max_context: int | None
  draws: bool
  plan_block: int | None
  whole_time: tuple[str, ...]


def transform(make: Callable[..., LanguageModel]) -> Model:
  """Turns the module that `make` builds into pure functions; reads gin here, and when traced.

  Raises:
    ConfigurationError: where a mixer is not causal.
  """

  def forward(inputs, positions, segment_ids, plan=True):
    return make(name='model')(inputs, positions, segment_ids, plan=plan)

  pure = hk.transform_with_state(forward)

  def init(rng, batch_size):
    one = jnp.ones((batch_size, 1), jnp.int32)
    return pure.init(rng, one, one, one)

  def initial_carry(batch_size):
    def fresh():
      return make(name='model').initial_carry(batch_size)

    return {'model': hk.without_apply_rng(hk.transform(fresh)).apply({})}

  def apply(params, carry, inputs, positions, segment_ids, rng=None, plan=True):
    return pure.apply(params, carry, rng, inputs, positions, segment_ids, plan)

  def narrow(params):
    # In the stack of layers a matrix has three axes. `layers.products` casts it where it is used;
    # nothing else has three: norms and Λ have two, the B and C of S5, which stay wide, have four.
    return jax.tree.map(lambda p: p.astype(dtype) if p.ndim == 3 else p, params)

  about = []

  def look():
    m = make(name='model')
    m.check_causal()
    about.extend((m.vocabulary_size, m.forward_flops(), m.window(), m.max_context()))
    about.extend((m.draws(), m.plan_block(), m.whole_time()))
    return m.compute_dtype

  dtype = hk.transform(look).apply({}, None)
  return Model(init, initial_carry, apply, narrow, *about)
