"""Cost per token of Hugging Face's Llama in rows of different lengths, on a GPU.

It is about as large as gin/models/deep_1b.gin, and learns as fast as its users know: parameters and
AdamW in bfloat16, flash attention, torch.compile, layers that are computed again from their inputs
in the backward pass, and logits in pieces that are computed again, too.

    bash scripts/experiment long_llama
"""
# Environment: learn

import argparse
from collections.abc import Sequence
import statistics
import sys
import time

import peers
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
import transformers

from valkyrie.distributed import console

# tokens of a piece of the logits
VOCABULARY = 50257
PIECE = 8192
GIB = 2**30
SIZES = {
  'width': 2048,
  'intermediate_size': 5632,
  'num_hidden_layers': 24,
  'num_attention_heads': 16,
  'num_key_value_heads': 4,
}


def llama(positions: int) -> transformers.LlamaForCausalLM:
  """1.19 billion parameters."""
  with torch.device('cuda'):
    model = peers.llama(positions, VOCABULARY, **SIZES).to(torch.bfloat16)
  model.gradient_checkpointing_enable({'use_reentrant': False})
  for layer in model.model.layers:
    layer.compile()
  return model.train()


def loss_of(model: transformers.LlamaForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
  """The mean loss of tokens [1, T + 1]."""

  def summed(features, targets):
    logits = model.lm_head(features).float()
    return functional.cross_entropy(logits, targets, reduction='sum')

  inputs = tokens[:, :-1]
  targets = tokens[0, 1:]
  features = model.model(input_ids=inputs).last_hidden_state[0]
  pieces = zip(features.split(PIECE), targets.split(PIECE), strict=True)
  return sum(checkpoint(summed, *piece, use_reentrant=False) for piece in pieces) / len(targets)


@console.program
def main(arguments: Sequence[str] | None = None) -> None:
  """Prints the table."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--tokens', type=int, nargs='+', default=[8192, 65536, 131072, 1048576])
  parser.add_argument('--repeats', type=int, default=3)
  flags = parser.parse_args(arguments)

  torch.manual_seed(0)
  model = llama(max(flags.tokens))
  optimizer = peers.adamw(model, rate=1e-4)
  count = sum(p.numel() for p in model.parameters())
  versions = f'transformers {transformers.__version__}, torch {torch.__version__}'
  print(f'{versions}, {torch.cuda.get_device_name()}, {count:,} parameters, median of')
  print(f'{flags.repeats} steps:\n\n   tokens  µs a token   GiB', flush=True)
  for tokens in flags.tokens:
    row = torch.randint(1, VOCABULARY, (1, tokens + 1), device='cuda')
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    try:
      for _ in range(1 + flags.repeats):  # the first step compiles
        torch.cuda.synchronize()
        began = time.perf_counter()
        peers.take_step(model, optimizer, loss_of(model, row))
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    except torch.cuda.OutOfMemoryError:
      print(f'{tokens:9,}  does not fit')
      break
    used = torch.cuda.max_memory_allocated() / GIB
    micros = 1e6 * statistics.median(seconds[1:]) / tokens
    print(f'{tokens:9,} {micros:11.1f} {used:5.1f}', flush=True)


if __name__ == '__main__':
  sys.exit(main())
