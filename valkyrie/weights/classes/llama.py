"""`llama`: full attention."""

from valkyrie.models.attention.full import FullAttention
from valkyrie.models.attention.longformer import LongformerAttention
from valkyrie.weights.classes.decoder import NEEDED, USED, Decoder
from valkyrie.weights.config_fields import Fields


class Llama(Decoder):
  """Full attention (Touvron et al. 2023)."""

  kind = 'llama'
  a_model = 'a Llama'
  fields = Fields(USED, NEEDED)

  def _difference(self, attention: LongformerAttention) -> str:
    if not isinstance(attention, FullAttention):
      return 'its attention has a window'
    if attention.query_key_norm:
      return 'it has a norm of queries and keys'
    return ''
