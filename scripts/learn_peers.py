"""One trial of scripts/learn with a model of Hugging Face's transformers, in a process of its own.

Training follows common practice: linear warm-up, a cosine to a tenth, and rows of WINDOW tokens,
cut from the shuffled documents and shuffled themselves. `peers` has the models and their optimizer.
"""

from collections.abc import Callable, Iterator
import math
import time
from typing import Any

import learn_trial
from learn_trial import Trial
from learn_validation import (
  WINDOW,
  open_store,
  read_windows,
  sample,
  summary,
  windows,
)
import numpy as np
import peers
import torch
from torch import nn
from torch.nn import functional

from valkyrie.data.token_store import TokenStore

WARMUP = 0.1  # share of the steps
WHOLE_SECONDS = 60  # a reading of whole documents that would take longer is left out
MODELS: dict[str, Callable[[], nn.Module]] = {
  'llama-torch': lambda: peers.llama(WINDOW),
  'mamba2-torch': peers.mamba2,
}
# Models that can read whole documents, longer than the rows of their training.
RECURRENT = ('mamba2-torch',)


class Training:
  """A model, its optimizer and its batches."""

  def __init__(self, trial: Trial):
    torch.manual_seed(trial.seed)
    self.trial = trial
    self.model = MODELS[trial.model]()
    self.model.train()
    self.optimizer = peers.adamw(self.model, trial.rate)
    self.rows = training_rows(open_store('train'), trial.batch // WINDOW, trial.seed)

  def step(self, number: int) -> float:
    """Takes a step -> its loss."""
    for group in self.optimizer.param_groups:
      group['lr'] = self.trial.rate * schedule(number, self.trial.steps)
    rows = torch.from_numpy(next(self.rows))
    return peers.learn(self.model, self.optimizer, rows[:, :-1], rows[:, 1:])


def training_rows(store: TokenStore, rows: int, seed: int) -> Iterator[np.ndarray]:
  """Endless batches int64 [rows, WINDOW + 1]: inputs, and targets one token later."""
  random = np.random.default_rng(seed)
  while True:
    documents = random.permutation(len(store.lengths))
    lengths = store.lengths[documents]
    tokens = store.read(documents, np.zeros_like(lengths), lengths).astype(np.int64)
    starts = random.permutation((len(tokens) - 1) // WINDOW) * WINDOW
    for first in range(0, len(starts) - rows + 1, rows):
      yield np.stack([tokens[s : s + WINDOW + 1] for s in starts[first : first + rows]])


def schedule(step: int, steps: int) -> float:
  """The share of the peak learning rate at a step, from 0: the schedule of training.optimizers."""
  warmup = round(WARMUP * steps)
  if step < warmup:
    return 1 / warmup + (1 - 1 / warmup) * step / warmup
  cosine = math.cos(math.pi * (step - warmup) / max(steps - warmup, 1))
  return 0.1 + 0.9 * (1 + cosine) / 2


def measure(trial: Trial) -> dict[str, Any]:
  """The seconds of a step."""
  training = Training(trial)
  return {'step_seconds': learn_trial.step_seconds(lambda: training.step(0))}


def train(trial: Trial) -> dict[str, Any]:
  """Trains and validates."""
  began = time.perf_counter()
  training = Training(trial)
  ready = time.perf_counter()
  losses = [training.step(number) for number in range(trial.steps)]
  trained = time.perf_counter()
  model = training.model.eval()
  documents = sample(open_store('validation'), trial.scored)
  nats = read_windows(documents, trial.batch // WINDOW, lambda tokens: _nats(model, tokens))
  validated = time.perf_counter()
  whole = None
  in_windows = WINDOW * sum(1 for document in documents for _ in windows(len(document)))
  expected = (validated - trained) * sum(map(len, documents)) / in_windows
  if trial.model in RECURRENT and expected < WHOLE_SECONDS:
    whole = summary([_nats(model, document[None])[0] for document in documents])
  return {
    'parameters': sum(p.numel() for p in model.parameters()),
    'seconds': trained - ready,
    'startup_seconds': ready - began,
    'validation_seconds': time.perf_counter() - trained,
    'losses': [round(loss, 4) for loss in losses],
    'reading': f'windows of {WINDOW}',
    **summary(nats),
    'whole': whole,
  }


@torch.inference_mode()
def _nats(model: nn.Module, tokens: np.ndarray) -> np.ndarray:
  """[rows, T] -> nats of the targets 1 to T - 1, [rows, T - 1]."""
  ids = torch.from_numpy(tokens.astype(np.int64))
  logits = model(input_ids=ids[:, :-1]).logits
  return functional.cross_entropy(logits.mT, ids[:, 1:], reduction='none').numpy()


if __name__ == '__main__':
  learn_trial.main(measure, train)
