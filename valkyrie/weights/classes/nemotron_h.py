"""`nemotron_h` without experts: each layer is one of Mamba-2, attention and an MLP.

transformers up to 5.24 clamps the steps of Mamba-2 from below by `time_step_min` in whole
sequences, and not while it decodes. The published code does not, and neither does Valkyrie.
"""

from collections.abc import Mapping, Sequence
import pathlib
from types import MappingProxyType
from typing import Any

from valkyrie.errors import ConfigurationError
from valkyrie.weights.classes import parts, rope
from valkyrie.weights.classes.hybrid import Hybrid, shared_bindings, with_one_spelling
from valkyrie.weights.config_fields import FETCH, Fields
from valkyrie.weights.facts import Facts
from valkyrie.weights.forms import MATRIX, SAME, Form
from valkyrie.weights.name_table import Entry, Names, entry
from valkyrie.weights.plan import Kind, Plan, Reference

_NEEDED = (
  'vocab_size', 'hidden_size', 'intermediate_size', 'num_attention_heads', 'mamba_num_heads',
  'mamba_head_dim', 'ssm_state_size', 'max_position_embeddings',
)  # fmt: skip
_KINDS = {'M': 'mamba', '*': 'attention', '-': 'mlp'}  # of hybrid_override_pattern
_TYPES = {'linear_attention': 'mamba', 'full_attention': 'attention'}  # of transformers since 5
# {another spelling: name}.
_SPELLINGS = {
  'mamba_n_groups': 'n_groups', 'mamba_d_conv': 'conv_kernel', 'mamba_conv_bias': 'use_conv_bias',
  'attention_head_dim': 'head_dim', 'rms_norm_eps': 'layer_norm_epsilon',
  'norm_eps': 'layer_norm_epsilon',
}  # fmt: skip
_PREFIXES = ('backbone.', 'model.')


class NemotronH(Hybrid):
  """Nemotron-H (NVIDIA 2025, arXiv 2504.03624)."""

  kind = 'nemotron_h'
  a_model = 'a nemotron_h'
  architecture = 'NemotronHForCausalLM'
  mixer = 'Mamba2'
  fields = Fields(
    used={
      **dict.fromkeys((*_NEEDED, 'num_hidden_layers', 'num_key_value_heads'), int),
      **dict.fromkeys(('head_dim', 'attention_head_dim', 'n_groups', 'mamba_n_groups'), int),
      **dict.fromkeys(('conv_kernel', 'mamba_d_conv'), int),
      **dict.fromkeys(('use_conv_bias', 'mamba_conv_bias'), bool),
      **dict.fromkeys(('layer_norm_epsilon', 'rms_norm_eps', 'norm_eps'), float),
      **{'time_step_limit': object},
      **{'layers_block_type': list, 'hybrid_override_pattern': str},
    },
    needed=_NEEDED,
    required={
      **dict.fromkeys(('mlp_bias', 'use_bias', 'mamba_proj_bias', 'attention_bias'), (False, None)),
      **{'mlp_hidden_act': ('relu2',), 'mamba_hidden_act': ('silu', 'swish')},
      **{'tie_word_embeddings': (False,), 'sliding_window': (None,)},
      'hidden_dropout': (0, None),
    },
    no_effect=(
      *(f'moe_{name}' for name in (
        'intermediate_size', 'shared_expert_intermediate_size', 'latent_size',
        'shared_expert_overlap',
      )),
      'n_routed_experts', 'n_shared_experts', 'num_experts_per_tok', 'n_group', 'topk_group',
      'norm_topk_prob', 'routed_scaling_factor', 'mtp_hybrid_override_pattern',
      'mtp_layers_block_type', 'num_nextn_predict_layers', 'num_logits_to_keep', 'rope_theta',
      'rope_parameters', 'rope_scaling', 'partial_rotary_factor', 'chunk_size', 'expand',
      'time_step_min', 'time_step_max', 'time_step_floor', 'time_step_rank', 'mamba_dt_min',
      'mamba_dt_max', 'mamba_dt_init_floor', 'mamba_ssm_cache_dtype', 'mamba_chunk_size',
      'mamba_expand', 'rescale_prenorm_residual', 'residual_in_fp32', 'use_mamba_kernels',
      'auto_map',  # the published folders have code of their own, of the same equations
    ),
    nullable=('num_hidden_layers', 'layers_block_type', 'hybrid_override_pattern'),
  )  # fmt: skip
  defaults = MappingProxyType({
    'n_groups': 8, 'conv_kernel': 4, 'use_conv_bias': True, 'layer_norm_epsilon': 1e-5,
    'num_key_value_heads': 8, 'head_dim': 128, 'tie_word_embeddings': False,
  })  # fmt: skip

  def checked(self, file: pathlib.Path, found: Mapping[str, Any]) -> dict[str, Any]:
    config = super().checked(file, found)
    parts.check_mamba_steps(file, config)
    epsilon = {'layer_norm_epsilon': self.defaults['layer_norm_epsilon']}
    config = with_one_spelling(file, {**epsilon, **config}, _SPELLINGS)
    layers = _layers(config)
    unknown = sorted({*map(repr, layers)} - {*map(repr, _KINDS.values())})
    if unknown or not layers:
      raise ConfigurationError(
        f'{file} has layers of {", ".join(unknown)[:80] or "no kind"}, but Valkyrie computes '
        f'{", ".join(_KINDS.values())} in a nemotron_h. Take a model without experts. It lists its '
        f'layers in layers_block_type or hybrid_override_pattern. {FETCH}'
      )
    return config

  def plan(self, config: Mapping[str, Any]) -> Plan:
    config = {**self.defaults, **config}
    layers = _layers(config)
    sizes = {**config, 'num_hidden_layers': len(layers)}
    attention = {
      'heads': config['num_attention_heads'],
      'kv_heads': config['num_key_value_heads'],
      'head_width': config['head_dim'],
    }
    without_mlp = {'Block.mlp': None}
    context = config['max_position_embeddings']
    kinds = {
      'mamba': Kind(('Mamba2',), {**without_mlp, **_mamba(config)}),
      'attention': parts.attention(attention, {'Rotary.share': 0.0}, context, None, **without_mlp),
      'mlp': Kind(
        (),
        {
          'Block.mlp': Reference('@SquaredReLUMLP'),
          'Block.mlp_width': config['intermediate_size'],
          'SquaredReLUMLP.width_factor': 1.0,
        },
      ),
    }
    shared = shared_bindings(sizes, float(config['layer_norm_epsilon']))
    return Plan(shared, parts.used(kinds, layers), layers)

  def names(self, config: Mapping[str, Any]) -> Names:
    config = {**self.defaults, **config}
    mixers = [f'{prefix}layers.#.mixer.' for prefix in _PREFIXES]
    kinds = {
      'mamba': [
        _entry('layers.#.mixer_norm.scale', SAME, 'layers.#.norm.weight'),
        *parts.mamba_names(mixers, _mamba(config)),
      ],
      'attention': [
        _entry('layers.#.mixer_norm.scale', SAME, 'layers.#.norm.weight'),
        *(
          _entry(f'layers.#.attention.{ours}', MATRIX, f'layers.#.mixer.{theirs}_proj.weight')
          for ours, theirs in {'query': 'q', 'key': 'k', 'value': 'v', 'out': 'o'}.items()
        ),
      ],
      'mlp': [
        _entry('layers.#.mlp_norm.scale', SAME, 'layers.#.norm.weight'),
        _entry('layers.#.mlp.hidden', MATRIX, 'layers.#.mixer.up_proj.weight'),
        _entry('layers.#.mlp.out', MATRIX, 'layers.#.mixer.down_proj.weight'),
      ],
    }
    tables = [
      _entry('embedding', SAME, 'embeddings.weight'),
      _entry('final_norm.scale', SAME, 'norm_f.weight'),
      entry('unembedding', SAME, 'lm_head.weight'),
    ]
    layers = _layers(config)
    used = parts.used(kinds, layers)
    return Names(tables, used, layers, skipped=(r'mtp\..*',))

  def _fields_of(self, facts: Facts) -> dict[str, Any] | str:
    mamba = facts.first('Mamba2')
    attention = facts.first('FullAttention')
    if any(layer['Block.mlp_width'] and layer['Block.mixers'] != '()' for layer in facts.layers):
      return 'a layer has a mixer and an MLP'
    mlp = facts.first('SquaredReLUMLP')
    types = []
    for layer in facts.layers:
      kind = 'attention' if 'FullAttention.heads' in layer else 'mamba'
      types.append('mlp' if layer['Block.mixers'] == '()' else kind)
    widths = [layer['Block.mlp_width'] for layer in facts.layers if layer['Block.mlp_width']]
    inner = widths[0] if widths else 1
    if mlp and mlp['width_factor'] != 1:
      return f'SquaredReLUMLP.width_factor = {mlp["width_factor"]}, where the class has 1.0'
    return {
      # The class ties no tables.
      'tie_word_embeddings': False,
      'layers_block_type': types,
      'hybrid_override_pattern': ''.join(_letter(one) for one in types),
      'intermediate_size': inner,
      'num_attention_heads': attention.get('heads', 1),
      'num_key_value_heads': attention.get('kv_heads', 1),
      'head_dim': attention.get('head_width', 2),
      'mamba_num_heads': mamba['heads'],
      'mamba_head_dim': mamba['head_width'],
      'ssm_state_size': mamba['state_size'],
      'n_groups': mamba['groups'],
      'conv_kernel': mamba['taps'],
      'use_conv_bias': mamba['convolution_bias'],
      'layer_norm_epsilon': facts.shared['RMSNorm.epsilon'],
      'max_position_embeddings': facts.max_context or rope.WITHOUT_A_LIMIT,
      'mlp_hidden_act': 'relu2',
      'mamba_hidden_act': 'silu',
      'time_step_limit': [0.0, float('inf')],
    }


def _entry(ours: str, form: Form, theirs: str) -> Entry:
  """An entry with both spellings of a name."""
  return entry(ours, form, *(prefix + theirs for prefix in _PREFIXES))


def _letter(kind: str) -> str:
  return next(letter for letter, one in _KINDS.items() if one == kind)


def _layers(config: Mapping[str, Any]) -> Sequence[str]:
  """The kind of each layer; the length of the list counts, whatever num_hidden_layers says."""
  types = config.get('layers_block_type')
  if types is not None:
    return [_TYPES.get(one, one) if isinstance(one, str) else one for one in types]
  return [_KINDS.get(one, one) for one in config.get('hybrid_override_pattern') or '']


def _mamba(config: Mapping[str, Any]) -> dict[str, Any]:
  return parts.mamba(
    heads=config['mamba_num_heads'],
    head_width=config['mamba_head_dim'],
    state_size=config['ssm_state_size'],
    groups=config['n_groups'],
    taps=config['conv_kernel'],
    convolution_bias=config['use_conv_bias'],
  )
