"""`mamba2`: Mamba-2 layers without MLPs (Dao & Gu 2024, arXiv 2405.21060)."""

from collections.abc import Mapping
import pathlib
from types import MappingProxyType
from typing import Any

from valkyrie.weights.classes import fla_mamba2, parts
from valkyrie.weights.classes.hybrid import Hybrid, shared_bindings
from valkyrie.weights.config_fields import Fields
from valkyrie.weights.facts import Facts
from valkyrie.weights.forms import SAME
from valkyrie.weights.name_table import Names, entry
from valkyrie.weights.plan import Kind, Plan

_SIZES = ('vocab_size', 'hidden_size', 'num_hidden_layers', 'num_heads', 'head_dim', 'state_size')
_PREFIX = 'backbone.layers.#.'


class Mamba2(Hybrid):
  """Mamba-2 of transformers."""

  kind = 'mamba2'
  a_model = 'a mamba2'
  architecture = 'Mamba2ForCausalLM'
  mixer = 'Mamba2'
  fields = Fields(
    used={
      **dict.fromkeys((*_SIZES, 'n_groups', 'conv_kernel'), int),
      **{'layer_norm_epsilon': float, 'time_step_limit': object},
      **dict.fromkeys(('use_conv_bias', 'tie_word_embeddings'), bool),
    },
    needed=_SIZES,
    required={
      'use_bias': (False, None), 'hidden_act': ('silu', 'swish'), 'rms_norm': (True,),
    },
    no_effect=(
      'chunk_size', 'time_step_min', 'time_step_max', 'time_step_floor', 'time_step_rank',
      'rescale_prenorm_residual', 'residual_in_fp32', 'expand', 'norm_before_gate',
    ),
    nullable=(),
  )  # fmt: skip
  defaults = MappingProxyType({
    'n_groups': 8, 'conv_kernel': 4, 'layer_norm_epsilon': 1e-5, 'use_conv_bias': True,
    'tie_word_embeddings': False,
  })  # fmt: skip

  def checked(self, file: pathlib.Path, found: Mapping[str, Any]) -> dict[str, Any]:
    if fla_mamba2.is_from_fla(found):
      found = fla_mamba2.translated(file, found)
    config = super().checked(file, found)
    parts.check_mamba_steps(file, config)
    return config

  def plan(self, config: Mapping[str, Any]) -> Plan:
    config = {**self.defaults, **config}
    shared = {
      **shared_bindings(config, float(config['layer_norm_epsilon'])),
      'Block.mlp': None,
    }
    layer = Kind(('Mamba2',), mamba_bindings(config))
    return Plan(shared, {'mamba': layer}, ['mamba'] * config['num_hidden_layers'])

  def names(self, config: Mapping[str, Any]) -> Names:
    config = {**self.defaults, **config}
    tables = [
      entry('embedding', SAME, 'backbone.embeddings.weight', 'backbone.embedding.weight'),
      entry('final_norm.scale', SAME, 'backbone.norm_f.weight'),
      entry('unembedding', SAME, 'lm_head.weight'),
    ]
    layer = [
      entry('layers.#.mixer_norm.scale', SAME, f'{_PREFIX}norm.weight'),
      *parts.mamba_names([f'{_PREFIX}mixer.'], mamba_bindings(config)),
    ]
    return Names(tables, {'mamba': layer}, ['mamba'] * config['num_hidden_layers'])

  def _fields_of(self, facts: Facts) -> dict[str, Any] | str:
    mamba = facts.first('Mamba2')
    inner = mamba['heads'] * mamba['head_width']
    width = facts.sizes['hidden_size']
    if inner % width:
      return (
        f'Mamba2.heads x head_width = {inner}, where the class has a multiple of '
        f'LanguageModel.d_model = {width}'
      )
    return {
      'num_heads': mamba['heads'],
      'head_dim': mamba['head_width'],
      'state_size': mamba['state_size'],
      'n_groups': mamba['groups'],
      'conv_kernel': mamba['taps'],
      'expand': inner // width,
      'use_conv_bias': mamba['convolution_bias'],
      'use_bias': False,
      'hidden_act': 'silu',
      'layer_norm_epsilon': facts.shared['RMSNorm.epsilon'],
      'residual_in_fp32': False,
    }


def mamba_bindings(config: Mapping[str, Any]) -> dict[str, Any]:
  return parts.mamba(
    heads=config['num_heads'],
    head_width=config['head_dim'],
    state_size=config['state_size'],
    groups=config['n_groups'],
    taps=config['conv_kernel'],
    convolution_bias=config['use_conv_bias'],
  )
