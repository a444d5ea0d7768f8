"""The command that prints which components wrote what a component reads later in a text.

    python -m valkyrie.lab.decomposition.trace RUN TEXT.txt layers.1.mlp.out 3 --distance 2000

Each line has a component, the number of a token and its text in brackets between its neighbors, the
distance to the token that reads, and the effect, see `writers`.
"""

import argparse
from collections.abc import Iterator, Sequence
import sys

import numpy as np

from valkyrie import foreign
from valkyrie.distributed import console
from valkyrie.lab.decomposition.decomposed import Decomposed, decomposition
from valkyrie.lab.decomposition.own_text import content
from valkyrie.lab.decomposition.shown import pieces

_AROUND = 12  # tokens that are shown on each side


@console.program
def main(arguments: Sequence[str] | None = None) -> None:
  """Prints the effects."""
  about = 'Prints which components wrote, earlier in a text, what a component reads.'
  parser = argparse.ArgumentParser(description=about, allow_abbrev=False)
  parser.add_argument('run', help='its directory or address')
  parser.add_argument('text', help='a file of text')
  parser.add_argument('site', help='such as layers.1.mlp.out')
  parser.add_argument('component', type=int, help='the number of the component that reads')
  parser.add_argument('--token', type=int, help='the token at which it reads (default: the last)')
  parser.add_argument('--distance', type=int, default=0, help='fewest tokens between the two')
  parser.add_argument('--count', type=int, default=20, help='effects (default: %(default)s)')
  parser.add_argument('--step', default='latest', help='default: %(default)s')
  flags = parser.parse_args(arguments)
  console.print_result(_answer(flags))


def _answer(flags: argparse.Namespace) -> str:
  """The text that is printed."""
  text = content(flags.text)
  parts = decomposition(flags.run, flags.step)
  return ''.join(f'{line}\n' for line in _lines(parts, text, flags))


def _lines(parts: Decomposed, text: str, flags: argparse.Namespace) -> Iterator[str]:
  """The lines of the answer."""
  (tokens,) = parts.run.text_rows.tokens([text], None)
  found = parts.writers(
    text,
    flags.site,
    flags.component,
    flags.token,
    distance=flags.distance,
    count=flags.count,
  )
  last = len(tokens) - 1 if flags.token is None else flags.token
  where = _around(parts, tokens, last)
  yield f'{flags.site} {flags.component} reads {found.activation:.4g} at token {last}: {where}'
  for write in found.strongest:
    where = _around(parts, tokens, write.token)
    distance = last - write.token
    yield (
      f'{write.effect:+.4g}  {write.site} {write.component} at token {write.token}, {distance} '
      f'before: {where}'
    )


def _around(parts: Decomposed, tokens: np.ndarray, number: int) -> str:
  """The text around a token, which stands in brackets."""
  begin = max(0, number - _AROUND)
  shown = pieces(tokens[begin : number + _AROUND + 1].tolist(), parts.run.tokenizer.decode)
  place = number - begin
  before = ''.join(shown[:place])
  after = ''.join(shown[place + 1 :])
  return foreign.shown(f'{before}[{shown[place]}]{after}')


if __name__ == '__main__':
  sys.exit(main())
