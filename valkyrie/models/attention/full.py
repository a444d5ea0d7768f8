"""Full attention, for comparison: a window as wide as the longest document allowed."""

from collections.abc import Callable

import gin

from valkyrie.models.attention.longformer import LongformerAttention
from valkyrie.models.attention.rotary import Rotary


@gin.configurable
class FullAttention(LongformerAttention):
  """Causal attention to the whole of a document of at most `max_context` tokens.

  It carries `max_context - 1` keys, and its cost grows with them. The data pipeline refuses a
  longer document, which the window would truncate. Devices would have to exchange the whole
  document, so it accepts no pieces of time.
  """

  sequence_parallel = False

  def __init__(
    self,
    heads: int,
    head_width: int,
    max_context: int,
    kv_heads: int | None = None,
    slice_size: int = 128,
    dropout: float = 0.0,
    rotary: Callable[[], Rotary] = Rotary,
    name: str | None = None,
  ):
    """As `LongformerAttention`; max_context: the tokens that a query sees, itself included."""
    super().__init__(
      heads,
      head_width,
      max_context - 1,
      kv_heads=kv_heads,
      # Named, so that gin does not fill in the bindings of LongformerAttention.
      registers=0,
      document_start=0,
      dilations=None,
      slice_size=slice_size,
      dropout=dropout,
      rotary=rotary,
      name=name,
    )
    self.max_context = max_context
