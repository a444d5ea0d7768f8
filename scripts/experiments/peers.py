"""Models of Hugging Face's transformers that are compared with ours, and how they learn.

Configurations are the library's own but for the sizes. Learning follows common practice: AdamW with
betas of 0.9 and 0.95 and a decay of 0.1 on matrices, and clipping at 1. Without a GPU the library
computes Mamba-2 in plain torch.
"""

import torch
from torch import nn
from torch.nn import functional
import transformers

BYTES = 259  # and three special tokens, as our vocabulary of bytes
WIDTH = 192


def llama(
  positions: int, vocabulary: int = BYTES, width: int = WIDTH, kind: str = 'llama', **sizes: int
) -> nn.Module:
  """2.3 million parameters, if no `width` and `sizes` of a LlamaConfig are given.

  The width of the MLP is then 8/3 of the model's, as Llama's. The kind 'qwen3' has a norm of
  queries and keys.
  """
  heads = sizes.get('num_attention_heads', width // 64)
  small = {
    'num_hidden_layers': 5,
    'num_attention_heads': heads,
    'num_key_value_heads': heads,
    'head_dim': width // heads,
    'intermediate_size': 8 * width // 3,
  }
  config = transformers.AutoConfig.for_model(
    kind,
    max_position_embeddings=positions,
    use_cache=False,
    tie_word_embeddings=True,
    vocab_size=vocabulary,
    hidden_size=width,
    **(small | sizes),
  )
  return transformers.AutoModelForCausalLM.from_config(config)


def mamba2(vocabulary: int = BYTES, width: int = WIDTH) -> nn.Module:
  """2.3 million parameters. State, expansion and head width are as in the paper's models.

  Chunks of 64 were the fastest of 32 to 256.
  """
  config = transformers.Mamba2Config(
    num_hidden_layers=8,
    num_heads=width // 32,
    head_dim=64,
    state_size=128,
    n_groups=1,
    chunk_size=64,
    use_cache=False,
    tie_word_embeddings=True,
    vocab_size=vocabulary,
    hidden_size=width,
  )
  return transformers.Mamba2ForCausalLM(config)


def longformer(positions: int) -> nn.Module:
  """2.4 million parameters for rows of 64 tokens; its window of 128 tokens looks both ways.

  Its attention has a second set of projections, for global tokens.
  """
  config = transformers.LongformerConfig(
    num_hidden_layers=5,
    num_attention_heads=3,
    intermediate_size=512,
    attention_window=128,
    max_position_embeddings=positions + 130,  # padded to the window, from the padding's id on
    pad_token_id=0,
    tie_word_embeddings=True,
    vocab_size=BYTES,
    hidden_size=WIDTH,
  )
  return transformers.LongformerForMaskedLM(config)


def adamw(model: nn.Module, rate: float) -> torch.optim.Optimizer:
  """The optimizer of a peer."""
  matrices = [p for p in model.parameters() if p.ndim > 1]
  vectors = [p for p in model.parameters() if p.ndim < 2]
  groups = [{'params': matrices, 'weight_decay': 0.1}, {'params': vectors, 'weight_decay': 0.0}]
  return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True)


def learn(
  model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, targets: torch.Tensor
) -> float:
  """Takes a step with tokens [rows, T] -> its loss."""
  logits = model(input_ids=inputs).logits
  loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
  take_step(model, optimizer, loss)
  return loss.item()


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
  """The step of a loss."""
  optimizer.zero_grad()
  loss.backward()
  nn.utils.clip_grad_norm_(model.parameters(), 1.0)
  optimizer.step()
