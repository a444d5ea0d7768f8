"""Published ideas as parts of gin/words_cpu.gin, which words.args tries one at a time.

Each part is bound in the place of one of the package's and takes its bindings:

    python -m valkyrie.main --gin_file=gin/words_cpu.gin --gin_file=gated.gin \\
        --gin_allow_import=scripts --model_dir=runs/gated

with gated.gin of the two lines

    import scripts.experiments.published_parts
    local/Block.mixers = (@HeadGatedAttention,)

docs/results/learning.md says what each is worth.
"""

import dataclasses
from typing import Any

import gin
import haiku as hk
import jax
import jax.numpy as jnp
import optax

from valkyrie.models.attention.longformer import LongformerAttention
from valkyrie.models.language_model import LanguageModel
from valkyrie.models.layers import parameter, project
from valkyrie.models.model import created
from valkyrie.models.recurrence.convolution import CausalConvolution, ConvolvedCarry
from valkyrie.models.tables import rows_of
from valkyrie.training import losses
from valkyrie.training.objective import Prediction, Term
from valkyrie.training.optimizers import Optimizer


@gin.configurable
class HeadGatedAttention(LongformerAttention):
  """Each head's output times a sigmoid of the layer's input (Qiu et al. 2025, arXiv 2505.06708)."""

  @hk.transparent
  def _project_heads(self, x):
    (gates,) = project(x, ('embed', None), head_gate=self.heads)
    self._gates = 2 * jax.nn.sigmoid(gates)  # 1 where the input says nothing
    return super()._project_heads(x)

  @hk.transparent
  def _project_out(self, out, width):
    return super()._project_out(out * self._gates[..., None], width)


@gin.configurable
class ConvolvedAttention(hk.Module):
  """Window attention to x plus a convolution of its last tokens (So et al. 2021, Primer)."""

  causal = True
  sequence_parallel = True
  dropout = 0.0

  def __init__(self, taps: int = 2, name: str | None = None):
    super().__init__(name)
    self._convolution = CausalConvolution(taps)
    self._attention = LongformerAttention()
    self.reach = self._attention.reach

  def initial_carry(self, batch_size, dtype):
    width = gin.query_parameter('LanguageModel.d_model')
    return ConvolvedCarry(
      self._convolution.initial_carry(batch_size, width, dtype),
      self._attention.initial_carry(batch_size, dtype),
    )

  def forward_flops(self, width):
    return self._convolution.forward_flops(width) + self._attention.forward_flops(width)

  def __call__(self, x, carry, **where):
    convolved, tail = self._convolution(x, carry.tail, **where)
    out, state = self._attention(x + convolved, carry.state, **where)
    return out, ConvolvedCarry(tail, state)


_read: list[Any] = []  # the tokens of the chunk that is being read, and the vocabulary's size


@gin.configurable
class TokensBelow(LanguageModel):
  """A language model whose mixers may look at its tokens."""

  def __call__(self, inputs, *others, **options):
    _read.append((inputs, self.vocabulary_size))
    try:
      return super().__call__(inputs, *others, **options)
    finally:
      _read.pop()


@gin.configurable
class ValueEmbeddedAttention(LongformerAttention):
  """Values plus an embedding of their token, from zero (Zhou et al. 2024; modded-nanogpt #55)."""

  @hk.transparent
  def _project_heads(self, x):
    q, k, v = super()._project_heads(x)
    if not _read:  # the check of mixers, which has no tokens
      return q, k, v
    tokens, size = _read[-1]
    axes = ('vocabulary', 'embed')
    table = parameter('value_embedding', (size, self._kv_width), jnp.zeros, axes=axes)
    return q, k, v + rows_of(table, tokens).astype(v.dtype).reshape(v.shape)


def _second_head(hidden):
  return hidden + hk.Linear(hidden.shape[-1], name='second_token')(hidden)


@gin.configurable
@dataclasses.dataclass(frozen=True)
class SecondToken(Term):
  """The cross-entropy of the token after the next (Gloeckle et al. 2024, arXiv 2404.19737).

  The last token of each chunk has none, since its target is in the next chunk.
  """

  weight: float = 0.3

  def extended(self, model):
    inputs = jnp.zeros((1, model.about.width))
    return model.extended(self.name, *created(lambda: _second_head(inputs)))

  def values(self, chunk):
    hidden = hk.transform(_second_head).apply(chunk.params, None, chunk.features.hidden)
    targets = jnp.roll(chunk.batch.targets, -1, axis=1)
    known = (chunk.batch.weights * jnp.roll(chunk.batch.weights, -1, axis=1)).at[:, -1].set(0)
    features = chunk.features._replace(hidden=hidden)
    scores = losses.token_scores(features, targets, chunk.model.about.vocabulary_size)
    return {'second_token': self.weight * known * scores.loss}


_logits = losses.logits


@gin.configurable
@dataclasses.dataclass(frozen=True)
class SoftCapped(Prediction):
  """Logits between -cap and cap, in evaluations too (Gemma 2, Riviere et al. 2024, 2408.00118)."""

  cap: float = 15.0

  def __post_init__(self):
    super().__post_init__()

    def capped(features, vocabulary_size):
      scores = _logits(features, vocabulary_size)
      return jnp.where(scores > -1e30, self.cap * jnp.tanh(scores / self.cap), scores)

    losses.logits = capped  # of all that this process computes


@gin.configurable
def cautious_adamw(
  learning_rate: float, b1: float = 0.9, b2: float = 0.98, weight_decay: float = 0.1
) -> optax.GradientTransformation:
  """AdamW that decays only where the step also leads towards zero (Chen et al. 2025)."""

  def add_decay(updates, state, params):
    decayed = jax.tree.map(lambda u, p: u + weight_decay * p * (u * p > 0), updates, params)
    return decayed, state

  return optax.chain(
    optax.scale_by_adam(b1, b2),
    optax.GradientTransformation(lambda params: optax.EmptyState(), add_decay),
    optax.scale_by_learning_rate(learning_rate),
  )


@gin.configurable
def normuon(
  learning_rate: float, b2: float = 0.95, weight_decay: float = 0.1
) -> optax.GradientTransformation:
  """Muon, whose rows are scaled by second moments of their own (Li et al. 2025, 2510.05491)."""

  def scale(updates, moments, params):
    def of_leaf(u, moment):
      if u.ndim < 2:
        return u, moment
      moment = b2 * moment + (1 - b2) * jnp.mean(jnp.square(u), axis=0, keepdims=True)
      scaled = u / (jnp.sqrt(moment) + 1e-8)
      # The size of Adam's steps (Liu et al. 2025).
      return 0.2 * jnp.sqrt(u.size) * scaled / (jnp.linalg.norm(scaled) + 1e-8), moment

    pairs = jax.tree.map(of_leaf, updates, moments)
    return tuple(jax.tree.map(lambda _, pair, i=i: pair[i], updates, pairs) for i in range(2))

  def moments(params):
    return jax.tree.map(lambda p: jnp.zeros((1, *p.shape[1:]), p.dtype), params)

  return optax.chain(
    optax.contrib.muon(-1.0),
    optax.GradientTransformation(moments, scale),
    optax.add_decayed_weights(weight_decay),
    optax.scale_by_learning_rate(learning_rate),
  )


@gin.configurable
class Averaged(Optimizer):
  """After the last step, an exponential average of the parameters takes their place."""

  def __init__(self, last_step: int, horizon: int, **options: Any):
    """horizon: the steps over which the average reaches back."""
    super().__init__(**options)
    self._last_step = last_step
    self._weight = 1 / horizon

  def init(self, params, kinds):
    return super().init(params, kinds), (jnp.zeros((), jnp.int32), params)

  def update(self, gradients, state, params, learning_rate, kinds):
    inner, (step, average) = state
    params, inner = super().update(gradients, inner, params, learning_rate, kinds)
    average = optax.incremental_update(params, average, self._weight)
    is_last = step + 1 == self._last_step
    params = jax.tree.map(lambda new, old: jnp.where(is_last, old, new), params, average)
    return params, (inner, (step + 1, average))

  def state_axes(self, state, params, axes):
    return super().state_axes(state[0], params, axes), ((), axes)
