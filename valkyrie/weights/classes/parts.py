"""Layers that several classes of hybrids have: their bindings and the names of their tensors."""

from collections.abc import Mapping, Sequence
import pathlib
from typing import Any

from valkyrie.errors import ConfigurationError
from valkyrie.weights.forms import FILTERS, MATRIX, SAME, Form
from valkyrie.weights.name_table import Entry, Piece, entry
from valkyrie.weights.plan import Kind

_GDN = 'layers.#.gated_delta_net.'

# The matrices of Gated DeltaNet, where each has a tensor of its own there.
DELTA_PROJECTIONS = {
  'query': 'q_proj', 'key': 'k_proj', 'value': 'v_proj', 'gate': 'g_proj', 'out': 'o_proj',
  'step': 'a_proj', 'beta': 'b_proj',
}  # fmt: skip


def used(kinds: Mapping[str, Any], layers: Sequence[str]) -> dict[str, Any]:
  """Those kinds of layers that a model has, in their order."""
  return {kind: what for kind, what in kinds.items() if kind in layers}


def check_window(file: pathlib.Path, name: str, config: Mapping[str, Any]) -> None:
  """Raises a ConfigurationError for a window in which a token sees only itself."""
  if config.get(name) == 1:
    raise ConfigurationError(
      f'{file} has {name}: 1, with which a token sees only itself, and Valkyrie does not compute '
      'that. Take a model with a larger window.'
    )


def attention(
  sizes: Mapping[str, Any],
  rotary: Mapping[str, Any],
  max_context: int,
  window: int | None = None,
  **more: Any,
) -> Kind:
  """Layers of attention, full or with a window of so many tokens, the token itself included.

  `sizes` are fields of the attention, `rotary` bindings of `Rotary`, and `more` bindings.
  """
  mixer = 'LongformerAttention' if window else 'FullAttention'
  fields = {'query_key_norm': False, 'output_gate': False, **sizes}
  if window:
    fields |= {'window': window - 1, 'registers': 0, 'document_start': 0}
  else:
    fields['max_context'] = max_context
  bindings = {f'{mixer}.{name}': value for name, value in fields.items()}
  return Kind((mixer,), {**more, **bindings, **rotary})


def gated_delta_net(
  heads: int,
  value_heads: int,
  key_width: int,
  value_width: int,
  **more: Any,
) -> dict[str, Any]:
  """The bindings of Gated DeltaNet; `more` are fields."""
  fields = {
    'heads': heads,
    'value_heads': value_heads if value_heads != heads else None,
    'key_width': key_width,
    'value_width': value_width,
    'write_gate': 'sigmoid',
    'norm_epsilon': None,
    'convolution_bias': False,
    **more,
  }
  return {f'GatedDeltaNet.{name}': value for name, value in fields.items()}


def delta_names(
  prefix: str,
  projections: Mapping[str, str],
  norm: str,
  filters: list[list[Piece]],
) -> list[Entry]:
  """The tensors of Gated DeltaNet, from {our name: the name there} of its projections."""
  names = []
  for ours, theirs in projections.items():
    name = entry(f'{_GDN}{ours}', MATRIX, f'{prefix}{theirs}.weight')
    names.append(name)
  return [
    *names,
    entry(f'{_GDN}log_rate', SAME, f'{prefix}A_log'),
    entry(f'{_GDN}step_bias', SAME, f'{prefix}dt_bias'),
    entry(f'{_GDN}norm.scale', SAME, f'{prefix}{norm}.weight'),
    Entry(f'{_GDN}causal_convolution.filters', FILTERS, filters),
  ]


def attention_names(prefix: str, out: str = 'o_proj') -> list[Entry]:
  """The projections of attention."""
  projections = {'query': 'q_proj', 'key': 'k_proj', 'value': 'v_proj', 'out': out}
  names = []
  for ours, theirs in projections.items():
    name = entry(f'layers.#.attention.{ours}', MATRIX, f'{prefix}{theirs}.weight')
    names.append(name)
  return names


def rows(name: str, begin: int, count: int) -> Piece:
  """A range of the rows of a tensor."""
  return Piece(name, ((begin, begin + count),))


def delta_fields(delta: Mapping[str, Any]) -> dict[str, Any]:
  """The fields of Gated DeltaNet that Qwen3.5 and OLMo Hybrid share, from its facts."""
  return {
    'linear_num_key_heads': delta['heads'],
    'linear_num_value_heads': delta['value_heads'],
    'linear_key_head_dim': delta['key_width'],
    'linear_value_head_dim': delta['value_width'],
    'linear_conv_kernel_dim': delta['taps'],
  }


def mamba(**fields: Any) -> dict[str, Any]:
  """The bindings of Mamba-2, from its fields."""
  return {f'Mamba2.{name}': value for name, value in fields.items()}


def mamba_names(prefixes: Sequence[str], bindings: Mapping[str, Any]) -> list[Entry]:
  """The tensors of Mamba-2 under one of several prefixes."""

  def spelled(ours: str, form: Form, theirs: str) -> Entry:
    return entry(f'layers.#.mamba2.{ours}', form, *(prefix + theirs for prefix in prefixes))

  heads = bindings['Mamba2.heads']
  inner = heads * bindings['Mamba2.head_width']
  states = 2 * bindings['Mamba2.groups'] * bindings['Mamba2.state_size']
  names = [
    spelled('causal_convolution.filters', FILTERS, 'conv1d.weight'),
    spelled('causal_convolution.bias', SAME, 'conv1d.bias'),
    spelled('log_rate', SAME, 'A_log'),
    spelled('step_bias', SAME, 'dt_bias'),
    spelled('skip', SAME, 'D'),
    spelled('rms_norm.scale', SAME, 'norm.weight'),
    spelled('out', MATRIX, 'out_proj.weight'),
  ]
  # The rows of one tensor, one kind after the other.
  widths = {'z': inner, 'xbc': inner + states, 'dt': heads}
  begin = 0
  for ours, width in widths.items():
    spellings = []
    for prefix in prefixes:
      piece = rows(f'{prefix}in_proj.weight', begin, width)
      spellings.append([piece])
    names.append(Entry(f'layers.#.mamba2.{ours}', MATRIX, spellings))
    begin += width
  return names


def check_mamba_steps(
  file: pathlib.Path,
  config: Mapping[str, Any],
  field: str = 'time_step_limit',
) -> None:
  """Raises a ConfigurationError if a field clamps the steps, which has no single meaning there.

  transformers clamps them in whole sequences, and not while it decodes one token after the other.
  """
  limit = config.get(field)
  if limit is None:
    return
  least_and_most = [_number(one) for one in limit] if isinstance(limit, list) else limit
  if least_and_most != [0.0, float('inf')]:
    raise ConfigurationError(
      f'{file} has {field}: {limit!r:.80}, but Valkyrie computes this class of models only with '
      '[0.0, Infinity]. Take a model with it.'
    )


def _number(value: Any) -> Any:
  """A number, also as newer files write an infinity."""
  if isinstance(value, dict) and value == {'__float__': 'Infinity'}:
    return float('inf')
  return value
