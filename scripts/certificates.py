"""Writes README's table of certified runs from their precompile.json files.

    python scripts/certificates.py runs/v4_32 runs/v4_32_context ...

Each directory is the --model_dir of a `--run_mode=precompile`; `command` in its precompile.json is
what was typed, and stands beside the row.
"""

import json
import pathlib
import sys

README = pathlib.Path(__file__).resolve().parents[1] / 'README.md'
BEGIN, END = (
  '<!-- certificates: written by scripts/certificates.py -->',
  '<!-- end of certificates -->',
)
HEAD = (
  '| slice, rows x tokens | layout | memory a chip | sent a step | estimated: communication, '
  'tokens/s a chip, share of peak | command |\n| --- | --- | --- | --- | --- | --- |'
)


def row(c: dict) -> str:
  """One certificate as a line of the table."""
  tokens = c['chunks'] * c['chunk_size']
  sent = sum(c['collective_bytes'].values()) / 1e9
  share = c['estimated_communication_seconds'] / c['estimated_compute_seconds']
  cells = (
    f'{c["topology"]}, {c["rows"]} x {tokens:,}',
    c['layout'],
    f'{c["total_bytes"] / 2**30:.2f} of {c["hbm_bytes"] / 2**30:.2f} GiB',
    f'{sent:.3g} GB',
    f'{share:.1%} of compute, {c["estimated_tokens_per_second_per_chip"]:,.0f}, '
    f'{c["estimated_share_of_peak"]:.1%}',
    f'`{c["command"]}`',
  )
  return f'| {" | ".join(cells)} |'


def main(directories: list[str]) -> None:
  """Replaces what stands between the markers."""
  files = [pathlib.Path(directory) / 'precompile.json' for directory in directories]
  rows = [row(c) for file in files for c in json.loads(file.read_text())]
  before, rest = README.read_text().split(BEGIN)
  after = rest.split(END)[1]
  README.write_text('\n'.join([before + BEGIN, '', HEAD, *rows, '', END + after]))


if __name__ == '__main__':
  main(sys.argv[1:])
