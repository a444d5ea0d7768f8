"""A long document that is kept and changed: bytes and seconds, beside the cache of a Llama.

Ours keeps about 2 log2 of the carries (`run.read(text, keep='log')`), the Llama of Hugging Face the
keys and values of all tokens, which are random numbers, since two cores would read the text for
hours. Then the document is changed so many tokens before its end, and the rest of it is read: ours
from the nearest carry, the Llama from its cache, which is cut there. Medians of turns; both have
the sizes of gin/models/tiny.gin, random weights, float32. With --alone, ours is timed without the
other, with the model of --gin_file, and needs no torch.

    bash scripts/experiment document_bench
"""
# Environment: learn

import argparse
from collections.abc import Callable, Sequence
import pathlib
import statistics
import sys
import tempfile
import time
from typing import NamedTuple

from generate_bench import MIB, Hybrid, Llama
import jax
import numpy as np

from valkyrie.distributed import console
from valkyrie.inference import documents


class Kept(NamedTuple):
  """A document that is kept.

  bytes: what is kept.
  seconds: of its first reading, of writing its file, and of opening the file; None if not timed.
  change: the seconds of a change so many tokens before the end.
  """

  bytes: float
  seconds: Sequence[float | None]
  change: Callable[[int], float]


def ours(gin_files: Sequence[str], tokens: int, chunk_size: int) -> Kept:
  """A document of random tokens, read by our model."""
  model = Hybrid(gin_files, chunk_size)
  most = model.reader.model.about.vocabulary_size
  text = np.random.default_rng(0).integers(3, most, tokens, np.int32)

  def read(text: np.ndarray, like: documents.Document | None = None) -> documents.Document:
    document = documents.read_document(model.reader, model.params, text, like)
    return jax.block_until_ready(document)

  last = tokens - tokens % chunk_size
  read(text[:chunk_size])  # compiles, as the next line does
  read(text[last:])
  began = time.perf_counter()
  document = read(text)
  reading = time.perf_counter() - began
  with tempfile.TemporaryDirectory() as folder:
    file = pathlib.Path(folder, 'document.safetensors')
    began = time.perf_counter()
    documents.save(file, document, {})
    writing = time.perf_counter() - began
    began = time.perf_counter()
    document = jax.block_until_ready(documents.load(file, model.reader, {}))
    opening = time.perf_counter() - began
    size = file.stat().st_size

  def change(before: int) -> float:
    changed = text.copy()
    changed[-before] = 3 + (changed[-before] - 2) % (most - 3)
    began = time.perf_counter()
    read(changed, document)
    return time.perf_counter() - began

  return Kept(size, (reading, writing, opening), change)


def of_llama(tokens: int) -> Kept:
  """The cache of the Llama, filled with random numbers."""
  import torch  # noqa: PLC0415  (not with --alone)

  model = Llama()
  cache, size = model.filled(tokens)

  def change(before: int) -> float:
    began = time.perf_counter()
    cache.crop(-before)
    model.read(cache, torch.zeros((1, before), dtype=torch.long))
    return time.perf_counter() - began

  return Kept(size, (None, None, None), change)


def _seconds(seconds: float | None) -> str:
  return '' if seconds is None else f'{seconds:.2f} s'


@console.program
def main(arguments: Sequence[str] | None = None) -> None:
  """Prints the table."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--tokens', type=int, default=655360, help='of the document')
  parser.add_argument('--before', type=int, nargs='+', default=[1, 64, 1024], help='of the changes')
  parser.add_argument('--repeats', type=int, default=3)
  parser.add_argument('--chunk_size', type=int, default=2048)
  parser.add_argument('--gin_file', nargs='+', default=['gin/models/tiny.gin'], help='our model')
  parser.add_argument('--alone', action='store_true', help='time only our model')
  flags = parser.parse_args(arguments)
  made = {'hybrid': ours(flags.gin_file, flags.tokens, flags.chunk_size)}
  if not flags.alone:
    made['Llama'] = of_llama(flags.tokens)
  print(f'A document of {flags.tokens:,} tokens, medians of {flags.repeats} turns:\n')
  changes = ''.join(f' a change {n:,} tokens before the end |' for n in flags.before)
  print('| | kept | first read | file written | file opened |' + changes)
  print('| --- ' * (5 + len(flags.before)) + '|')
  for name, kept in made.items():
    cells = [name, f'{kept.bytes / MIB:,.1f} MiB', *map(_seconds, kept.seconds)]
    for before in flags.before:
      kept.change(before)  # compiles
      seconds = [kept.change(before) for _ in range(flags.repeats)]
      cells.append(_seconds(statistics.median(seconds)))
    print(f'| {" | ".join(cells)} |')


if __name__ == '__main__':
  sys.exit(main())
