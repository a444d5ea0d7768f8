"""Time and memory of a generated token after texts of different lengths.

Ours reads the whole text in chunks, then makes tokens one at a time. Hugging Face's Llama has the
same width, layers, heads and MLP; its cache is filled with random numbers instead of a text, as far
as memory reaches. Both are greedy, with random weights, one row, float32. All are timed in turns.

    PYTHONPATH=. python scripts/generate_bench.py
"""

import argparse
from collections.abc import Callable, Sequence
import os
import statistics
import time

import jax
import numpy as np
import torch
import transformers

from valkyrie.config.load import load_gin
from valkyrie.inference.generation import GREEDY
from valkyrie.inference.reader import Reader, TextCarry
from valkyrie.models import language_model
from valkyrie.models.language_model import LanguageModel

MODULES = (
  'valkyrie.models.language_model',
  'valkyrie.models.attention.longformer',
  'valkyrie.models.recurrence.gated',
  'valkyrie.models.s5.layer',
)
VOCABULARY = 259
WIDTH, LAYERS, HEADS, KV_HEADS, HEAD_WIDTH, MLP = 192, 6, 3, 1, 64, 384  # of gin/models/tiny.gin
MIB = 2**20

Timed = Callable[[int], float]


class Hybrid:
  """gin/models/tiny.gin."""

  def __init__(self, chunk_size: int):
    load_gin(['gin/models/tiny.gin'], modules=MODULES)
    model = language_model.transform(LanguageModel)
    self._reader = Reader(model, chunk_size)
    self._params, _ = jax.jit(model.init, static_argnums=1)(jax.random.key(0), 1)

  def after(self, tokens: int) -> tuple[Timed, int]:
    """(seconds of so many tokens after a text, bytes of its carry)."""
    text = np.random.default_rng(0).integers(3, VOCABULARY, tokens)
    carry = self._reader.read(self._params, self._reader.fresh(1), [text])
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(carry))

    def timed(count: int) -> float:
      begun = jax.block_until_ready(TextCarry(*jax.tree.map(jax.numpy.copy, carry)))
      began = time.perf_counter()
      for _ in self._reader.generate(
        self._params, begun, [], GREEDY, seed=0, numbers=[(0, 0)], count=count
      ):
        pass
      return time.perf_counter() - began

    return timed, kept


class Llama:
  """Hugging Face's Llama of the same sizes."""

  def __init__(self):
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

  def after(self, tokens: int) -> tuple[Timed, int] | None:
    """The same; None if the cache would need more than a third of the free memory."""
    kept = 2 * 4 * LAYERS * KV_HEADS * HEAD_WIDTH * tokens
    if kept > os.sysconf('SC_AVPHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 3:
      return None
    cache = transformers.DynamicCache(config=self._model.config)
    for layer in range(LAYERS):
      keys, values = torch.randn(2, 1, KV_HEADS, tokens, HEAD_WIDTH)
      cache.update(keys, values, layer)

    @torch.inference_mode()
    def timed(count: int) -> float:
      token = torch.zeros((1, 1), dtype=torch.long)
      began = time.perf_counter()
      for _ in range(count):
        scores = self._model(input_ids=token, past_key_values=cache, use_cache=True).logits
        token = scores[:, -1:].argmax(-1)
      spent = time.perf_counter() - began
      cache.crop(-count)  # for the next turn
      return spent

    return timed, kept


def main(arguments: Sequence[str] | None = None) -> None:
  """Prints the table."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  lengths = [1024, 4096, 16384, 65536, 262144, 655360]
  parser.add_argument('--tokens', type=int, nargs='+', default=lengths, help='of a text')
  parser.add_argument('--made', type=int, default=32, help='tokens that are made in a turn')
  parser.add_argument('--repeats', type=int, default=5)
  parser.add_argument('--chunk_size', type=int, default=2048)
  flags = parser.parse_args(arguments)

  models = {'hybrid': Hybrid(flags.chunk_size), 'llama': Llama()}
  measured = {(name, n): model.after(n) for n in flags.tokens for name, model in models.items()}
  seconds: dict[tuple[str, int], list[float]] = {key: [] for key in measured}
  for repeat in range(flags.repeats + 1):
    for key, found in measured.items():
      if found is not None:
        spent = found[0](flags.made) / flags.made
        if repeat:  # the first turn compiles
          seconds[key].append(spent)

  print(f'{flags.made} tokens after each text, median of {flags.repeats} turns, one row:\n')
  print('| tokens before | hybrid, ms | of the first | carry | Llama, ms | of the first | cache |')
  print('| --- | --- | --- | --- | --- | --- | --- |')
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
  main()
