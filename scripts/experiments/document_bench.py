"""A long document that is kept and changed: bytes and seconds, beside the cache of a Llama.

Ours keeps about log2 N carries (`run.read(text, keep='log')`), the Llama of Hugging Face the keys
and values of all tokens, which are random numbers, since two cores would read the text for hours.
Then the document is changed so many tokens before its end, and the rest of it is read: ours from
the nearest carry, the Llama from its cache, which is cut there. Medians of turns; both have the
sizes of gin/models/tiny.gin, random weights, float32.

    bash scripts/experiment document_bench
"""
# Environment: learn

import argparse
from collections.abc import Callable, Sequence
import statistics
import time

from generate_bench import MIB, VOCABULARY, Hybrid, Llama
import jax
import numpy as np
import torch

from valkyrie.inference import documents


def ours(tokens: int, chunk_size: int) -> tuple[float, Callable[[int], float]]:
  """(bytes that are kept, seconds of a change so many tokens before the end)."""
  model = Hybrid('gin/models/tiny.gin', chunk_size)
  text = np.random.default_rng(0).integers(3, VOCABULARY, tokens, np.int32)
  document = documents.read_document(model.reader, model.params, text)
  kept = sum(leaf.nbytes for leaf in jax.tree.leaves((document.carry, document.kept)))

  def change(before: int) -> float:
    changed = text.copy()
    changed[-before] = 3 + (changed[-before] - 2) % (VOCABULARY - 3)
    began = time.perf_counter()
    jax.block_until_ready(
      documents.read_document(model.reader, model.params, changed, document).hidden
    )
    return time.perf_counter() - began

  return kept, change


def of_llama(tokens: int) -> tuple[float, Callable[[int], float]]:
  """The same."""
  model = Llama()
  cache, kept = model.filled(tokens)

  def change(before: int) -> float:
    began = time.perf_counter()
    cache.crop(-before)
    model.read(cache, torch.zeros((1, before), dtype=torch.long))
    return time.perf_counter() - began

  return kept, change


def main(arguments: Sequence[str] | None = None) -> None:
  """Prints the table."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--tokens', type=int, default=655360, help='of the document')
  parser.add_argument('--before', type=int, nargs='+', default=[1, 64, 1024], help='of the changes')
  parser.add_argument('--repeats', type=int, default=3)
  parser.add_argument('--chunk_size', type=int, default=2048)
  flags = parser.parse_args(arguments)
  made = {'hybrid': ours(flags.tokens, flags.chunk_size), 'Llama': of_llama(flags.tokens)}
  print(f'A document of {flags.tokens:,} tokens, medians of {flags.repeats} turns:\n')
  print('| | kept |' + ''.join(f' a change {n:,} tokens before the end |' for n in flags.before))
  print('| --- ' * (2 + len(flags.before)) + '|')
  for name, (kept, change) in made.items():
    cells = [name, f'{kept / MIB:,.1f} MiB']
    for before in flags.before:
      change(before)  # compiles
      cells.append(f'{statistics.median(change(before) for _ in range(flags.repeats)):.2f} s')
    print(f'| {" | ".join(cells)} |')


if __name__ == '__main__':
  main()
