"""Time and memory of a generated token after texts of different lengths.

Ours reads the whole text in chunks, then makes tokens one at a time. Hugging Face's Llama has the
same width, layers, heads and MLP; its cache is filled with random numbers instead of a text, as far
as memory reaches. Both are greedy, with random weights, one row, float32. All are timed in turns.
With --alone, ours is timed without the other, and needs no torch.

    bash scripts/experiment generate_bench
"""
# Environment: learn accelerator

import argparse
from collections.abc import Callable, Sequence
import json
import os
import pathlib
import statistics
import sys
import time
from typing import Any

import jax
import numpy as np

from valkyrie.config.load import load_gin
from valkyrie.config.modules import CONFIGURABLE_MODULES
from valkyrie.distributed import console
from valkyrie.inference.generation import GREEDY
from valkyrie.inference.reader import Reader, TextCarry
from valkyrie.models import language_model
from valkyrie.models.language_model import LanguageModel

VOCABULARY = 259
# of gin/models/tiny.gin
WIDTH = 192
LAYERS = 6
HEADS = 3
KV_HEADS = 1
HEAD_WIDTH = 64
MLP = 384
MIB = 2**20

Timed = Callable[[int], float]


class Hybrid:
  """The model of gin files."""

  def __init__(self, gin_files: Sequence[str], chunk_size: int):
    load_gin(gin_files, modules=CONFIGURABLE_MODULES)
    model = language_model.transform(LanguageModel)
    self.reader = Reader(model, chunk_size)
    self.params, _ = jax.jit(model.init, static_argnums=1)(jax.random.key(0), 1)

  def after(self, tokens: int) -> tuple[Timed, int]:
    """(seconds of so many tokens after a text, bytes of its carry)."""
    text = np.random.default_rng(0).integers(3, VOCABULARY, tokens)
    carry = self.reader.read(self.params, self.reader.fresh(1), [text])
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(carry))

    def timed(count: int) -> float:
      begun = jax.block_until_ready(TextCarry(*jax.tree.map(jax.numpy.copy, carry)))
      began = time.perf_counter()
      for _ in self.reader.generate(
        self.params, begun, [], GREEDY, seed=0, numbers=[(0, 0)], count=count
      ):
        pass
      return time.perf_counter() - began

    return timed, kept


class Llama:
  """Hugging Face's Llama of the same sizes."""

  def __init__(self):
    import torch  # noqa: PLC0415  (not with --alone)
    import transformers  # noqa: PLC0415

    self._torch = torch
    self._empty = transformers.DynamicCache
    config = transformers.LlamaConfig(
      vocab_size=VOCABULARY,
      hidden_size=WIDTH,
      intermediate_size=MLP,
      num_hidden_layers=LAYERS,
      num_attention_heads=HEADS,
      num_key_value_heads=KV_HEADS,
      head_dim=HEAD_WIDTH,
      max_position_embeddings=2**20,
    )
    self._model = transformers.LlamaForCausalLM(config).eval()

  def filled(self, tokens: int) -> tuple[Any, int]:
    """(a cache of so many random tokens, its bytes)."""
    cache = self._empty(config=self._model.config)
    for layer in range(LAYERS):
      keys, values = self._torch.randn(2, 1, KV_HEADS, tokens, HEAD_WIDTH)
      cache.update(keys, values, layer)
    return cache, 2 * 4 * LAYERS * KV_HEADS * HEAD_WIDTH * tokens

  def read(self, cache: Any, tokens: Any) -> Any:
    """The logits of tokens [1, T] that follow the cache, which then has them, too."""
    with self._torch.inference_mode():
      return self._model(input_ids=tokens, past_key_values=cache, use_cache=True).logits

  def after(self, tokens: int) -> tuple[Timed, int] | None:
    """The same; None if the cache would need more than a third of the free memory."""
    if 2 * 4 * LAYERS * KV_HEADS * HEAD_WIDTH * tokens > (
      os.sysconf('SC_AVPHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 3
    ):
      return None
    cache, kept = self.filled(tokens)

    def timed(count: int) -> float:
      token = self._torch.zeros((1, 1), dtype=self._torch.long)
      began = time.perf_counter()
      for _ in range(count):
        token = self.read(cache, token)[:, -1:].argmax(-1)
      spent = time.perf_counter() - began
      cache.crop(-count)  # for the next turn
      return spent

    return timed, kept


@console.program
def main(arguments: Sequence[str] | None = None) -> None:
  """Prints the table."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  lengths = [1024, 4096, 16384, 65536, 262144, 655360]
  parser.add_argument('--tokens', type=int, nargs='+', default=lengths, help='of a text')
  parser.add_argument('--made', type=int, default=32, help='tokens that are made in a turn')
  parser.add_argument('--repeats', type=int, default=5)
  parser.add_argument('--chunk_size', type=int, default=2048)
  parser.add_argument('--gin_file', default='gin/models/tiny.gin', help='our model')
  parser.add_argument('--alone', action='store_true', help='time only our model')
  parser.add_argument('--json', type=pathlib.Path, help='write the numbers of our model there')
  flags = parser.parse_args(arguments)

  models: dict[str, Hybrid | Llama] = {'hybrid': Hybrid([flags.gin_file], flags.chunk_size)}
  if not flags.alone:
    models['llama'] = Llama()
  measured = {(name, n): model.after(n) for n in flags.tokens for name, model in models.items()}
  seconds: dict[tuple[str, int], list[float]] = {key: [] for key in measured}
  for repeat in range(flags.repeats + 1):
    for key, found in measured.items():
      if found is not None:
        spent = found[0](flags.made) / flags.made
        if repeat:  # the first turn compiles
          seconds[key].append(spent)

  if flags.json:
    found = [
      {
        'tokens': n,
        'seconds': statistics.median(seconds['hybrid', n]),
        'carry_bytes': measured['hybrid', n][1],
      }
      for n in flags.tokens
    ]
    flags.json.write_text(json.dumps(found, indent=2) + '\n')
  print(f'{flags.made} tokens after each text, median of {flags.repeats} turns, one row:\n')
  heads = ['hybrid, ms | of the first | carry', 'Llama, ms | of the first | cache'][: len(models)]
  print(f'| tokens before | {" | ".join(heads)} |')
  print('| --- ' * (1 + 3 * len(models)) + '|')
  first = {name: statistics.median(seconds[name, flags.tokens[0]]) for name in models}
  for n in flags.tokens:
    cells = [f'{n:,}']
    for name in models:
      found = measured[name, n]
      if found is None:
        cells += ['', '', 'too large']
        continue
      now = statistics.median(seconds[name, n])
      cells += [f'{1e3 * now:.2f}', f'{now / first[name]:.2f}', f'{found[1] / MIB:.1f} MiB']
    print(f'| {" | ".join(cells)} |')


if __name__ == '__main__':
  sys.exit(main())
