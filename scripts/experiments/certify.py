"""Tables of certified runs: each row shows the certificate of one precompile command.

They stand in docs/results/performance.md: the whole runs of gin/, models that others have measured,
and a model of 8 B parameters on other slices.

    bash scripts/experiment certify                 all rows, 2 to 5 minutes each
    bash scripts/experiment certify --only v4_8     the rows whose command contains v4_8

A row with a certificate in runs/certificates is not compiled again.
"""
# Environment: tpu

import argparse
from collections.abc import Callable, Mapping, Sequence
import json
import pathlib
import re
import subprocess
import sys
from typing import Any, NamedTuple

import page_blocks

from valkyrie.distributed import console

ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / 'docs' / 'results' / 'performance.md'
FOLDER = pathlib.Path('runs', 'certificates')
GIB = 2**30
GB = 1e9
Certificate = Mapping[str, Any]


class Row(NamedTuple):
  """A run: its flags, and what others have measured of the same model, if so."""

  flags: tuple[str, ...]
  measured: str = ''


class Table(NamedTuple):
  """A table of PAGE, where it stands between two comments with its name."""

  name: str
  head: str
  line: Callable[[Row, Certificate], Sequence[str]]
  rows: Sequence[Row]


def run(gin_file: str, topology: str, *flags: str, measured: str = '', **macros: int) -> Row:
  """The row of a gin file on a slice, with other flags and values of macros."""
  further = (f'--gin.{name}={value}' for name, value in macros.items())
  return Row(
    (f'--gin_file=gin/{gin_file}.gin', f'--topology={topology}', *flags, *further), measured
  )


def _of_run(row: Row, c: Certificate) -> Sequence[str]:
  tokens = c['chunks'] * c['chunk_size']
  sent = sum(c['collective_bytes'].values())
  return (
    shown_flags(row.flags),
    f'{c["rows"]} x {tokens:,}',
    f'{c["total_bytes"] / GIB:.1f} of {c["hbm_bytes"] / GIB:.2f}' + ('' if c['fits'] else ' (no)'),
    f'{sent / GB:,.1f}',
    f'{c["executed_flops"] / c["useful_flops"]:.2f}',
    shown_range((c['estimated_instruction_seconds'], c['estimated_cycles_seconds']), '.2f'),
    f'{c["estimated_communication_seconds"]:.2f}',
    shown_range(c['estimated_tokens_per_second_per_chip'], ',.0f'),
    shown_range(c['estimated_share_of_peak'], '.0%'),
  )


def _beside(row: Row, c: Certificate) -> Sequence[str]:
  return (
    shown_flags(row.flags),
    row.measured,
    shown_range(c['estimated_tokens_per_second_per_chip'], ',.0f'),
    f'{c["total_bytes"] / GIB:.1f}, {c["argument_bytes"] / GIB:.1f}',
  )


def _of_slices(row: Row, c: Certificate) -> Sequence[str]:
  return (
    shown_flags(row.flags),
    f'{c["rows"]} x {c["chunks"] * c["chunk_size"]:,}',
    f'{c["total_bytes"] / GIB:.1f} of {c["hbm_bytes"] / GIB:.2f}' + ('' if c['fits'] else ' (no)'),
    f'{sum(c["collective_bytes"].values()) / GB:,.1f}, {c["dcn_bytes"] / GB:.3f}',
    shown_range((c['estimated_instruction_seconds'], c['estimated_cycles_seconds']), '.2f'),
    f'{c["estimated_communication_seconds"]:.2f}, {c["dcn_bytes"] / c["dcn_bytes_per_second"]:.3f}',
    shown_range(c['estimated_tokens_per_second_per_chip'], ',.0f'),
    shown_range(c['estimated_share_of_peak'], '.0%'),
  )


def shown_flags(flags: Sequence[str]) -> str:
  """Flags as they are typed, in a cell of a table."""
  typed = []
  for flag in flags:
    quotes = '"' if "'" in flag else ''
    typed.append(f'{quotes}{flag}{quotes}')
  return f'`{" ".join(typed)}`'


def shown_range(pair: Sequence[float], form: str) -> str:
  """By instruction, and by the cycles that the compiler expects."""
  return ' to '.join(f'{number:{form}}' for number in pair)


def _chunks(count: int) -> dict[str, int]:
  return {'chunks': count, 'backprop_chunks': count}


def _mesh(**axes: int) -> str:
  return f'--gin.Partitioner.mesh={tuple(axes.items())}'


_CARRIES = '--gin.StepSettings.keep_carries=True'
_LLAMA = '--gin_file=gin/models/llama3_8b_hybrid.gin'
_LLAMA_8K = (
  '--gin.Optimizer.algorithm=@optax.adamw',
  '--gin.FullAttention.max_context=8192',
)
_WINDOWS = "--gin.LongformerAttention.kernels='prefer'"
_WHOLE = "--gin.FullAttention.kernels='prefer'"
HEAD_OF_RUNS = (
  '| flags of `--run_mode=precompile` | rows x tokens | GiB a chip | GB sent a chip '
  '| executed / useful | seconds | messages, seconds | tokens/s a chip | share of peak |\n'
  '| --- | --- | --- | --- | --- | --- | --- | --- | --- |'
)
TABLES = (
  Table(
    'certified runs',
    HEAD_OF_RUNS,
    _of_run,
    (
      run('v4_32', 'v4:4x4x2'),
      run('v4_32', 'v4:4x4x2', '--gin.StepSettings.remat_chunks=True', _CARRIES, **_chunks(80)),
      run('v4_32_context', 'v4:4x4x2'),
      run('v4_32_context', 'v4:4x4x2', _CARRIES, chunk_size=131072, **_chunks(80)),
      run('v4_8', 'v4:2x2x1'),
      run('v5p_64_8b', 'v5p:4x4x4'),
      run('v4_32_fsdp', 'v4:4x4x2', **_chunks(80)),
      run('v4_32_tensor2d', 'v4:4x4x2'),
      run(
        'v4_32_tensor2d',
        'v4:4x4x2',
        '--gin_file=gin/models/deep_1b.gin',
        '--gin.LanguageModel.unroll=1',
      ),
    ),
  ),
  Table(
    'measured by others',
    '| flags of `--run_mode=precompile` | measured by others: tokens/s a chip | predicted here '
    '| GiB a chip, arguments |\n| --- | --- | --- | --- |',
    _beside,
    (
      run(
        'decoder_1b',
        'v6e:4x8',
        '--gin_file=gin/partition/fsdp.gin',
        measured='8,927 in int8, with 1.8 GB, 0.4 arguments (MaxText)',
      ),
      run(
        'int8',
        'v6e:4x8',
        measured='8,927 in int8, with 1.8 GB, 0.4 arguments (MaxText)',
      ),
      run(
        'llama3_8b_sgd',
        'v6e:16x16',
        *_LLAMA_8K,
        measured='7,207 in bfloat16 (MaxText)',
        batch_size=256,
        chunk_size=8192,
      ),
    ),
  ),
  Table(
    'by kernels',
    HEAD_OF_RUNS,
    _of_run,
    (
      run('v4_32', 'v4:4x4x2', _WINDOWS),
      run('v4_32_context', 'v4:4x4x2', _WINDOWS),
      run('v5p_64_8b', 'v5p:4x4x4', _WINDOWS),
      run('decoder_1b', 'v6e:4x8', '--gin_file=gin/partition/fsdp.gin', _WHOLE),
      run('llama3_8b_sgd', 'v6e:16x16', *_LLAMA_8K, _WHOLE, batch_size=256, chunk_size=8192),
    ),
  ),
  Table(
    'large models',
    HEAD_OF_RUNS,
    _of_run,
    (
      run('v5p_64_8b', 'v4:4x4x4', _mesh(z=1, x=4, y=16), batch_size=2),
      run('v5p_64_8b', 'v6e:16x16', _mesh(z=1, x=16, y=16), batch_size=4),
      run('v5p_64_8b', 'v5p:8x8x8', _mesh(z=8, x=8, y=8), batch_size=8),
      run('v5p_64_8b', 'v5p:8x8x8', _mesh(z=2, x=16, y=16), batch_size=2, chunk_size=10485760),
      run('v5p_64_8b', 'v5p:4x4x4', _LLAMA),
      run('v5p_64_8b', 'v4:4x4x4', _mesh(z=1, x=4, y=16), _LLAMA, batch_size=2),
      run('v5p_64_8b', 'v6e:16x16', _mesh(z=1, x=16, y=16), _LLAMA, batch_size=4),
      run('v5p_64_8b', 'v5p:8x8x8', _mesh(z=8, x=8, y=8), _LLAMA, batch_size=8),
      run('decompose_llama3_8b', 'v5p:4x4x4'),
    ),
  ),
  Table(
    'several slices',
    '| flags of `--run_mode=precompile` | rows x tokens | GiB a chip | GB sent a chip, by DCN '
    '| seconds | messages, by DCN, seconds | tokens/s a chip | share of peak |\n'
    '| --- | --- | --- | --- | --- | --- | --- | --- |',
    _of_slices,
    (
      run('decoder_1b', '2xv5p:4x4x4', '--gin.Partitioner.slices=2', batch_size=128),
      run('decoder_1b', '4xv5p:4x4x4', '--gin.Partitioner.slices=4', batch_size=256),
      run('decoder_1b', '2xv6e:16x16', '--gin.Partitioner.slices=2', batch_size=512),
      run('decoder_1b', '4xv6e:16x16', '--gin.Partitioner.slices=4', batch_size=1024),
    ),
  ),
)


def certificate(flags: Sequence[str], environment: Sequence[str] = ()) -> Certificate | None:
  """The certificate of a run, compiled if there is none yet; None if that failed.

  environment: the command that starts the compilation with settings of its own, if it needs some.
  """
  values = (flag.partition('=')[2].removeprefix('gin/') for flag in flags)
  name = '_'.join(re.sub(r'[^\w.-]+', '_', value) for value in values)
  path = FOLDER / name / 'precompile.json'
  if not path.exists():
    command = [*environment, sys.executable, '-m', 'valkyrie.main', *flags]
    code = subprocess.call([*command, '--run_mode=precompile', f'--model_dir={path.parent}'])
    if not path.exists():
      print(f'{" ".join(flags)} ended with {code} and wrote no certificate.', file=sys.stderr)
      return None
  (found,) = json.loads(path.read_text())
  return found


@console.program
def main(arguments: Sequence[str] | None = None) -> int:
  """Prints the tables of TPUs, and writes those with all rows into PAGE."""
  return write(TABLES, PAGE, 'certify', arguments)


def write(
  tables: Sequence[Table],
  page: pathlib.Path,
  command: str,
  arguments: Sequence[str] | None,
  environment: Sequence[str] = (),
) -> int:
  """Compiles the chosen rows, prints their tables, and writes those with all rows into a page.

  The page names the command, an experiment, beside each table.

  Returns the exit code: 1 if a row was not compiled.
  """
  parser = argparse.ArgumentParser(description='Tables of certified runs.')
  parser.add_argument('--only', default='', help='only rows whose command contains this text')
  only = parser.parse_args(arguments).only
  failed = False
  for table in tables:
    chosen = [row for row in table.rows if only in ' '.join(row.flags)]
    if not chosen:
      continue
    found = {}
    for row in chosen:
      compiled = certificate(row.flags, environment)
      if compiled is not None:
        found[row] = compiled
    failed |= len(found) < len(chosen)
    lines = [f'| {" | ".join(table.line(row, found[row]))} |' for row in found]
    compilers = ', '.join(sorted({c['compiler'] for c in found.values()}))
    text = '\n'.join([table.head, *lines, '', f'Compiled by {compilers}.'])
    print(text)
    if len(found) == len(table.rows):
      begin = f'<!-- {table.name}: scripts/experiment {command} -->'
      end = f'<!-- end of {table.name} -->'
      page.write_text(page_blocks.with_block(page.read_text(), begin, end, text))
  return int(failed)


if __name__ == '__main__':
  sys.exit(main())
