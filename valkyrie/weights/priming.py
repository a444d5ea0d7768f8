"""Priming: layers of the gated delta rule begin from the attention that they replace.

Attention without its softmax, Σ_j (q_i·k_j) v_j, is a recurrence with the state Σ_j k_j v_jᵀ, which
`GatedDeltaNet` decays and corrects (Chattopadhyay et al. 2026, Priming, arXiv 2605.08301; Wang et
al. 2024, The Mamba in the Llama, arXiv 2408.15237, section 3). So its projections begin as those of
the attention. Each head has its own state, so grouped keys and values are repeated for the heads
that share them. Norms between the layers have one name in both models, and are loaded as ever.

All else of such a layer keeps its initialization, and the run names it: the convolution, the gates,
the norm of the outputs, and the decays. `GatedDeltaNet.shortest` and `horizon` must be long, since
attention forgets nothing: a state that decays by exp(-1) in 10,000 tokens begins as a sum over all
of a document. Positions, the norms of queries and keys, and an output gate of the attention have no
place in the layer. Priming begins its gate with the mean of W_outᵀ and W_value, which is not done.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from valkyrie.errors import ConfigurationError
from valkyrie.models.attention.longformer import WindowAttention
from valkyrie.models.block import Block
from valkyrie.models.language_model import LanguageModel, asked
from valkyrie.models.recurrence.gated_delta import GatedDeltaNet
from valkyrie.weights import forms
from valkyrie.weights.tensor_files import Tensor

_DELTA = 'gated_delta_net'
_PROJECTIONS = ('query', 'key', 'value', 'out')
_WIDTHS = ('FullAttention.head_width', 'LongformerAttention.head_width')
_ADVICE = (
  'Give the layer the mixer of the source in LanguageModel.pattern, or leave InitialWeights.primed '
  'out.'
)


class Primed(NamedTuple):
  """The tensors of a source, with those of layers that replace its attention.

  Attributes:
    tensors: by our names; the attention that is replaced has become the tensors of delta layers.
    layers: the beginnings of the names of these layers' tensors, which may all be new.
    taken: the names of the tensors that come from the attention.
  """

  tensors: Mapping[str, Tensor]
  layers: Sequence[str] = ()
  taken: Sequence[str] = ()


def primed(
  place: str,
  tensors: Mapping[str, Tensor],
  bindings: Mapping[str, Any],
  make: Callable[..., LanguageModel],
) -> Primed:
  """The tensors of a source at `place`, for the delta layers of the model that `make` builds.

  `bindings` are those of the source, as far as it has any. Nothing is read yet.

  Raises a ConfigurationError if the heads differ, if a layer of the model needs attention that the
  source lacks, or if no layer replaces attention.
  """
  found = dict(tensors)
  layers: list[str] = []
  taken: list[str] = []
  for number, mixers in enumerate(_mixers(make)):
    layer = f'layers.{number}.'
    delta, attention = _asked_of(mixers)
    if attention is not None:
      _check_attention(place, layer, type(attention).__name__, tensors)
      continue
    if delta is None or f'{layer}{_DELTA}.query' in tensors:
      continue
    _check_attention(place, layer, 'GatedDeltaNet', tensors)
    _check_heads(place, layer, delta, tensors, bindings)
    projections = _projections(layer, delta, tensors)
    for name in _PROJECTIONS:
      del found[f'{layer}attention.{name}']
    found |= projections
    layers.append(f'{layer}{_DELTA}.')
    taken += projections
  if not layers:
    raise ConfigurationError(
      'InitialWeights.primed = True, but no layer of the model has GatedDeltaNet where '
      f'{place} has attention. Put @GatedDeltaNet into the blocks of LanguageModel.pattern that '
      'replace attention, or leave the binding out.'
    )
  return Primed(found, layers, taken)


def _mixers(make: Callable[..., LanguageModel]) -> list[Sequence[Any]]:
  """The mixers of each layer."""

  def of_pattern(blocks: Sequence[Block]) -> list[Sequence[Any]]:
    return [block.mixers for block in blocks]

  return asked(make, lambda model: model.inspect(of_pattern) * model.repeats)


def _asked_of(mixers: Sequence[Any]) -> tuple[GatedDeltaNet | None, WindowAttention | None]:
  """The delta layer and the attention among the mixers of a layer."""
  delta = None
  attention = None
  for mixer in mixers:
    if isinstance(mixer, GatedDeltaNet):
      delta = mixer
    if isinstance(mixer, WindowAttention):
      attention = mixer
  return delta, attention


def _check_attention(place: str, layer: str, mixer: str, tensors: Mapping[str, Tensor]) -> None:
  """Raises a ConfigurationError unless the source has attention in a layer."""
  if all(f'{layer}attention.{name}' in tensors for name in _PROJECTIONS):
    return
  parts = set()
  for name in tensors:
    if name.startswith(layer):
      part, _, _ = name.removeprefix(layer).partition('.')
      parts.add(part)
  listed = ', '.join(sorted(parts)) or 'no such layer'
  raise ConfigurationError(
    f'{layer.strip(".")} of the model has {mixer}, which needs the attention of {place} there, but '
    f'found {listed}. {_ADVICE}'
  )


def _check_heads(
  place: str,
  layer: str,
  delta: GatedDeltaNet,
  tensors: Mapping[str, Tensor],
  bindings: Mapping[str, Any],
) -> None:
  """Raises a ConfigurationError unless a delta layer has the heads of the attention.

  Shapes tell how many heads there are of one width; bindings tell the width, if the source has any.
  """
  width = delta.key_width
  known = set()
  for name, value in bindings.items():
    if name.endswith(_WIDTHS) and isinstance(value, int):
      known.add(value)
  columns = {}
  for name in ('query', 'key', 'value'):
    columns[name] = sum(tensors[f'{layer}attention.{name}'].shape[1:])
  queries = columns['query']
  keys = columns['key']
  fits = (
    width in (known or {width})
    and delta.value_width == width
    and delta.value_heads in (None, delta.heads)
    and queries == delta.heads * width
    and 0 < keys == columns['value']
    and keys % width == queries % keys == 0
  )
  if fits:
    return
  expected = f'heads x key_width = {queries} as the queries of the source, whose keys have {keys}'
  if len(known) == 1:
    (source_width,) = known
    expected = f'heads={queries // source_width}, key_width={source_width}'
  raise ConfigurationError(
    f'{layer.strip(".")} of the model has GatedDeltaNet with heads={delta.heads}, '
    f'value_heads={delta.value_heads}, key_width={width} and value_width={delta.value_width}, '
    f'which do not fit the heads of the attention in {place}. Expected {expected}, value_width '
    'equal to key_width, and value_heads=None: keys and values that heads share are repeated. '
    'Bind these, or leave InitialWeights.primed out.'
  )


def _projections(
  layer: str,
  delta: GatedDeltaNet,
  tensors: Mapping[str, Tensor],
) -> dict[str, Tensor]:
  """The projections of a delta layer."""
  projections = {name: tensors[f'{layer}attention.{name}'] for name in _PROJECTIONS}
  for name in ('key', 'value'):
    projections[name] = _for_each_head(projections[name], delta)
  return {f'{layer}{_DELTA}.{name}': tensor for name, tensor in projections.items()}


def _for_each_head(tensor: Tensor, delta: GatedDeltaNet) -> Tensor:
  """Keys or values [D, J K], repeated for the heads that share them: [D, H K]."""
  width = delta.key_width
  sharing = delta.heads * width // tensor.shape[-1]
  ranges = []
  for head in range(delta.heads):
    begin = head // sharing * width
    ranges.append((begin, begin + width))
  return forms.columns(tensor, ranges)
