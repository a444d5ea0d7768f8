"""A table of runs that are certified for NVIDIA GPUs, on a machine that needs none.

It stands in docs/results/one_chip.md. A row with a certificate in runs/certificates is not compiled
again.

    bash scripts/experiment certify_gpus                all rows, 2 to 10 minutes each
    bash scripts/experiment certify_gpus --only h200    the rows whose command contains h200
"""
# Environment: cuda

from collections.abc import Sequence
import sys

import certify

from valkyrie.distributed import console

PAGE = certify.ROOT / 'docs' / 'results' / 'one_chip.md'
# The flags of XLA that a run on GPUs has.
ENVIRONMENT = ('bash', '-c', 'source scripts/gpu_environment && exec "$@"', 'certify_gpus')
TB = 1e12
HEAD = (
  '| flags of `--run_mode=precompile` | rows x tokens | GiB a GPU | executed / useful '
  '| TB through memory | GB sent a GPU, between nodes | seconds | tokens/s a GPU '
  '| share of peak |\n'
  '| --- | --- | --- | --- | --- | --- | --- | --- | --- |'
)
_KERNELS = "--gin.LongformerAttention.kernels='prefer'"
_QWEN = '--gin_file=scripts/experiments/qwen3_5_2b.gin'
_ONE = '--gin_file=gin/partition/single.gin'
_SPLIT = '--gin_file=gin/partition/context_fsdp.gin'
_QUARTER = '--gin.FullAttention.max_context=262144'
# Longer slices of the gated delta rule, which go one after the other, are fewer kernels.
_KERNELS_OF_QWEN = ("--gin.FullAttention.kernels='prefer'", '--gin.GatedDeltaNet.slice_size=128')
_NARROW = "--gin.LanguageModel.parameter_dtype='bfloat16'"


def describe(row: certify.Row, found: certify.Certificate) -> Sequence[str]:
  """The cells of a row, in the order of HEAD."""
  tokens = found['chunks'] * found['chunk_size']
  memory = f'{found["total_bytes"] / certify.GIB:.1f} of {found["hbm_bytes"] / certify.GIB:.1f}'
  if not found['fits']:
    memory += ' (no)'
  sent = sum(found['collective_bytes'].values()) / certify.GB
  between_nodes = found['dcn_bytes'] / certify.GB
  seconds = (found['estimated_instruction_seconds'], found['estimated_cycles_seconds'])
  return (
    certify.shown_flags(row.flags),
    f'{found["rows"]} x {tokens:,}',
    memory,
    f'{found["executed_flops"] / found["useful_flops"]:.2f}',
    f'{found["hbm_traffic_bytes"] / TB:,.2f}',
    f'{sent:,.1f}, {between_nodes:,.1f}',
    certify.shown_range(seconds, ',.2f'),
    certify.shown_range(found['estimated_tokens_per_second_per_chip'], ',.0f'),
    certify.shown_range(found['estimated_share_of_peak'], '.0%'),
  )


def qwen(topology: str, layout: str, *flags: str, **macros: int) -> certify.Row:
  """A row of Qwen3.5-2B's shape, in a layout."""
  further = [f'--gin.{name}={value}' for name, value in macros.items()]
  return certify.Row((_QWEN, layout, f'--topology={topology}', *flags, *further))


TABLE = certify.Table(
  'certified for GPUs',
  HEAD,
  describe,
  (
    certify.run('h100', 'h100:1'),
    certify.run('h200', 'h200:1'),
    certify.run('h200', 'h200:8', '--gin_file=gin/partition/zero1.gin', batch_size=8),
    certify.run('h200', '4xh200:8', '--gin_file=gin/partition/zero1.gin', batch_size=32),
    certify.run(
      'h200',
      '4xh200:8',
      '--gin_file=gin/partition/context.gin',
      '--gin.LanguageModel.unroll=1',  # else it compiles for half an hour
      batch_size=1,
      chunk_size=262144,
      chunks=40,
      backprop_chunks=40,
    ),
    certify.run('v5p_64_8b', '8xh100:8', _KERNELS),
    qwen('h100:8', _SPLIT, _QUARTER, *_KERNELS_OF_QWEN, chunks=4, backprop_chunks=4),
    qwen('h100:8', _SPLIT, *_KERNELS_OF_QWEN),
    qwen(
      'h100:1',
      _ONE,
      _QUARTER,
      *_KERNELS_OF_QWEN,
      _NARROW,
      chunk_size=8192,
      chunks=32,
      backprop_chunks=32,
    ),
  ),
)


@console.program
def main(arguments: Sequence[str] | None = None) -> int:
  """Prints the table, and writes it into PAGE if it has all rows."""
  return certify.write([TABLE], PAGE, 'certify_gpus', arguments, ENVIRONMENT)


if __name__ == '__main__':
  sys.exit(main())
