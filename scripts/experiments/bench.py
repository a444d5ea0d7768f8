"""Speed of a model's train step, of each of its parts, and of the training loop.

It needs only jax, Haiku, optax and gin:

    bash scripts/experiment bench

A variant has one kind of the model's blocks in all layers; one variant has no mixers. The step's
time by part follows from them: a layer's mixers cost the difference to the variant without any.

With --peers, models of about that size of Hugging Face's transformers learn in the same turns, on
torch's own threads.

All variants are timed in turns within one run, and every other turn reverses the order, so that a
slowdown of the machine affects all equally. A share of the peak compares numbers of the same turn.
"""
# Environment: accelerator

import argparse
from collections.abc import Callable, Mapping, Sequence
import json
import os
import pathlib
import platform
import sys
import time
from typing import Any

from bench_report import parts, report, speeds, spread
from bench_runs import NO_MIXERS, STEPS, WHOLE, Loop, Trainer, variants, with_bindings
import jax
import jax.numpy as jnp

from valkyrie.config.load import load_gin
from valkyrie.config.modules import CONFIGURABLE_MODULES
from valkyrie.distributed import console
from valkyrie.sharding.partitioner import Partitioner

LAYOUT = 'gin/partition/single.gin'
# What the models' files bind.
MODULES = tuple(m for m in CONFIGURABLE_MODULES if m.startswith('valkyrie.models.'))
MATRIX = 2048


def matmul_peak(dtype: Any, size: int) -> Callable[[], float]:
  """A function that measures the operations per second of a size^3 product, the best of two."""
  key = jax.random.key(0)
  b = (jax.random.normal(key, (size, size)) * size**-0.5).astype(dtype)
  product = jax.jit(jnp.matmul)

  def measure() -> float:
    seconds = []
    for _ in range(2):
      began = time.perf_counter()
      jax.block_until_ready(product(product(b, b), b))
      seconds.append((time.perf_counter() - began) / 2)
    return 2 * size**3 / min(seconds)

  measure()
  return measure


def take_turns(
  timers: Mapping[str, Callable[[], float]], peak: Callable[[], float], repeats: int
) -> tuple[dict[str, list[float]], list[float]]:
  """The seconds of each timer by turn, and the best peak of each turn, measured between timers."""
  seconds: dict[str, list[float]] = {name: [] for name in timers}
  peaks = []
  for turn in range(repeats):
    found = [peak()]
    for name in list(timers)[:: -1 if turn % 2 else 1]:
      seconds[name].append(timers[name]())
      found.append(peak())
    peaks.append(max(found))
    _say(f'turn {turn + 1} of {repeats}: ' + _line_of(seconds))
  return seconds, peaks


def _line_of(seconds: Mapping[str, Sequence[float]]) -> str:
  return ', '.join(f'{name} {values[-1]:.4f} s' for name, values in seconds.items())


def _say(text: str) -> None:
  print(text, file=sys.stderr, flush=True)


@console.program
def main(arguments: Sequence[str] | None = None) -> None:
  """Measures, prints the report, and writes --json."""
  flags, gin_flags = _flags(arguments)
  load_gin([flags.gin_file, LAYOUT], gin_flags, modules=MODULES)
  layout = Partitioner()
  trainers = {}
  for name, pattern in variants().items():
    _say(f'compiling {name}')
    trainers[name] = Trainer(pattern, layout, flags.tokens, rows=flags.rows)
  whole = trainers[WHOLE]
  timers = {name: trainer.bare_steps for name, trainer in trainers.items()}
  timers = {'loop': Loop(whole).steps, **timers}  # next to WHOLE, with which it is compared
  peers = _peers(flags)
  timers |= {name: peer.steps for name, peer in peers.items()}
  size = MATRIX if jax.default_backend() == 'cpu' else 4 * MATRIX  # enough for a chip
  seconds, peaks = take_turns(timers, matmul_peak(whole.compute_dtype, size), flags.repeats)
  for name, trainer in trainers.items():
    if skipped := int(trainer.state.skipped):
      raise FloatingPointError(
        f'{name}: {skipped} steps were not finite, so the measured times are meaningless.'
      )

  records = [
    _machine(flags),
    {
      'name': 'peak',
      'dtype': str(whole.compute_dtype),
      'size': size,
      'flops_per_second': spread(peaks),
    },
    *(
      {
        'name': name,
        'parameters': trainer.parameters,
        'forward': trainer.forward._asdict(),
        'forward_flops_per_token': trainer.model.about.forward_flops,
        'train_flops_per_token': trainer.flops_per_token,
        **speeds(seconds[name], peaks, flags.rows * flags.tokens, trainer.flops_per_token),
      }
      for name, trainer in trainers.items()
    ),
    {'name': 'parts', 'seconds': parts(seconds, whole.blocks, WHOLE, NO_MIXERS)},
    {
      'name': 'loop',
      'step_seconds': spread(seconds['loop']),
      'times_bare_step': spread(
        looped / bare for looped, bare in zip(seconds['loop'], seconds[WHOLE], strict=True)
      ),
    },
    *(
      {
        'name': name,
        'peer': peer.version,
        'parameters': peer.parameters,
        'step_seconds': spread(seconds[name]),
        'tokens_per_second': spread(flags.rows * flags.tokens / s for s in seconds[name]),
        'times_model': spread(
          theirs / ours for theirs, ours in zip(seconds[name], seconds[WHOLE], strict=True)
        ),
      }
      for name, peer in peers.items()
    ),
  ]
  print(report(records))
  if flags.json:
    flags.json.write_text(''.join(json.dumps(record) + '\n' for record in records))


def _peers(flags: argparse.Namespace) -> dict[str, Any]:
  if not flags.peers:
    return {}
  from bench_peers import made  # noqa: PLC0415  (torch, only for --peers)

  return made(flags.rows, flags.tokens)


def _flags(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
  parser = argparse.ArgumentParser(
    prog='scripts/experiment bench',
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  add = parser.add_argument
  add('--gin_file', default='gin/models/tiny.gin', metavar='F', help='model (default: %(default)s)')
  add('--rows', type=_positive, default=16, metavar='N', help='of a step (default: %(default)s)')
  add('--tokens', type=_positive, default=64, metavar='N', help='of a row (default: %(default)s)')
  add('--repeats', type=_positive, default=5, metavar='N', help='turns (default: %(default)s)')
  add('--peers', action='store_true', help="also time models of Hugging Face's transformers")
  parser.add_argument(
    '--json', type=pathlib.Path, metavar='FILE', help='also write one JSON object per line to FILE'
  )
  return with_bindings(parser, arguments)


def _positive(text: str) -> int:
  number = int(text)
  if number < 1:
    raise argparse.ArgumentTypeError(f'{text} is less than 1')
  return number


def _machine(flags: argparse.Namespace) -> dict[str, Any]:
  device = jax.devices()[0]
  return {
    'name': 'machine',
    'model': flags.gin_file,
    'device': device.device_kind,
    'platform': device.platform,
    'cpus': os.cpu_count(),
    'python': platform.python_version(),
    'jax': jax.__version__,
    'rows': flags.rows,
    'tokens': flags.tokens,
    'repeats': flags.repeats,
    'steps_together': STEPS,
  }


if __name__ == '__main__':
  sys.exit(main())
