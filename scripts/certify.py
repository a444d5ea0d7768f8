"""README's table of certified runs: each row shows the certificate of one precompile command.

PYTHONPATH=. python scripts/certify.py
"""

import argparse
from collections.abc import Mapping, Sequence
import json
import pathlib
import subprocess
import sys
from typing import Any

README = pathlib.Path(__file__).parents[1] / 'README.md'
FOLDER = pathlib.Path('runs', 'certificates')
BEGIN, END = '<!-- certified runs: scripts/certify -->', '<!-- end of certified runs -->'
GIB, GB = 2**30, 1e9


def run(gin_file: str, topology: str, chunks: int | None = None) -> list[str]:
  """The flags of a row; `chunks` overrides the number of chunks in the gin file."""
  flags = [f'--gin_file=gin/{gin_file}.gin', f'--topology={topology}']
  if chunks is not None:
    flags += [f'--gin.chunks={chunks}', f'--gin.backprop_chunks={chunks}']
  return flags


ROWS = (
  run('v4_32', 'v4:4x4x2', 1),
  run('v4_32', 'v4:4x4x2', 8),
  run('v4_32', 'v4:4x4x2', 80),
  run('v4_32', 'v4:4x4x2', 1280),
  run('v4_32_context', 'v4:4x4x2'),
  run('v4_32_context', 'v4:4x4x2', 80),
  run('v4_32_fsdp', 'v4:4x4x2', 80),
  run('v4_32_tensor2d', 'v4:4x4x2', 80),
  run('v4_8', 'v4:2x2x1'),
)
HEAD = (
  '| flags of `--run_mode=precompile` | rows x tokens | GiB a chip | GB sent a chip '
  '| executed / useful | seconds | of them communication | tokens/s a chip | share of peak |\n'
  '| --- | --- | --- | --- | --- | --- | --- | --- | --- |'
)


def certificate(flags: Sequence[str]) -> Mapping[str, Any] | None:
  """The certificate of a row, compiled if there is none yet; None if that failed."""
  name = '_'.join(flag.partition('=')[2].removeprefix('gin/').replace(':', '_') for flag in flags)
  model_dir = FOLDER / name
  path = model_dir / 'precompile.json'
  if not path.exists():
    command = [sys.executable, '-m', 'valkyrie.main', *flags]
    code = subprocess.call([*command, '--run_mode=precompile', f'--model_dir={model_dir}'])
    if not path.exists():
      print(f'{" ".join(flags)} ended with {code} and wrote no certificate.', file=sys.stderr)
      return None
  (found,) = json.loads(path.read_text())
  return found


def row(flags: Sequence[str], c: Mapping[str, Any]) -> str:
  """A line of the table."""
  tokens = c['chunks'] * c['chunk_size']
  sent = sum(c['collective_bytes'].values())
  cells = (
    f'`{" ".join(flags)}`',
    f'{c["rows"]} x {tokens:,}',
    f'{c["total_bytes"] / GIB:.1f} of {c["hbm_bytes"] / GIB:.2f}' + ('' if c['fits'] else ' (no)'),
    f'{sent / GB:,.1f}',
    f'{c["executed_flops"] / c["useful_flops"]:.2f}',
    _range((c['estimated_instruction_seconds'], c['estimated_cycles_seconds']), '.2f'),
    f'{c["estimated_communication_seconds"]:.2f}',
    _range(c['estimated_tokens_per_second_per_chip'], ',.0f'),
    _range(c['estimated_share_of_peak'], '.0%'),
  )
  return f'| {" | ".join(cells)} |'


def _range(pair: Sequence[float], form: str) -> str:
  """By instruction, and by the cycles that the compiler expects."""
  return ' to '.join(f'{number:{form}}' for number in pair)


def main(arguments: Sequence[str] | None = None) -> int:
  """Prints the table; writes it into README.md when it has all rows."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--only', default='', help='only rows whose command contains this text')
  flags = parser.parse_args(arguments)
  chosen = [row_flags for row_flags in ROWS if flags.only in ' '.join(row_flags)]
  found = [(row_flags, certificate(row_flags)) for row_flags in chosen]
  lines = [row(row_flags, c) for row_flags, c in found if c is not None]
  compilers = ', '.join(sorted({c['compiler'] for _, c in found if c is not None}))
  table = '\n'.join([HEAD, *lines, '', f'Compiled by {compilers}.'])
  print(table)
  if len(chosen) < len(ROWS) or any(c is None for _, c in found):
    return 0 if all(c is not None for _, c in found) else 1
  before, _, rest = README.read_text().partition(BEGIN)
  _, _, after = rest.partition(END)
  README.write_text(f'{before}{BEGIN}\n{table}\n{END}{after}')
  return 0


if __name__ == '__main__':
  sys.exit(main())
