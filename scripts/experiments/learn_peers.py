"""A run of a model of Hugging Face's transformers, with the flags and the files of ours.

    bash scripts/experiment learn_peers llama 64 --gin_file=gin/words_cpu.gin --model_dir=runs/llama

It reads the task, the tokenizer, the width of the model, the tokens of a step, learning rate, seed
and steps from the gin files. Learning follows common practice: linear warm-up, and a cosine to a
tenth. Training and validation read rows of as many tokens as the command says, here 64. `peers` has
the models and their optimizer. The command continues after any interruption, from a checkpoint that
is saved every minute.
"""
# Environment: learn

from collections.abc import Callable
import functools
import itertools
import json
import math
import os
import pathlib
import re
import sys
import time
from typing import Any

import gin
from learn_validation import training_rows, validation
import numpy as np
import peers
import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from valkyrie import main as program
from valkyrie.command_line import parse_command_line
from valkyrie.config import record
from valkyrie.config.load import load_gin
from valkyrie.data.feed import TaskFeed
from valkyrie.data.tokenizer_copy import copy_tokenizer
from valkyrie.distributed import console
from valkyrie.errors import ConfigurationError, UsageError
from valkyrie.monitoring.json_lines import JsonLines
from valkyrie.run import configuration_files
from valkyrie.storage import whole_file
from valkyrie.training.setup import StepSettings

SAVED_EVERY = 60  # seconds
MODELS: dict[str, Callable[..., nn.Module]] = {
  'llama': peers.llama,
  'qwen3': functools.partial(peers.llama, kind='qwen3'),
  'mamba2': lambda _, vocabulary, width: peers.mamba2(vocabulary, width),
}


class Training:
  """A model, its optimizer, and the steps that it has taken; a file keeps all three."""

  def __init__(self, model: nn.Module, rate: Callable[[int], float], file: pathlib.Path):
    """Continues from the file, if it exists; `rate` is the learning rate at a step.

    The first step of a run counts its FLOPs in eager torch. All others are compiled.
    """
    self.model = model.train()
    self.optimizer = peers.adamw(model, rate(0))
    self._rate = rate
    self.step = 0
    self.flops = 0.0
    self._file = file
    if file.exists():
      kept = torch.load(file, weights_only=True)
      self.model.load_state_dict(kept['model'])
      self.optimizer.load_state_dict(kept['optimizer'])
      self.step = kept['step']
      self.flops = kept['flops']
      self.model.compile()

  def save(self) -> None:
    kept = {'model': self.model.state_dict(), 'optimizer': self.optimizer.state_dict()}
    partial = self._file.with_suffix('.partial')
    torch.save({**kept, 'step': self.step, 'flops': self.flops}, partial)
    os.replace(partial, self._file)

  def learn(self, rows: np.ndarray) -> float:
    """Takes a step with rows [B, T + 1] -> its loss."""
    for group in self.optimizer.param_groups:
      group['lr'] = self._rate(self.step)
    self.step += 1
    tokens = torch.from_numpy(rows)

    def step() -> float:
      return peers.learn(self.model, self.optimizer, tokens[:, :-1], tokens[:, 1:])

    if self.flops:
      return step()
    with FlopCounterMode(display=False) as counter:
      loss = step()
    self.flops = float(counter.get_total_flops())
    self.model.compile()
    return loss


def schedule(step: int, steps: int, warmup: int) -> float:
  """The share of the peak learning rate at a step, from 0: the schedule of training.optimizers."""
  if step < warmup:
    return 1 / warmup + (1 - 1 / warmup) * step / warmup
  cosine = math.cos(math.pi * (step - warmup) / max(steps - warmup, 1))
  return 0.1 + 0.9 * (1 + cosine) / 2


def feed_of(split: str) -> TaskFeed:
  with gin.config_scope(split):
    return gin.get_configurable(TaskFeed)()


def rows_of_a_step(size: int) -> int:
  """The rows of `size` tokens that have as many tokens as a step of the gin files."""
  settings: Any = gin.get_configurable(StepSettings)()
  lengths = {phase.tokens_per_row for phase in settings.curriculum().phases}
  tokens = settings.batch_size * max(lengths)
  if len(lengths) > 1 or tokens % size or size % 2:
    raise ConfigurationError(
      f'The phases read {sorted(lengths)} tokens of {settings.batch_size} rows in a step, and a '
      f'peer rows of {size}. Use one length, and for a peer an even number that divides the tokens '
      'of a step, such as 64.'
    )
  return tokens // size


def train(name: str, size: int, arguments: list[str]) -> None:
  """Trains what is left on rows of `size` tokens, and validates."""
  flags, gin_flags = parse_command_line(arguments)
  load_gin(
    flags.gin_file,
    gin_flags,
    allowed_imports=flags.gin_allow_import,
    modules=program.CONFIGURABLE_MODULES,
  )
  bound = record.bindings()
  folder = pathlib.Path(flags.model_dir)
  peak = bound['Optimizer.learning_rate']
  warmup = bound['Optimizer.warmup_steps']
  steps = bound['train.train_steps']
  every = bound['train.log_every']
  rows = rows_of_a_step(size)
  feed = feed_of('train')
  held_out = feed_of('validation')
  torch.manual_seed(bound['StepSettings.seed'])
  model = MODELS[name](size, feed.vocabulary_size, bound['LanguageModel.d_model'])
  configuration_files.write_configuration(folder)
  parameters = sum(p.numel() for p in model.parameters())
  whole_file.write(folder / 'model_info.txt', f'{parameters:,} parameters in transformers\n')
  copy_tokenizer(feed.vocabulary, folder)
  training = Training(
    model, lambda step: peak * schedule(step, steps, warmup), folder / 'checkpoint.pt'
  )
  lines = JsonLines(folder / 'metrics.jsonl')
  saved = time.perf_counter()
  batches = itertools.islice(
    training_rows(feed.store, rows, size, bound['StepSettings.seed']), training.step, steps
  )
  losses = []
  seconds = 0.0
  timed = 0
  for number, batch in enumerate(batches):
    began = time.perf_counter()
    losses.append(training.learn(batch))
    if number > 1:  # the first steps of a process count FLOPs and compile
      seconds, timed = seconds + time.perf_counter() - began, timed + 1
    if (training.step % every == 0 or training.step == steps) and timed:
      speed = timed * rows * size / seconds
      lines.write({
        'step': training.step,
        'tokens': training.step * rows * size,
        'loss': sum(losses) / len(losses),
        'step_seconds': seconds / timed,
        'tokens_per_second': speed,
        'tokens_per_second_per_device': speed,
        'tflops_per_second_per_device': training.flops * timed / seconds / 1e12,
      })  # fmt: skip
      losses = []
      seconds = 0.0
      timed = 0
    if time.perf_counter() - saved > SAVED_EVERY:
      training.save()
      saved = time.perf_counter()
  lines.close()
  training.save()
  whole_file.write(folder / 'eval/data.json', json.dumps({'': held_out.fingerprint}) + '\n')
  found = validation(held_out.store, rows, size, lambda tokens: nats(model.eval(), tokens))
  evaluations = JsonLines(folder / 'eval/metrics.jsonl')
  evaluations.write({'step': training.step, **found})
  evaluations.close()


@torch.inference_mode()
def nats(model: nn.Module, tokens: np.ndarray) -> np.ndarray:
  """[rows, T] -> nats of the targets 1 to T - 1, [rows, T - 1]."""
  ids = torch.from_numpy(tokens)
  logits = model(input_ids=ids).logits[:, :-1]  # the shape of a step, which needs no new program
  return functional.cross_entropy(logits.mT, ids[:, 1:], reduction='none').numpy()


@console.program
def main() -> None:
  """Trains the model that the command line names."""
  match sys.argv[1:]:
    case [name, size, *flags] if name in MODELS and re.fullmatch(r'[1-9]\d*', size):
      train(name, int(size), flags)
    case _:
      raise UsageError(
        f'Name one of {", ".join(MODELS)} first, then the tokens of a row, such as 64, and then '
        'the flags of a run.'
      )


if __name__ == '__main__':
  sys.exit(main())
