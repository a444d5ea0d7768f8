"""Workloads of scripts/experiment bench --peers: the train steps of models of other programs."""

import time

from bench_runs import STEPS
import peers
import torch
from torch import nn
import transformers


class Peer:
  """A model that learns one repeated batch of random tokens.

  Attributes:
    version: of the programs that compute it.
    parameters: their number.
  """

  version = f'transformers {transformers.__version__}, torch {torch.__version__}'

  def __init__(self, model: nn.Module, rows: int, tokens: int, compiled: bool):
    self._model = model.train()
    if compiled:
      model.compile()
    self._optimizer = peers.adamw(model, rate=1e-3)
    batch = torch.randint(1, model.config.vocab_size, (rows, tokens + 1))
    self._inputs = batch[:, :-1]
    self._targets = batch[:, 1:]
    self.parameters = sum(p.numel() for p in model.parameters())
    self.steps(1)  # untimed: it allocates the memory, and compiles

  def steps(self, steps: int = STEPS) -> float:
    """Seconds per step."""
    began = time.perf_counter()
    for _ in range(steps):
      peers.learn(self._model, self._optimizer, self._inputs, self._targets)
    return (time.perf_counter() - began) / steps


def made(rows: int, tokens: int) -> dict[str, Peer]:
  """The peers by name, for batches of so many rows and tokens.

  Each is there in eager torch and under torch.compile, but for Longformer, which asks for values of
  its masks on the way and becomes slower.
  """
  transformers.logging.set_verbosity_error()
  torch.manual_seed(0)
  eager = peers.longformer(tokens), peers.llama(tokens), peers.mamba2()
  compiled = peers.llama(tokens), peers.mamba2()
  return {
    **{type(model).__name__: Peer(model, rows, tokens, compiled=False) for model in eager},
    **{
      f'{type(model).__name__} (compiled)': Peer(model, rows, tokens, compiled=True)
      for model in compiled
    },
  }
