"""`mistral`: a Llama with a window."""

from types import MappingProxyType

from valkyrie.models.attention.full import FullAttention
from valkyrie.models.attention.longformer import LongformerAttention
from valkyrie.weights.classes.decoder import NEEDED, USED, Decoder
from valkyrie.weights.config_fields import Fields


class Mistral(Decoder):
  """Attention with a window (Jiang et al. 2023)."""

  kind = 'mistral'
  a_model = 'a Llama'
  fields = Fields({**USED, 'sliding_window': int}, NEEDED)
  defaults = MappingProxyType({'num_key_value_heads': 8, 'sliding_window': 4096})

  def _difference(self, attention: LongformerAttention) -> str:
    if isinstance(attention, FullAttention):
      return 'its attention has no window'
    return ''
