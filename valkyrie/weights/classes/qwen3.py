"""`qwen3`: a Llama with a norm of queries and keys."""

from collections.abc import Mapping
import pathlib
from types import MappingProxyType
from typing import Any

from valkyrie.errors import ConfigurationError
from valkyrie.models.attention.longformer import LongformerAttention
from valkyrie.weights.classes.decoder import NEEDED, USED, Decoder
from valkyrie.weights.config_fields import FETCH, Fields


class Qwen3(Decoder):
  """Full attention with a norm of the queries and keys of each head (Yang et al. 2025)."""

  kind = 'qwen3'
  a_model = 'a Llama'
  fields = Fields(USED, NEEDED)
  defaults = MappingProxyType({'num_key_value_heads': 32, 'head_dim': 128})
  has_head_norms = True

  def checked(self, file: pathlib.Path, found: Mapping[str, Any]) -> dict[str, Any]:
    config = super().checked(file, found)
    if 'head_dim' in found and found['head_dim'] is None:
      raise ConfigurationError(f'{file} has head_dim: null, which a Qwen3 cannot have. {FETCH}')
    return config

  def _without_full_layers(self, found: Mapping[str, Any]) -> dict[str, Any]:
    left = super()._without_full_layers(found)
    if not found.get('use_sliding_window'):
      left.pop('sliding_window', None)  # its class ignores the number
    return left

  def _difference(self, attention: LongformerAttention) -> str:
    if not attention.query_key_norm:
      return 'it has no norm of queries and keys'
    return ''
