"""Windows and dilations that differ within the repeated pattern of blocks, from a gin file."""

import jax
import numpy as np
import tiny

from valkyrie import main
from valkyrie.config.load import load_gin
from valkyrie.models import language_model
from valkyrie.models.language_model import LanguageModel

PATTERN = """
LanguageModel.vocabulary_size = 50
LanguageModel.d_model = 16
LanguageModel.layers = 4
LanguageModel.pattern = (@near/Block, @far/Block)
Block.mixers = (@LongformerAttention,)
Block.mlp_width = 8
LongformerAttention.heads = 4
LongformerAttention.kv_heads = 2
LongformerAttention.head_width = 8
LongformerAttention.document_start = 1
near/LongformerAttention.window = 3
far/LongformerAttention.window = 4
far/LongformerAttention.dilations = (1, 3)
far/LongformerAttention.dropout = 0.5
"""


def test_each_block_of_the_pattern_has_the_window_bound_in_its_scope(tmp_path):
  file = tmp_path / 'pattern.gin'
  file.write_text(PATTERN)
  load_gin([str(file)], [], modules=main.CONFIGURABLE_MODULES)
  model = language_model.transform(LanguageModel)
  params, carry = tiny.init(model, 2)
  (near,), (far,) = carry['model']['carry']
  assert near.window.keys.shape == (2, 2, 3, 2, 8)
  assert far.window.keys.shape == (2, 2, 12, 2, 8)
  assert model.about.window == 12 and model.about.has_dropout

  batch, apply = tiny.batch((9, 15)), jax.jit(model.apply)
  batch_of = batch.inputs, batch.positions, batch.segment_ids
  whole, _ = apply(params, carry, *batch_of)
  pieces = []
  for begin in range(0, 24, 8):
    piece = tiny.cut(batch, begin, begin + 8)
    features, carry = apply(params, carry, piece.inputs, piece.positions, piece.segment_ids)
    pieces.append(features.hidden)
  np.testing.assert_allclose(np.concatenate(pieces, axis=1), whole.hidden, rtol=1e-4, atol=2e-5)

  drawn = [
    apply(params, model.initial_carry(2), *batch_of, jax.random.key(seed))[0].hidden
    for seed in (0, 1)
  ]
  assert np.all(np.any(drawn[0] != whole.hidden, axis=-1))
  assert np.all(np.any(drawn[0] != drawn[1], axis=-1))
