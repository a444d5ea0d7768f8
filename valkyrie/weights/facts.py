"""The facts of a model, by binding, to be compared with a class of Hugging Face."""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any, NamedTuple

from valkyrie.models.attention.full import FullAttention
from valkyrie.models.attention.longformer import WindowAttention
from valkyrie.models.attention.rotary import Rotary
from valkyrie.models.block import Block
from valkyrie.models.language_model import LanguageModel
from valkyrie.models.layers import RMSNorm
from valkyrie.weights.plan import Plan, Reference, references

# The fields that change no logit, and those that are compared in another form.
_FREE = (
  'name', 'dropout', 'slice_size', 'kernels', 'carried', 'max_context', 'rotary',
  'shortest', 'horizon', 'largest_rate',
)  # fmt: skip
_SCALED = ('Rotary.original_context', 'Rotary.low_turns', 'Rotary.high_turns')

Values = dict[str, Any]  # {binding: value}


class Facts(NamedTuple):
  """A model.

  Attributes:
    sizes: {field of config.json: value} of its sizes.
    tied: whether one table serves inputs and outputs.
    scale: the factor on its embeddings.
    shared: what all layers share.
    layers: what each layer is.
    defaults: {binding: value} of fields of the parts whose values a plan need not bind.
    max_context: the longest context of full attention; None without one.
    frequencies: the rotary positions of the first layer with attention, or `Rotary`'s defaults.
  """

  sizes: Mapping[str, Any]
  tied: bool
  scale: float
  shared: Values
  layers: Sequence[Values]
  defaults: Values
  max_context: int | None
  frequencies: Rotary

  def first(self, owner: str) -> dict[str, Any]:
    """{field: value} of a part in the first layer that has it; empty without one."""
    for layer in self.layers:
      fields = fields_of(layer, owner)
      if fields:
        return fields
    return {}

  def difference(self, plan: Plan) -> str:
    """The first binding whose value a plan has otherwise; '' without one."""
    expected = self._expected(plan.shared)
    difference = _first_difference(self.shared, expected, '')
    if difference:
      return difference
    for number, values in enumerate(self.layers):
      kind = plan.kinds[plan.layers[number]]
      expected = self._expected({**plan.shared, **kind.bindings})
      expected['Block.mixers'] = kind.references
      difference = _first_difference(values, expected, f' in layer {number}')
      if difference:
        return difference
    return ''

  def _expected(self, bindings: Mapping[str, Any]) -> Values:
    return canonical({**self.defaults, **bindings}, self.shared['RMSNorm.epsilon'])


def _first_difference(values: Values, expected: Values, place: str) -> str:
  """The first binding with another value than expected, at a place; '' without one."""
  for name, value in values.items():
    if value != expected.get(name):
      return f'{name} = {value!r}{place}, where the class has {expected.get(name)!r}'
  return ''


def fields_of(layer: Values, owner: str) -> dict[str, Any]:
  """{field: value} of a part of a layer."""
  prefix = f'{owner}.'
  return {name.removeprefix(prefix): layer[name] for name in layer if name.startswith(prefix)}


def norm_epsilon(model: LanguageModel) -> float:
  """The epsilon of the norms of a model, in whose scope it may be bound."""
  return model.inspect(lambda blocks: RMSNorm().epsilon)


def facts_of(model: LanguageModel) -> Facts:
  """The facts of a model, inside Haiku."""
  epsilon = norm_epsilon(model)
  blocks = model.inspect(lambda blocks: [_of_block(block) for block in blocks])
  defaults: Values = {'LanguageModel.ngrams': None, 'LanguageModel.insert': None}
  defaults |= {'LanguageModel.learned_carry': False}
  layers = []
  for values, block_defaults in blocks:
    layers.append(canonical(values, epsilon))
    defaults |= block_defaults
  shared = {
    'LanguageModel.ngrams': model.ngrams,
    'LanguageModel.insert': model.insert,
    'LanguageModel.learned_carry': model.learned_carry,
    'RMSNorm.epsilon': epsilon,
  }
  sizes = {
    'vocab_size': model.vocabulary_size,
    'hidden_size': model.d_model,
    'num_hidden_layers': model.layers,
    'torch_dtype': str(model.parameter_dtype) if model.adapters is None else 'float32',
  }
  mixers = model.inspect(lambda blocks: [mixer for block in blocks for mixer in block.mixers])
  contexts = [mixer.max_context for mixer in mixers if isinstance(mixer, FullAttention)]
  max_context = max(contexts, default=None)
  rotaries = [mixer.frequencies for mixer in mixers if isinstance(mixer, WindowAttention)]
  frequencies = next(iter(rotaries), Rotary())
  return Facts(
    sizes,
    model.tied,
    model.scale,
    shared,
    layers * model.repeats,
    defaults,
    max_context,
    frequencies,
  )


def _of_block(block: Block) -> tuple[Values, Values]:
  """(what a block is, the defaults of its parts)."""
  values: Values = {
    'Block.mixers': references([type(mixer).__name__ for mixer in block.mixers]),
    'Block.norm': block.norm,
    'Block.mlp': None,
    'Block.mlp_width': None,
  }
  defaults: Values = {'Block.norm': 'before', 'Block.mlp': Reference('@GatedMLP')}
  parts: list[Any] = [*block.mixers]
  for mixer in block.mixers:
    if isinstance(mixer, WindowAttention):
      parts.append(mixer.frequencies)
  if block.mlp is not None:
    parts.append(block.mlp)
    values['Block.mlp'] = Reference(f'@{type(block.mlp).__name__}')
    values['Block.mlp_width'] = block.mlp.width
  for part in parts:
    owner = type(part).__name__
    if not dataclasses.is_dataclass(part):
      continue  # a mixer from elsewhere, which no class has: `Block.mixers` tells it
    for field in dataclasses.fields(part):
      is_derived = isinstance(part, FullAttention) and field.name == 'window'
      if field.name in _FREE or is_derived or (part is block.mlp and field.name == 'width'):
        continue
      values[f'{owner}.{field.name}'] = getattr(part, field.name)
      if field.default is not dataclasses.MISSING:
        defaults[f'{owner}.{field.name}'] = field.default
  return values, defaults


def canonical(values: Mapping[str, Any], epsilon: Any) -> Values:
  """The bindings with one value for each meaning, and without those that do nothing."""
  result = dict(values)
  for owner in ('FullAttention', 'LongformerAttention'):
    _replace_none(result, f'{owner}.kv_heads', result.get(f'{owner}.heads'))
    dilations = result.get(f'{owner}.dilations')
    if dilations is not None and set(dilations) <= {1}:
      result[f'{owner}.dilations'] = None
  _replace_none(result, 'GatedDeltaNet.value_heads', result.get('GatedDeltaNet.heads'))
  _replace_none(result, 'GatedDeltaNet.norm_epsilon', epsilon)
  has_no_mlp = 'Block.mlp' in result and result['Block.mlp'] is None
  if has_no_mlp:
    result['Block.mlp_width'] = None
  idle: Sequence[str] = ()
  if result.get('Rotary.factor') == 1:
    idle = _SCALED
  if result.get('Rotary.share') == 0:
    idle = ('Rotary.base', 'Rotary.factor', *_SCALED)
  for name in idle:
    result.pop(name, None)
  return result


def _replace_none(values: Values, name: str, default: Any) -> None:
  """Gives a binding that is None the value that it stands in for."""
  if name in values and values[name] is None:
    values[name] = default
