"""The variants of gin/tiny_cpu.gin that `scripts/learn --screen` compares, each with one change."""

import math

from learn_trial import Variant

RUN = '--gin_file=gin/tiny_cpu.gin'
LAYERS = 6


def _gin(*flags: str) -> Variant:
  return Variant((RUN, *(f'--gin.{flag}' for flag in flags)))


def _width(width: int) -> Variant:
  """The model at another width, with heads of the same width and the MLP in proportion."""
  return _gin(
    f'LanguageModel.d_model={width}',
    f'Block.mlp_width={2 * width}',
    f'LongformerAttention.heads={width // 64}',
    f'GatedRecurrence.width={width}',
    f'S5.state_size={width // 2}',
  )


VARIANTS = {
  'shipped': _gin(),
  # The share of attention.
  'S5 alone': _gin('local/Block.mixers=(@GatedRecurrence,)'),
  'every second layer attention': _gin('LanguageModel.pattern=(@recurrent/Block, @local/Block)'),
  'attention alone': _gin('recurrent/Block.mixers=(@LongformerAttention,)'),
  'both mixers in each of 4 layers': _gin(
    'LanguageModel.pattern=(@recurrent/Block,)',
    'LanguageModel.layers=4',
    'recurrent/Block.mixers=(@LongformerAttention, @GatedRecurrence)',
  ),
  # The layer around S5.
  'published layer (gelu) without a gate': _gin(
    "S5.activation='gelu'", 'recurrent/Block.mixers=(@S5,)'
  ),
  'published layer (half_glu1) without a gate': _gin(
    "S5.activation='half_glu1'", 'recurrent/Block.mixers=(@S5,)'
  ),
  'silu after the convolution': _gin("GatedRecurrence.activation='silu'"),
  'gelu inside the gate': _gin("S5.activation='gelu'"),
  # The state.
  'selective': _gin('S5.selective=True'),
  'shortest time constant 2': _gin('S5.shortest=2.0'),
  'horizon 655360 and normalized': _gin('S5.horizon=655360.0', "S5.discretization='normalized'"),
  # The stream.
  'embeddings enter at D^-0.5': _gin('LanguageModel.embedding_scale=1.0'),
  'outputs begin at 1/sqrt(2L)': _gin()._replace(output_scale=1 / math.sqrt(2 * LAYERS)),
  'outputs begin at zero': _gin()._replace(output_scale=0.0),
  # The recipe.
  'decay 0.0001 and b2 0.999 (optax)': _gin(
    'optax.adamw.weight_decay=0.0001', 'optax.adamw.b2=0.999', 'optax.adam.b2=0.999'
  ),
  'decay on all parameters': _gin('Optimizer.vector_algorithm=@optax.adamw'),
  'Muon': Variant((RUN, '--gin_file=gin/optimizers/muon.gin')),
  '4 rows of 256 tokens': _gin('chunk_size=256', 'batch_size=4'),
  '1 row of 1024 tokens': _gin('chunk_size=1024', 'batch_size=1'),
  # The width, for the rule that transfers a learning rate.
  'width 64': _width(64),
  'width 384': _width(384),
}
