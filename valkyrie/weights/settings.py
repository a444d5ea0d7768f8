"""The settings of a model that the shapes of its tensors do not tell, by binding."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import NamedTuple

from valkyrie.models.attention.longformer import WindowAttention
from valkyrie.models.block import Block
from valkyrie.models.language_model import LanguageModel, asked
from valkyrie.weights.facts import canonical, norm_epsilon
from valkyrie.weights.plan import Kind, Plan, references

# What may differ from a source with `InitialWeights.partial`: which tokens there are, and which of
# them a token sees, in both kinds of attention.
OF_PARTIAL = (
  'LanguageModel.vocabulary_size',
  'Block.mixers',
  *(f'LongformerAttention.{name}' for name in ('window', 'document_start', 'dilations')),
)
_ATTENTION = ('FullAttention', 'LongformerAttention')
_OF_BOTH = ('heads', 'head_width', 'query_key_norm')  # what either may have of the other's
_OF_ATTENTION = ('heads', 'head_width', 'window', 'document_start', 'query_key_norm')
# The fields of another part that change what it computes with the same parameters.
_UNSEEN = {
  'GatedDeltaNet': ('heads', 'write_gate', 'norm_epsilon'),
  'Mamba2': ('groups',),
  'GatedMLP': ('activation',),
}
# What a source has whose plan does not bind it.
_DEFAULTS = {'Rotary.share': 1.0, 'Block.norm': 'before', 'GatedMLP.activation': 'silu'}

Values = Mapping[str, object]  # {binding: value}


class Settings(NamedTuple):
  """The settings of the model itself, and those of each layer's parts."""

  shared: Values
  layers: Sequence[Sequence[Values]]

  @property
  def all(self) -> list[tuple[str, object]]:
    """Each binding with each of its values once."""
    pairs = [*self.shared.items()]
    for parts in self.layers:
      for part in parts:
        pairs += part.items()
    return list(dict.fromkeys(pairs))


def settings_of(make: Callable[..., LanguageModel]) -> Settings:
  """The settings of a model."""

  def of_model(model: LanguageModel) -> Settings:
    shared = {
      'LanguageModel.vocabulary_size': model.vocabulary_size,
      'LanguageModel.tied': model.tied,
      'LanguageModel.embedding_scale': model.scale,
      'RMSNorm.epsilon': norm_epsilon(model),
    }
    of_pattern = model.inspect(lambda blocks: [_of_block(block) for block in blocks])
    return Settings(shared, of_pattern * model.repeats)

  return asked(make, of_model)


def _of_block(block: Block) -> list[Values]:
  parts: list[Values] = [{'Block.norm': block.norm}]
  for part in (*block.mixers, block.mlp):
    owner = type(part).__name__
    if isinstance(part, WindowAttention):
      parts.append(_of_attention(part))
    else:
      names = _UNSEEN.get(owner, ())
      parts.append({f'{owner}.{name}': getattr(part, name) for name in names})
  return parts


def _of_attention(mixer: WindowAttention) -> Values:
  owner = type(mixer).__name__
  settings: dict[str, object] = {f'{owner}.dilations': mixer.dilations}
  settings['Block.mixers'] = references([owner])
  for name in _OF_ATTENTION:
    settings[f'{owner}.{name}'] = getattr(mixer, name)
  for name, value in dataclasses.asdict(mixer.frequencies).items():
    settings[f'Rotary.{name}'] = value
  return settings


def differences(plan: Plan, settings: Settings) -> list[tuple[str, str]]:
  """(binding, a line for a message) of the settings that the plan of a source has otherwise.

  A layer that the source lacks differs in nothing.
  """
  pairs = _compared(settings.shared, plan.shared, '')
  for kind, parts in zip(plan.layers, settings.layers, strict=False):
    bindings = {**_DEFAULTS, **plan.shared, **_expected(plan.kinds[kind])}
    epsilon = bindings.get('RMSNorm.epsilon')  # of both: the shared settings tell another one
    expected = canonical(bindings, epsilon)
    for part in parts:
      values = canonical(part, epsilon)
      pairs += _compared(values, expected, plan.scope(kind))
  return list(dict.fromkeys(pairs))


def _expected(kind: Kind) -> dict[str, object]:
  """The settings of a kind of layers, whose attention may be of either kind in a model."""
  expected: dict[str, object] = dict(kind.bindings)
  for mixer in kind.mixers:
    if mixer in _ATTENTION:
      for name in _OF_BOTH:
        value = kind.bindings[f'{mixer}.{name}']
        expected |= {f'{owner}.{name}': value for owner in _ATTENTION}
      expected['Block.mixers'] = kind.references
      expected['LongformerAttention.dilations'] = None
  return expected


def _compared(settings: Values, expected: Values, scope: str) -> list[tuple[str, str]]:
  pairs = []
  for name, value in settings.items():
    if expected.get(name, value) != value:
      pairs.append((name, f'{scope}{name} = {expected[name]!r}  # the model has {value!r}'))
  return pairs
