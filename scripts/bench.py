"""Speed of the train step of gin/models/small.gin, of each mixer alone, and of the training loop.

It needs only jax, Haiku, optax and gin:

    PYTHONPATH=. python scripts/bench.py

All variants are timed in turns within one run, and every other turn reverses the order, so that a
slowdown of the machine affects all alike. A share of the peak compares numbers of the same turn.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
import json
import os
import pathlib
import platform
import sys
import time
from typing import Any

from bench_report import report, speeds, spread
from bench_runs import STEPS, Loop, Trainer
import jax
import jax.numpy as jnp

from valkyrie.config.load import load_gin
from valkyrie.models.attention.longformer import LongformerAttention
from valkyrie.models.s5.layer import S5
from valkyrie.sharding.partitioner import Partitioner

GIN_FILES = ('gin/models/small.gin', 'gin/partition/single.gin')
# The mixers in a block of each variant, before its MLP.
VARIANTS = {
  'attention + S5': (LongformerAttention, S5),
  'attention': (LongformerAttention,),
  'S5': (S5,),
  'MLP only': (),
}
WHOLE = 'attention + S5'
MATRIX = 2048


def matmul_peak(dtype: Any) -> Callable[[], float]:
  """A function that measures the operations per second of a MATRIX^3 product, the best of two."""
  key = jax.random.key(0)
  b = (jax.random.normal(key, (MATRIX, MATRIX)) * MATRIX**-0.5).astype(dtype)
  product = jax.jit(jnp.matmul)

  def measure() -> float:
    seconds = []
    for _ in range(2):
      began = time.perf_counter()
      jax.block_until_ready(product(product(b, b), b))
      seconds.append((time.perf_counter() - began) / 2)
    return 2 * MATRIX**3 / min(seconds)

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


def main(arguments: Sequence[str] | None = None) -> None:
  """Measures, prints the report, and writes --json."""
  flags = _flags(arguments)
  load_gin(GIN_FILES)  # the imports above register the configurables
  layout = Partitioner()
  trainers = {}
  for name, mixers in VARIANTS.items():
    _say(f'compiling {name}')
    trainers[name] = Trainer(mixers, layout, flags.tokens)
  whole = trainers[WHOLE]
  timers = {name: trainer.bare_steps for name, trainer in trainers.items()}
  timers = {'loop': Loop(whole).steps, **timers}  # next to WHOLE, with which it is compared
  seconds, peaks = take_turns(timers, matmul_peak(whole.compute_dtype), flags.repeats)
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
      'size': MATRIX,
      'flops_per_second': spread(peaks),
    },
    *(
      {
        'name': name,
        'parameters': trainer.parameters,
        'forward': trainer.forward._asdict(),
        'forward_flops_per_token': trainer.model.about.forward_flops,
        'train_flops_per_token': trainer.flops_per_token,
        **speeds(seconds[name], peaks, flags.tokens, trainer.flops_per_token),
      }
      for name, trainer in trainers.items()
    ),
    {
      'name': 'loop',
      'step_seconds': spread(seconds['loop']),
      'times_bare_step': spread(
        looped / bare for looped, bare in zip(seconds['loop'], seconds[WHOLE], strict=True)
      ),
    },
  ]
  print(report(records))
  if flags.json:
    flags.json.write_text(''.join(json.dumps(record) + '\n' for record in records))


def _flags(arguments: Sequence[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    prog='scripts/bench',
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument(
    '--repeats', type=_positive, default=5, metavar='N', help='measuring turns (default: 5)'
  )
  parser.add_argument(
    '--tokens', type=_positive, default=4096, metavar='N', help='tokens per step (default: 4096)'
  )
  parser.add_argument(
    '--json', type=pathlib.Path, metavar='FILE', help='also write one JSON object per line to FILE'
  )
  return parser.parse_args(arguments)


def _positive(text: str) -> int:
  number = int(text)
  if number < 1:
    raise argparse.ArgumentTypeError(f'{text} is less than 1')
  return number


def _machine(flags: argparse.Namespace) -> dict[str, Any]:
  device = jax.devices()[0]
  return {
    'name': 'machine',
    'model': GIN_FILES[0],
    'device': device.device_kind,
    'platform': device.platform,
    'cpus': os.cpu_count(),
    'python': platform.python_version(),
    'jax': jax.__version__,
    'tokens': flags.tokens,
    'repeats': flags.repeats,
    'steps_together': STEPS,
  }


if __name__ == '__main__':
  main()
