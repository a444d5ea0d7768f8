"""Language model: embedding, stacked layers, norm, and a carry from chunk to chunk in hk.State.

Only `LanguageModel` touches `hk.State`. Mixers take and return carries as values, since
`hk.layer_stack` would store the state after the first call as the initial one.
"""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import functools
import math
from typing import Any, NamedTuple
import zlib

import gin
import haiku as hk
import jax
import jax.numpy as jnp

from valkyrie.errors import ConfigurationError, check_choice
from valkyrie.models.block import Block
from valkyrie.models.declarations import Declarations, Kind, Masks, Parameter, stored_as
from valkyrie.models.features import SITES, Description, Features, Planner
from valkyrie.models.layers import RMSNorm, check_sizes, parameter
from valkyrie.models.lora import Lora
from valkyrie.models.ngrams import NgramEmbedding
from valkyrie.models.parts import is_of_model
from valkyrie.models.sites import Sites
from valkyrie.sharding import ambient, layer_weights
from valkyrie.sharding.partitioner import constrain
from valkyrie.types import Array, Axes, Carry, Params

_SAVED = jax.checkpoint_policies.save_only_these_names  # names of `checkpoint_name`
# A 'product' is the result of a `split_product`: its sum over devices is saved, instead of parts.
_REMAT_POLICIES = {
  'products': jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable, _SAVED('attention', 'product')
  ),
  'mlp': _SAVED('attention', 'mlp'),
  'attention': _SAVED('attention'),
  'nothing': jax.checkpoint_policies.nothing_saveable,
}
_COMPUTE_DTYPES = ('float32', 'bfloat16', 'float64')  # float64 for tests, with jax_enable_x64
_LANES = 128  # the width of a TPU's vector registers; the vocabulary is padded to a multiple


@gin.configurable
@dataclasses.dataclass(eq=False)
class LanguageModel(hk.Module):
  """A causal language model over chunks of token streams.

  Attributes:
    vocabulary_size: tokens that exist; the embedding is padded to a multiple of 128.
    d_model: D.
    layers: L, a multiple of the pattern's length.
    pattern: block classes (`@Block` in gin), repeated until there are `layers` blocks.
    ngrams: a class (`@NgramEmbedding` in gin) that adds n-grams to the embeddings; None for none.
    planner: a class (`@Planner` in gin), or None. It reads the output of the lower half of the
      repeats, and the upper half reads its plans.
    embedding_scale: a factor on the embeddings of the inputs. None takes sqrt(D), which gives them
      variance 1, as in Griffin and Gemma.
    tied: logits are products with the embedding; False learns another matrix, `unembedding`.
    lora: the class of the adapters (`@Lora` in gin); None for none.
    sites: the class of the sites of a decomposition (`@Sites` in gin); None for none.
    compute_dtype: 'float32' or 'bfloat16', of activations.
    parameter_dtype: 'float32', or 'bfloat16' if that is the compute_dtype: half of the memory for
      the parameters that every use casts. Updates are rounded to it at random. Norm scales,
      embeddings and the recurrences' rates stay float32.
    remat_policy: what a layer saves for the backward pass, which recomputes the rest: 'products'
      saves matrix products and attention outputs; 'mlp' attention outputs and the products of the
      MLP's width; 'attention' only the former; 'nothing' nothing; None all.
    unroll: repeats of the pattern that are compiled one after the other, inside a loop over the
      rest. A few layers on a CPU run faster without the loop, which copies the saved activations
      into and out of stacked arrays; many would compile slowly.
  """

  vocabulary_size: int
  d_model: int
  layers: int
  pattern: Sequence[Callable[..., Block]] = (Block,)
  ngrams: Callable[..., NgramEmbedding] | None = None
  planner: Callable[..., Planner] | None = None
  embedding_scale: float | None = None
  tied: bool = True
  lora: Callable[[], Lora] | None = None
  sites: Callable[[], Sites] | None = None
  compute_dtype: str = 'float32'
  parameter_dtype: str = 'float32'
  remat_policy: str | None = 'products'
  unroll: int = 1
  name: str | None = None

  def __post_init__(self):
    super().__post_init__()
    sizes = {'vocabulary_size': self.vocabulary_size, 'd_model': self.d_model}
    check_sizes('LanguageModel', **sizes, unroll=self.unroll)
    check_sizes('LanguageModel.pattern', length=len(self.pattern))
    check_choice('LanguageModel.remat_policy', self.remat_policy, (*_REMAT_POLICIES, None))
    check_choice('LanguageModel.compute_dtype', self.compute_dtype, _COMPUTE_DTYPES)
    layers, length = f'LanguageModel.layers={self.layers}', len(self.pattern)
    if self.parameter_dtype not in ('float32', self.compute_dtype):
      raise ConfigurationError(
        f'LanguageModel.parameter_dtype={self.parameter_dtype!r} with compute_dtype='
        f"{self.compute_dtype!r}: use 'float32', or 'bfloat16' for both."
      )
    if self.layers % length or self.layers < 1:
      raise ConfigurationError(
        f'{layers} must be a multiple of the {length} blocks of LanguageModel.pattern, and at '
        'least 1.'
      )
    if self.planner is not None and self.layers < 2 * length:
      raise ConfigurationError(
        f'{layers} is one repeat of the {length} blocks of LanguageModel.pattern, but a planner '
        'needs repeats below and above it. Double the layers.'
      )
    self.repeats = self.layers // len(self.pattern)
    self.upper_repeats = 0 if self.planner is None else self.repeats // 2
    self.scale = self.d_model**0.5 if self.embedding_scale is None else self.embedding_scale
    self.adapters = None if self.lora is None else self.lora()
    self._sites = None if self.sites is None else self.sites()
    if self._sites is not None and (self.adapters is not None or self.planner is not None):
      raise ConfigurationError(
        'LanguageModel.sites decomposes a model without adapters and without a planner. Set '
        'LanguageModel.lora = None and LanguageModel.planner = None; `export` merges adapters.'
      )
    self._scope = gin.current_scope()  # of a reference such as @teacher/LanguageModel
    self._ngrams = None if self.ngrams is None else self.ngrams(name='ngrams')
    self._planner: Any = None if self.planner is None else self.planner(name='planner')

  def __call__(
    self,
    inputs: Array,
    positions: Array,
    segment_ids: Array,
    *,
    plan: bool = True,
    activations: Sequence[str] = (),
    masks: Mapping[str, Masks] | None = None,
  ) -> Features:
    """Reads one chunk of every row, int32 [B, T] (see `types.Batch`), and advances the carry.

    Without `plan`, the planner is skipped, and its carry is reset as at a document start.
    `activations` are the kinds of intermediate values to return, see `features.ACTIVATIONS`.
    `masks` of sites, by path, have a leading dimension of their layers; other sites compute x W.
    """
    with (
      gin.config_scope(self._scope),
      hk.custom_creator(stored_as(jnp.dtype(self.parameter_dtype))),
      hk.custom_getter(layer_weights.getter),
      hk.custom_getter(self.adapters.getter) if self.adapters else contextlib.nullcontext(),
    ):
      return self._read(inputs, positions, segment_ids, plan, activations, masks or {})

  @hk.transparent
  def _read(self, inputs, positions, segment_ids, plan, activations, masks) -> Features:
    rows = -(-self.vocabulary_size // _LANES) * _LANES

    def table(name):
      init = hk.initializers.RandomNormal(self.d_model**-0.5)
      return parameter(name, (rows, self.d_model), init, axes=('vocabulary', 'embed'))

    embedding = table('embedding')
    unembedding = embedding if self.tied else table('unembedding')
    x = (self.scale * embedding[inputs]).astype(self.compute_dtype)
    fresh = self.initial_carry(inputs.shape[0])
    if self._ngrams is not None:
      where = {'positions': positions, 'segment_ids': segment_ids}
      added, tail = self._ngrams(inputs, _carried('ngrams', fresh), x.shape[-1], x.dtype, **where)
      hk.set_state('ngrams', tail)
      x += self.scale * added

    def layer(x, carry, masks):
      found, seen = {kind: [] for kind in activations if kind != SITES}, {}
      prefix = f'{self.module_name}/layers/'  # Haiku names the modules of a stack relative to it
      sites = self._sites and hk.custom_getter(self._sites.getter(prefix, masks, seen))
      with sites or contextlib.nullcontext():
        x, carry = self._apply_blocks(x, carry, positions, segment_ids, found)
      seen = seen if SITES in activations else {}
      return constrain(x, 'batch', 'time', 'activation'), (carry, found, seen)

    if self.remat_policy is not None:
      layer = hk.remat(layer, policy=_REMAT_POLICIES[self.remat_policy])

    def stack(x, name, repeats, memory):
      layers = hk.layer_stack(repeats, with_per_layer_inputs=True, unroll=self.unroll, name=name)
      x, (carry, values, seen) = layers(layer)(x, _carried(memory, fresh), masks)
      hk.set_state(memory, carry)
      return x, {kind: _by_layer(blocks) for kind, blocks in values.items()}, seen

    x, values, seen = stack(x, 'layers', self.repeats - self.upper_repeats, 'carry')
    drafts = None
    if self.planner is not None:
      carry = fresh['planner']
      if plan:
        planned, carry, drafts = self._planner(
          x, _carried('planner', fresh), positions=positions, segment_ids=segment_ids
        )
        x += planned
      hk.set_state('planner', carry)
      x, above, _ = stack(x, 'upper_layers', self.upper_repeats, 'upper_carry')
      values = {kind: jnp.concatenate([values[kind], above[kind]]) for kind in values}
    hidden = RMSNorm(name='final_norm')(x)
    return Features(hidden, unembedding, drafts, values or None, seen or None)

  def initial_carry(self, batch_size: int) -> dict[str, Any]:
    """The content of `hk.State` for rows that have read nothing, leaves [repeats, B, ...].

    'carry' is a tuple over the pattern. With a planner, which has its own 'planner', it belongs to
    the layers below, and 'upper_carry' to those above. 'ngrams' are the last tokens.
    """
    carries = self.inspect(
      lambda blocks: tuple(b.initial_carry(batch_size, self.compute_dtype) for b in blocks)
    )

    def repeated(times):
      return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (times, *leaf.shape)), carries)

    fresh = {'carry': repeated(self.repeats - self.upper_repeats)}
    if self._ngrams is not None:
      fresh['ngrams'] = self._ngrams.initial_carry(batch_size)
    if self._planner is not None:
      fresh['upper_carry'] = repeated(self.upper_repeats)
      fresh['planner'] = self._planner.initial_carry(batch_size, self.d_model, self.compute_dtype)
    return fresh

  def describe(self) -> Description:
    """The facts; raises a ConfigurationError if a mixer reads tokens that are to be predicted."""
    layer_flops = self.inspect(lambda blocks: sum(b.forward_flops(self.d_model) for b in blocks))
    mixers = self.inspect(lambda blocks: [mixer for block in blocks for mixer in block.mixers])
    for mixer in mixers:
      if not mixer.causal:
        raise ConfigurationError(
          f'A language model predicts each token from those before it, but its mixer '
          f'{type(mixer).__name__} also reads those after it. Use a causal mixer in Block.mixers, '
          'such as LongformerAttention, or S5 with S5.bidirectional = False.'
        )
    carried = [mixer for mixer in mixers if getattr(mixer, 'carried', True)]
    whole = [type(m).__name__ for m in mixers if not getattr(m, 'sequence_parallel', False)]
    planner, flops = self._planner, self.repeats * layer_flops
    if self._ngrams is not None:
      flops += self._ngrams.forward_flops(self.d_model)
    if planner is not None:
      flops += planner.forward_flops(self.d_model)
      whole.append(type(planner).__name__)

    def known(name, mixers=mixers):
      found = [getattr(mixer, name, None) for mixer in mixers]
      return [value for value in found if value is not None]

    return Description(
      vocabulary_size=self.vocabulary_size,
      width=self.d_model,
      layers=self.layers,
      compute_dtype=jnp.dtype(self.compute_dtype),
      forward_flops=flops + 2 * self.d_model * self.vocabulary_size,
      window=max(known('reach'), default=0),
      horizon=max(known('horizon'), default=None),
      max_context=min(known('max_context', carried), default=None),
      carried=len(carried) == len(mixers),
      has_dropout=any(mixer.dropout > 0 for mixer in mixers),
      plan_interval=None if planner is None else planner.plan_interval,
      planner_module=None if planner is None else planner.module_name,
      needs_whole_rows=tuple(dict.fromkeys(whole)),
      remat_policy=self.remat_policy,
    )

  @hk.transparent
  def blocks(self) -> list[Block]:
    """The blocks of the pattern, made anew."""
    with gin.config_scope(self._scope):
      return [make(name=f'block_{i}') for i, make in enumerate(self.pattern)]

  @hk.transparent
  def _apply_blocks(self, x, carry, positions, segment_ids, found):
    after = []
    for block, before in zip(self.blocks(), carry, strict=True):
      x, block_carry = block(x, before, positions=positions, segment_ids=segment_ids, found=found)
      after.append(block_carry)
    return x, tuple(after)

  def inspect(self, ask: Callable[[list[Block]], Any]) -> Any:
    """The answer of blocks to a question that needs no parameters, outside this transform."""
    with gin.config_scope(self._scope):
      return hk.transform(lambda: ask(self.blocks())).apply({}, None)


def _by_layer(blocks: Sequence[Array]) -> Array:
  """[repeats, ...] of each block of the pattern -> [layers, ...]."""
  stacked = jnp.stack(blocks, axis=1)
  return stacked.reshape(-1, *stacked.shape[2:])


def _carried(memory: str, fresh: Mapping[str, Carry]) -> Carry:
  """The carry `memory` in `hk.State`, which starts as in `fresh`."""
  return hk.get_state(memory, (), init=lambda *_: fresh[memory])


class Model(NamedTuple):
  """A language model as pure functions.

  init: (rng, batch_size) -> (params, carry of rows that have read nothing).
  initial_carry: batch_size -> only that carry.
  apply: (params, carry, inputs, positions, segment_ids, rng=None, plan=True, activations=(),
    masks=None) -> (Features, carry), see `LanguageModel`. With an rng, dropout acts. `plan` and
    `activations` are static.
  parameters: () -> {module: {name: Parameter}}.
  """

  init: Callable[[Array, int], tuple[Params, Carry]]
  initial_carry: Callable[[int], Carry]
  apply: Callable[..., tuple[Features, Carry]]
  parameters: Callable[[], Mapping[str, Mapping[str, Parameter]]]
  about: Description

  def extended(
    self,
    name: str,
    init: Callable[[Array], Params],
    parameters: Callable[[], Mapping[str, Mapping[str, Parameter]]],
    initial_carry: Callable[[int], Carry] | None = None,
  ) -> 'Model':
    """This model with further parameters, and with a carry under this name; see `created`.

    Raises a ConfigurationError if their modules have names that are taken: those of this model, and
    all that begin with 'model/'.
    """
    known = self.parameters()
    if taken := [module for module in parameters() if module in known or is_of_model(module)]:
      raise ConfigurationError(
        f'{name} adds modules to the model whose names are taken: {", ".join(taken)}. Give them '
        "other names, which do not begin with 'model/'."
      )

    def carries(batch_size):
      own = {} if initial_carry is None else {name: initial_carry(batch_size)}
      return {**self.initial_carry(batch_size), **own}

    def both(rng, batch_size):
      own = jax.random.fold_in(rng, zlib.crc32(name.encode()))
      return {**self.init(rng, batch_size)[0], **init(own)}, carries(batch_size)

    return self._replace(
      init=both, initial_carry=carries, parameters=lambda: {**self.parameters(), **parameters()}
    )

  def sharing(self, arrays: Params) -> 'Model':
    """This model, with arrays among its parameters that every device has whole; see `extended`."""

    def parameters():
      made = {
        module: {
          name: Parameter(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (None,) * leaf.ndim, None)
          for name, leaf in group.items()
        }
        for module, group in arrays.items()
      }
      return {**self.parameters(), **made}

    return self._replace(parameters=parameters) if arrays else self

  def own(self, params: Params) -> Params:
    """The parameters of this model, of those of a run, whose objective may add others."""
    return {module: params[module] for module in self.parameters()}

  def cast(self, params: Params) -> Params:
    """The parameters in the dtypes to which every use casts them; `apply` computes the same."""

    def cast(_, declared, leaf):
      return leaf if declared.cast is None else leaf.astype(declared.cast)

    return self._each(cast, params)

  def kinds(self, params: Params) -> Any:
    """A pytree like params of `declarations.Kind`, which an optimizer distinguishes."""
    planner = self.about.planner_module

    def kind(path, declared, _):
      shape, axes = declared[:2]
      stacked = int('layers/' in path) if axes is None else axes.count('layers')
      in_planner = planner is not None and path.startswith(f'{planner}/')
      is_table = axes is not None and not {'vocabulary', 'ngrams'}.isdisjoint(axes)
      return Kind(len(shape.shape) - stacked > 1 and not is_table, stacked, in_planner)

    return self._each(kind, params)

  def counts(self) -> Mapping[str, Mapping[str, int]]:
    """How many numbers each parameter has, {module: {name: count}}, without rows of padding."""

    def count(_, declared, __):
      shape = declared.shape.shape
      sizes = zip(shape, declared.axes or (None,) * len(shape), strict=True)
      most = self.about.vocabulary_size
      return math.prod(min(size, most) if axis == 'vocabulary' else size for size, axis in sizes)

    return self._each(count, self.parameters())

  def parameter_axes(self, resolve: Callable[[str, Axes | None, tuple[int, ...]], Axes]) -> Any:
    """The logical axes of each parameter, after `resolve(path, declared axes, shape)`."""

    def axes(path, declared, _):
      return resolve(f'params/{path}', declared.axes, declared.shape.shape)

    return self._each(axes, self.parameters())

  def _each(self, of: Callable[[str, Parameter, Any], Any], params: Any) -> Any:
    """A pytree like params of `of(path, declaration, leaf)`."""
    known = self.parameters()
    return {
      module: {name: of(f'{module}/{name}', known[module][name], leaf[name]) for name in leaf}
      for module, leaf in params.items()
    }

  def carry_axes(self, carry: Carry) -> Any:
    """The logical axes of each leaf of a carry: layers where it is stacked, rows, and no others."""

    def of(leaf, one, two):
      stacked = [a == b for a, b in zip(one.shape, two.shape, strict=True)].index(False)
      return ('layers',) * stacked + ('batch',) + (None,) * (leaf.ndim - stacked - 1)

    # A carry of one row and one of two rows differ in size along the rows.
    of_rows = [jax.eval_shape(functools.partial(self.initial_carry, rows)) for rows in (1, 2)]
    return jax.tree.map(of, carry, *of_rows)


def created(
  make: Callable[[], Any],
) -> tuple[Callable[[Array], Params], Callable[[], Mapping[str, Mapping[str, Parameter]]]]:
  """The functions `init` and `parameters` of the parameters that `make` creates, for `extended`.

  `make` calls Haiku modules, or `layers.parameter` inside them.
  """
  declarations = Declarations()

  def declared():
    with hk.custom_creator(declarations.creator):
      make()

  init = jax.jit(hk.transform(declared).init)

  @functools.cache
  def parameters():
    with ambient.within(partitioner=None, time=(), weights=()):
      return declarations.parameters(jax.eval_shape(init, jax.random.key(0)))

  return init, parameters


def transform(make: Callable[..., LanguageModel]) -> Model:
  """The module that `make` builds as pure functions; reads gin here, and when traced.

  A mixer that is not causal raises a ConfigurationError.
  """

  declarations = Declarations()

  def forward(inputs, positions, segment_ids, plan=True, activations=(), masks=None):
    with hk.custom_creator(declarations.creator):
      model = make(name='model')
      return model(inputs, positions, segment_ids, plan=plan, activations=activations, masks=masks)

  pure = hk.transform_with_state(forward)

  @jax.jit
  def params_of(rng):
    one = jnp.ones((1, 1), jnp.int32)
    return pure.init(rng, one, one, one)[0]

  def init(rng, batch_size):
    parameters()  # whose trace of `params_of` serves here, too
    return params_of(rng), initial_carry(batch_size)

  def initial_carry(batch_size):
    def fresh():
      return make(name='model').initial_carry(batch_size)

    return {'model': hk.without_apply_rng(hk.transform(fresh)).apply({})}

  def apply(params, carry, inputs, positions, segment_ids, rng=None, *options, **named):
    return pure.apply(params, carry, rng, inputs, positions, segment_ids, *options, **named)

  @functools.cache
  def parameters():
    with ambient.within(partitioner=None, time=(), weights=()):
      made = declarations.parameters(jax.eval_shape(params_of, jax.random.key(0)))
    lora = hk.transform(lambda: make(name='model').adapters).apply({}, None)
    if lora is not None:
      lora.check([f'{m}/{n}' for m, group in made.items() for n, p in group.items() if p.cast])
    return made

  about = hk.transform(lambda: make(name='model').describe()).apply({}, None)
  return Model(init, initial_carry, apply, parameters, about)
