"""Command line that prints the gin file of a hybrid model with a number of parameters.

  python -m valkyrie.training.sizes 50e6 --vocabulary_size=8192 > mine.gin

The hybrid has the pattern and query-key norm of gin/models/hybrid.gin. For N parameters and V
tokens it has:

  width D     64, 128, 192, or 4 to 7 times a power of 2, as in published models: the one for which
              V D + 7.4 D^2.5, that is sqrt(D) / 2 layers of 14.8 D^2, is nearest to N. So D over
              layers grows from 30 to 150, about as in GPT-3 and Griffin (De et al. 2024). The loss
              hardly depends on it (Kaplan et al. 2020, figure 5).
  layers      as many triples as N has room for.
  heads       D / 128 of width 128, which fills a matrix unit of a TPU; of 64 for D below 512.
  recurrence  of width F = 4/3 D, rounded up: its block is as large as one of attention (Griffin).
              It has D / 2 states, in HiPPO blocks of 32.
  MLP         of the width that is left, about 3 D (Griffin). It and F are multiples of the width of
              a head, and of D / 8 if D is a power of 2.
  window      the largest power of 2 up to D, at most 1,024 (Griffin): the scores of a token cost
              less than the projections of its heads.

From 100 million parameters on, the file is for accelerators and long rows: it computes in bfloat16,
recomputes activations, and S5's time constants reach 655,360 tokens.
"""

import argparse
from collections.abc import Sequence
import math
import sys

from valkyrie.distributed import console
from valkyrie.errors import ConfigurationError

_RATE_TIMES_WIDTH = 0.8  # docs/learning.md, "The learning rate over widths"
_WIDTHS = 64, 128, 192, *(n * 2**power for power in range(6, 14) for n in (4, 5, 6, 7))
_REGISTERS = 16


def gin_file(parameters: float, vocabulary_size: int) -> str:
  """The text of the gin file. Raises a ConfigurationError if it is mostly vocabulary."""

  def distance(d: int) -> float:
    """How far a usual model of this width is from the parameters."""
    usual = vocabulary_size * d + 7.4 * d**2.5
    return abs(math.log(usual / parameters))

  width = min(_WIDTHS, key=distance)
  power = 2 ** int(math.log2(width))
  head_width = 64
  if width >= 512:
    head_width = 128
  unit = max(head_width, power // 8)
  usual_inner = 4 * width / 3
  inner = math.ceil(usual_inner / unit) * unit
  states = width // 2
  window = min(1024, power)
  vocabulary = vocabulary_size * width + width
  # The parameters of a layer with a recurrence and of one with attention, without their MLP.
  recurrence_projections = 3 * width * inner + 5 * inner
  recurrence_states = 4 * inner * states + 3 * states
  recurrent = recurrence_projections + recurrence_states + 2 * width
  attention_projections = 4 * width**2 + 2 * head_width
  registers = 2 * _REGISTERS * width
  attending = attention_projections + registers + 2 * width
  # Layers come in triples of two recurrences and one attention, each with an MLP.
  mixers = 2 * recurrent + attending
  usual_mlps = 27 * width**2
  room = parameters - vocabulary
  triples = max(2, round(room / (mixers + usual_mlps)))
  mlp_room = room / triples - mixers
  mlp_units = max(1, round(mlp_room / (9 * width * unit)))
  mlp = mlp_units * unit
  if vocabulary > parameters / 2:
    raise ConfigurationError(
      f'{vocabulary:,} of {parameters:,.0f} parameters would be the vocabulary of '
      f'{vocabulary_size:,} tokens, but half is the most. Use fewer tokens or more parameters.'
    )
  asked = f'{parameters / 1e6:.10g}e6'
  large = parameters >= 1e8
  mlps = 9 * width * mlp
  total = vocabulary + triples * (mixers + mlps)
  rate = _RATE_TIMES_WIDTH / width
  rate_text = f'{rate:.1e}'.replace('e-0', 'e-')
  heads = width // head_width
  layers = 3 * triples
  unroll = triples
  dtype = 'float32'
  remat_policy = None
  horizon = 2000
  discretization = 'zoh'
  output_init = 'trunc_standard_normal'
  if large:
    unroll = 1
    dtype = 'bfloat16'
    remat_policy = 'nothing'
    horizon = 655360
    discretization = 'normalized'
    output_init = 'lecun_normal'
  return f"""\
# {total:,} parameters: {layers} layers of width {width}. This command prints the file:
#
#   python -m valkyrie.training.sizes {asked} --vocabulary_size={vocabulary_size}
#
# Short runs learn best at a rate of {_RATE_TIMES_WIDTH} / width (docs/learning.md):
# --gin.learning_rate={rate_text}

include 'gin/models/hybrid.gin'

LanguageModel.vocabulary_size = {vocabulary_size}
LanguageModel.d_model = {width}
LanguageModel.layers = {layers}
LanguageModel.unroll = {unroll}
LanguageModel.compute_dtype = {dtype!r}
LanguageModel.remat_policy = {remat_policy!r}
Block.mlp_width = {mlp}
LongformerAttention.heads = {heads}
LongformerAttention.kv_heads = {heads}
LongformerAttention.head_width = {head_width}
LongformerAttention.window = {window}
LongformerAttention.registers = {_REGISTERS}
LongformerAttention.document_start = 0
LongformerAttention.slice_size = {window // 2}
GatedRecurrence.width = {inner}
S5.state_size = {states}
S5.hippo_blocks = {states // 32}
S5.horizon = {horizon}
S5.discretization = {discretization!r}
S5.output_init = {output_init!r}
"""


@console.lasting_streams()
@console.program
def main(arguments: Sequence[str] | None = None) -> None:
  """Prints the file."""
  parser = argparse.ArgumentParser(
    'valkyrie-sizes',
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument('parameters', type=float, help='such as 50e6')
  parser.add_argument(
    '--vocabulary_size',
    type=int,
    default=50257,
    help="default: %(default)s, GPT-2's",
  )
  flags = parser.parse_args(arguments)
  is_of_size = 2e6 <= flags.parameters <= 1e12
  if not is_of_size or flags.vocabulary_size < 2:
    parser.error('expected from 2e6 to 1e12 parameters, and at least 2 tokens')
  console.print_result(gin_file(flags.parameters, flags.vocabulary_size))


if __name__ == '__main__':
  sys.exit(main())
