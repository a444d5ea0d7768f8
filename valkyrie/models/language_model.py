"""Language model: embedding, stacked layers, norm, and a carry from chunk to chunk in hk.State.

Only `LanguageModel` touches `hk.State`. Mixers take and return carries as values, since
`hk.layer_stack` would store the state after the first call as the initial one.
"""

from collections.abc import Callable, Container, Mapping, Sequence
import contextlib
import dataclasses
import functools
from typing import Any

import gin
import haiku as hk
import jax
import jax.numpy as jnp

from valkyrie.config.ranges import PositiveFloat, PositiveInt
from valkyrie.errors import ConfigurationError, check_choice
from valkyrie.models import remat
from valkyrie.models.attention.patterns import noted
from valkyrie.models.block import Block
from valkyrie.models.declarations import stored_as
from valkyrie.models.features import ACTIVATIONS, SITES, Description, Features, Insert, Kind
from valkyrie.models.layers import MixerOptions, Module, RMSNorm, parameter
from valkyrie.models.lora import Lora
from valkyrie.models.matrices import Masks
from valkyrie.models.mixer_check import check_causal
from valkyrie.models.model import Model, created
from valkyrie.models.ngrams import NgramEmbedding
from valkyrie.models.quantization import Quantization
from valkyrie.models.sites import Sites
from valkyrie.models.stacks import Stack, around_insert, by_layer, divided, within
from valkyrie.models.tables import rows_of
from valkyrie.sharding import layer_weights
from valkyrie.sharding.partitioner import constrain
from valkyrie.types import Array

_COMPUTE_DTYPES = ('float32', 'bfloat16', 'float64')  # float64 for tests, with jax_enable_x64
_LANES = 128  # the width of a TPU's vector registers; the vocabulary is padded to a multiple


@gin.configurable(denylist=['kernel_lengths'])  # pyright: ignore  (gin has no types)
@dataclasses.dataclass(eq=False)
class LanguageModel(Module):
  """A causal language model over chunks of token streams.

  Attributes:
    vocabulary_size: tokens that exist; the embedding is padded to a multiple of 128.
    d_model: D.
    layers: L, a multiple of the pattern's length.
    pattern: block classes (`@Block` in gin), repeated until there are `layers` blocks.
    ngrams: a class (`@NgramEmbedding` in gin) that adds n-grams to the embeddings; None for none.
    insert: a class of a module between the lower and the upper half of the repeats, which adds to
      what the upper half reads (see `features.Insert`); None for none.
    embedding_scale: a factor on the embeddings of the inputs. None takes sqrt(D), which gives them
      variance 1, as in Griffin and Gemma.
    tied: logits are products with the embedding; False learns another matrix, `unembedding`.
    lora: the class of the adapters (`@Lora` in gin); None for none.
    sites: the class of the sites of a decomposition (`@Sites` in gin); None for none.
    learned_carry: documents begin with states of the recurrences that are learned, zero at first.
    quantization: the class of the products in 8 bits (`@Quantization` in gin); None for none.
    compute_dtype: 'float32' or 'bfloat16', of activations.
    parameter_dtype: 'float32', or 'bfloat16' if that is the compute_dtype: half of the memory.
      Updates are rounded to it at random. Scales, embeddings and recurrences' rates stay float32.
    remat_policy: what a layer saves for the backward pass, which recomputes the rest: 'products'
      saves matrix products and attention outputs, and states and outputs of S5 in place of the
      products around them; 'mlp' attention outputs and the products of the MLP's width;
      'attention' only the former; 'weights' 8-bit ones; 'nothing' nothing; None all.
    unroll: repeats of the pattern that are compiled one after the other, inside a loop over the
      rest. It saves the copies of stacked activations; many compile slowly.
    kernel_lengths: see `layers.MixerOptions`; a run sets it after `training.kernel_check`.
  """

  vocabulary_size: PositiveInt
  d_model: PositiveInt
  layers: PositiveInt
  pattern: Sequence[Callable[..., Block]] = (Block,)
  ngrams: Callable[..., NgramEmbedding] | None = None
  insert: Callable[..., Insert] | None = None
  embedding_scale: PositiveFloat | None = None
  tied: bool = True
  lora: Callable[[], Lora] | None = None
  sites: Callable[[], Sites] | None = None
  learned_carry: bool = False
  quantization: Callable[[], Quantization] | None = None
  compute_dtype: str = 'float32'
  parameter_dtype: str = 'float32'
  remat_policy: str | None = 'products'
  unroll: PositiveInt = 1
  kernel_lengths: Container[tuple[str, int]] = ()

  def __post_init__(self):
    super().__post_init__()
    check_choice('LanguageModel.remat_policy', self.remat_policy, (*remat.POLICIES, None))
    check_choice('LanguageModel.compute_dtype', self.compute_dtype, _COMPUTE_DTYPES)
    layers = f'LanguageModel.layers={self.layers}'
    length = len(self.pattern)
    if self.parameter_dtype not in ('float32', self.compute_dtype):
      raise ConfigurationError(
        f'LanguageModel.parameter_dtype={self.parameter_dtype!r} with compute_dtype='
        f"{self.compute_dtype!r}: use 'float32', or 'bfloat16' for both."
      )
    if not length or self.layers % length:
      raise ConfigurationError(
        f'{layers} must be a multiple of the {length} blocks of LanguageModel.pattern, at least 1.'
      )
    if self.insert is not None and self.layers < 2 * length:
      raise ConfigurationError(
        f'{layers} is one repeat of the {length} blocks of LanguageModel.pattern, but '
        'LanguageModel.insert needs repeats below and above it. Double the layers.'
      )
    self.repeats = self.layers // length
    self.scale: float = self.embedding_scale or self.d_model**0.5
    self.adapters = _made(self.lora)
    self._sites = _made(self.sites)
    if self._sites is not None and (self.adapters is not None or self.insert is not None):
      raise ConfigurationError(
        'LanguageModel.sites decomposes a model without adapters and without an insert. Set '
        'LanguageModel.lora = None and LanguageModel.insert = None; `export` merges adapters.'
      )
    self.quantized = _made(self.quantization)
    if self.quantized and (self.adapters or self._sites):
      raise ConfigurationError(
        'LanguageModel.quantization excludes adapters and sites. Set LanguageModel.lora = None and '
        'LanguageModel.sites = None, or LanguageModel.quantization = None.'
      )
    self._scope = gin.current_scope()  # of a reference such as @teacher/LanguageModel
    self._ngrams = _made(self.ngrams, name='ngrams')
    self._insert = _made(self.insert)
    cuts = ()
    if self._sites is not None:
      cuts = self._sites.cuts(self.layers, length)
    self._below = divided(self.repeats, cuts)
    self._above = []
    if self.insert is not None:
      self._below, self._above = around_insert(self.repeats)

  def __call__(
    self,
    inputs: Array,
    positions: Array,
    segment_ids: Array,
    with_insert: bool = True,
    activations: Sequence[Kind] = (),
    masks: Mapping[str, Masks] | None = None,
    shift: Array | None = None,
  ) -> Features:
    """Reads one chunk of every row, int32 [B, T] (see `types.Batch`), and advances the carry.

    Inputs of numbers, [B, T, D], take the place of the rows of the embedding.
    Without `with_insert`, the insert is left out, and its carry is reset as at a document start.
    `activations` are the kinds of intermediate values to return, see `features.Kind`.
    `masks` of sites, by path, have a leading dimension of their layers; other sites compute x W.
    `shift`, [B, T, D], is added to what the first layer reads, for gradients by it.
    """
    with (
      gin.config_scope(self._scope),
      hk.custom_creator(stored_as(jnp.dtype(self.parameter_dtype))),
      _getter_of(self.quantized),
      hk.custom_getter(layer_weights.getter),
      _getter_of(self.adapters),
    ):
      where = {'positions': positions, 'segment_ids': segment_ids}
      return self._read(inputs, where, with_insert, activations, masks or {}, shift)

  @hk.transparent
  def _read(self, inputs, where, with_insert, activations, masks, shift) -> Features:
    embedding = self._table('embedding')
    unembedding = embedding
    if not self.tied:
      unembedding = self._table('unembedding')
    fresh = self.initial_carry(inputs.shape[0])
    x = self._embed(inputs, embedding, fresh, where)
    embedded = None
    if shift is not None:
      x += shift.astype(x.dtype)
      embedded = x

    seen = {}
    read_stacks = functools.partial(self._read_stacks, where, activations, masks, fresh, seen)
    x, values = read_stacks(self._below, x)
    auxiliary = None
    if self._insert is not None:
      name = self._insert.name
      carry = fresh[name]
      if with_insert:
        added, carry, auxiliary = self._insert(x, _carried(name, fresh), **where)
        x += added
      hk.set_state(name, carry)
      x, above = read_stacks(self._above, x)
      values = {kind: jnp.concatenate([values[kind], above[kind]]) for kind in values}
    hidden = RMSNorm(name='final_norm')(x)
    return Features(hidden, unembedding, auxiliary, values or None, embedded=embedded, **seen)

  @hk.transparent
  def _table(self, name: str) -> Array:
    """A vector for each token, [V, D]."""
    rows = -(-self.vocabulary_size // _LANES) * _LANES
    init = hk.initializers.RandomNormal(self.d_model**-0.5)
    return parameter(name, (rows, self.d_model), init, axes=('vocabulary', 'embed'))

  @hk.transparent
  def _embed(self, inputs, embedding, fresh, where) -> Array:
    """What the first layer reads, [B, T, D]; advances the carry of the n-grams."""
    embedded = inputs
    if jnp.issubdtype(inputs.dtype, jnp.integer):
      embedded = rows_of(embedding, inputs)
    x = (self.scale * embedded).astype(self.compute_dtype)
    if self._ngrams is None:
      return x
    if inputs.ndim > 2:
      raise ConfigurationError(
        'LanguageModel.ngrams looks up tokens, but the inputs are numbers. Set it to None.'
      )
    before = _carried('ngrams', fresh)
    added, tail = self._ngrams(inputs, before, x.shape[-1], x.dtype, **where)
    hk.set_state('ngrams', tail)
    return x + self.scale * added

  @hk.transparent
  def _read_stacks(self, where, activations, masks, fresh, seen, stacks, x):
    """Stacks: x -> (x, values by kind [layers, ...]); fills `seen`, and advances their carries."""
    values = []
    for stack in stacks:
      layer = self._layer(where, activations, stack)
      if self.remat_policy is not None:
        layer = hk.remat(layer, policy=remat.POLICIES[self.remat_policy])
      of_stack = within(f'{self.module_name}/{stack.name}/', masks)
      before = _carried(stack.memory, fresh)
      x, (carry, found, of_layers) = stack.loop(layer, self.unroll)(x, before, of_stack)
      hk.set_state(stack.memory, carry)
      values.append(found)
      for kind, by_path in of_layers.items():
        seen[kind] = seen.get(kind, {}) | by_path
    return x, by_layer(values)

  def _layer(self, where, activations, stack: Stack) -> Callable:
    """One repeat: (x, carry, masks) -> (x, (carry, values by kind, those by kind and path))."""
    prefix = f'{self.module_name}/{stack.name}/'  # Haiku names modules of a stack relative to it
    first_layer = stack.first * len(self.pattern)

    def layer(x, carry, masks):
      values = {kind: [] for kind in activations if kind in ACTIVATIONS}
      inputs = {}
      after = []
      with noted(activations, prefix) as seen:
        blocks = zip(self.blocks(), carry, strict=True)
        for number, (block, before) in enumerate(blocks, first_layer):
          with self._sites_of(number, prefix, masks, inputs):
            x, block_carry = block(x, before, found=values, **where)
          after.append(block_carry)
      if SITES in activations:
        seen[SITES] = inputs
      return constrain(x, 'batch', 'time', 'activation'), (tuple(after), values, seen)

    return layer

  def _sites_of(self, layer, prefix, masks, seen) -> contextlib.AbstractContextManager:
    """A context in which matrices of a layer, or of its equals, become sites."""
    if self._sites is None:
      return contextlib.nullcontext()
    return hk.custom_getter(self._sites.getter(layer, prefix, masks, seen))

  def initial_carry(self, batch_size: int) -> dict[str, Any]:
    """The content of `hk.State` for rows that have read nothing.

    'carry' is a tuple over the pattern, with leaves [repeats, B, ...], and so is the carry of each
    other stack, see `stacks`. An insert's carry has its name, and 'ngrams' are the last tokens,
    both [B, ...].
    """
    carries = self.inspect(
      lambda blocks: tuple(b.initial_carry(batch_size, self.compute_dtype) for b in blocks)
    )

    def repeated(times):
      return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (times, *leaf.shape)), carries)

    fresh = {stack.memory: repeated(stack.repeats) for stack in (*self._below, *self._above)}
    if self._ngrams is not None:
      fresh['ngrams'] = self._ngrams.initial_carry(batch_size)
    insert = self._insert
    if insert is not None:
      fresh[insert.name] = insert.initial_carry(batch_size, self.d_model, self.compute_dtype)
    return fresh

  def describe(self) -> Description:
    """The facts; raises a ConfigurationError if a mixer reads tokens that are to be predicted."""
    mixers = self.inspect(lambda blocks: [mixer for block in blocks for mixer in block.mixers])
    check_causal(mixers)
    carried = [mixer for mixer in mixers if getattr(mixer, 'carried', True)]
    bounded = [mixer for mixer in carried if not getattr(mixer, 'slides', False)]
    beside = [part for part in (self._ngrams, self._insert) if part is not None]
    parts = [*mixers]
    insert_name = None
    exact_gradient = True
    if self._insert is not None:
      parts.append(self._insert)
      insert_name = self._insert.module_name
      exact_gradient = self._insert.exact_gradient
    whole = [type(part) for part in parts if not getattr(part, 'sequence_parallel', False)]
    layer_flops = self.inspect(lambda blocks: sum(b.forward_flops(self.d_model) for b in blocks))
    flops = self.repeats * layer_flops
    flops += sum(part.forward_flops(self.d_model) for part in beside)
    flops += 2 * self.d_model * self.vocabulary_size
    return Description(
      vocabulary_size=self.vocabulary_size,
      width=self.d_model,
      layers=self.layers,
      compute_dtype=jnp.dtype(self.compute_dtype),
      forward_flops=flops,
      window=max(_known('reach', mixers), default=0),
      horizon=max(_known('horizon', mixers), default=None),
      max_context=min(_known('max_context', bounded), default=None),
      carried=len(carried) == len(mixers),
      has_dropout=self.inspect(lambda blocks: any(block.has_dropout for block in blocks)),
      insert=insert_name,
      exact_gradient=exact_gradient,
      needs_whole_rows=tuple(dict.fromkeys(kind.__name__ for kind in whole)),
      remat_policy=self.remat_policy,
      site_entries=() if self._sites is None else self._sites.entries,
    )

  @hk.transparent
  def blocks(self) -> list[Block]:
    """New blocks of the pattern, with the options of this model."""
    with gin.config_scope(self._scope):
      blocks = [make(name=f'block_{i}') for i, make in enumerate(self.pattern)]
    for block in blocks:
      block.configure(MixerOptions(self.learned_carry, self.kernel_lengths))
    return blocks

  def inspect(self, ask: Callable[[list[Block]], Any]) -> Any:
    """The answer of blocks to a question that needs no parameters, outside this transform."""
    with gin.config_scope(self._scope):
      return hk.transform(lambda: ask(self.blocks())).apply({}, None)


def _made(make: Callable | None, **named: Any) -> Any:
  """What a class makes; None without a class."""
  return None if make is None else make(**named)


def _getter_of(part: Any) -> contextlib.AbstractContextManager:
  """A context in which parameters pass through the getter of a part, unless it is None."""
  return contextlib.nullcontext() if part is None else hk.custom_getter(part.getter)


def _carried(memory: str, fresh: Mapping[str, Any]) -> Any:
  """The carry under a name in `hk.State`, which begins as in `fresh`."""
  return hk.get_state(memory, (), init=lambda *_: fresh[memory])


def _known(name: str, mixers: Sequence[Any]) -> list[Any]:
  """The values of an optional attribute of the mixers that have it."""
  values = [getattr(mixer, name, None) for mixer in mixers]
  return [value for value in values if value is not None]


def asked(make: Callable[..., LanguageModel], question: Callable[[LanguageModel], Any]) -> Any:
  """The answer of the module that `make` builds to a question that needs no parameters."""
  return hk.transform(lambda: question(make(name='model'))).apply({}, None)


def transform(make: Callable[..., LanguageModel]) -> Model:
  """The module that `make` builds as pure functions; reads gin here, and when traced.

  A mixer that is not causal raises a ConfigurationError.
  """

  def forward(*inputs, **options):
    return make(name='model')(*inputs, **options)

  pure = hk.transform_with_state(forward)
  params_of, declared = created(lambda: forward(*[jnp.ones((1, 1), jnp.int32)] * 3))

  def init(rng, batch_size):
    parameters()  # whose trace of `params_of` serves here, too
    return params_of(rng), initial_carry(batch_size)

  def initial_carry(batch_size):
    return {'model': asked(make, lambda model: model.initial_carry(batch_size))}

  def apply(params, carry, inputs, positions, segment_ids, rng=None, *options, **named):
    return pure.apply(params, carry, rng, inputs, positions, segment_ids, *options, **named)

  @functools.cache
  def parameters():
    made = declared()
    lora, learned = asked(make, lambda model: (model.adapters, model.learned_carry))
    if lora is not None:
      lora.check([f'{m}/{n}' for m, group in made.items() for n, p in group.items() if p.cast])
    if learned and not any('first_carry' in ' '.join(group) for group in made.values()):
      raise ConfigurationError(
        'LanguageModel.learned_carry=True needs a recurrence in Block.mixers. Add one, such as S5.'
      )
    return made

  return Model(init, initial_carry, apply, parameters, asked(make, lambda model: model.describe()))
