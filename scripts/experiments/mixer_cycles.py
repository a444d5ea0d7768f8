"""What the compiler for a TPU expects each mixer of a run to cost, compiled alone in seconds.

Each mixer is compiled for one chip, forwards and backwards, with a carry, by its plain form. The
instructions that cost most are printed with their executions, cycles and bytes.

    bash scripts/experiment mixer_cycles --gin_file=gin/one_chip.gin --topology=v6e:1x1
    bash scripts/experiment mixer_cycles --gin_file=scripts/experiments/qwen3_5_2b.gin \\
        --topology=v6e:1x1 --gin.FullAttention.max_context=32768 --largest=20
"""
# Environment: tpu

import argparse
from collections import Counter
from collections.abc import Sequence
import functools
import sys

from bench_runs import with_bindings
import gin
import jax
from jax.sharding import SingleDeviceSharding

from valkyrie.config.load import load_gin
from valkyrie.config.modules import CONFIGURABLE_MODULES
from valkyrie.distributed import console
from valkyrie.lab.certificates import hlo, topologies, work
from valkyrie.models import kernel_choice, language_model
from valkyrie.models.language_model import LanguageModel
from valkyrie.models.layers import MixerOptions
from valkyrie.sharding import ambient
from valkyrie.training.setup import make_mixer


@console.program
def main(arguments: Sequence[str] | None = None) -> None:
  """Prints the sums and the costliest instructions of each mixer."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--gin_file', required=True)
  parser.add_argument('--topology', default='v6e:1x1', help='(default: %(default)s)')
  parser.add_argument('--tokens', type=int, default=8192, help='of a chunk (default: %(default)s)')
  parser.add_argument('--largest', type=int, default=8, help='instructions (default: %(default)s)')
  flags, bindings = with_bindings(parser, arguments)
  load_gin([flags.gin_file], bindings, modules=CONFIGURABLE_MODULES)
  make = gin.get_configurable(LanguageModel)
  device = topologies.devices(flags.topology)[0]
  on_device = SingleDeviceSharding(device)
  options = MixerOptions()
  with ambient.within(devices=[device]):
    about = language_model.transform(make).about
    blocks = language_model.asked(make, lambda model: model.blocks())
    places = {}
    for number, block in enumerate(blocks):
      for place, mixer in enumerate(block.mixers):
        places[type(mixer).__name__] = (number, place)
    shape = (1, flags.tokens, about.width)
    for name, (number, place) in places.items():
      rebuild = functools.partial(make_mixer, make, number, place)
      draw = functools.partial(kernel_choice.draw, rebuild, shape, about.compute_dtype, options)
      inputs = jax.eval_shape(draw)
      compute = functools.partial(kernel_choice.compute, rebuild, options)
      # The inputs are arguments: where the program draws them, too, it chooses their layouts.
      program = jax.jit(compute, out_shardings=on_device).lower(inputs).compile()
      works = work.list_work(hlo.parse(program.as_text() or ''))
      _print(name, works, flags.largest)


def _print(name: str, works: Sequence[work.Work], largest: int) -> None:
  cycles = Counter()
  for step in works:
    cycles[step] = step.cycles * step.times
  moved = sum(step.bytes * step.times for step in works)
  flops = sum(step.flops * step.times for step in works)
  print(
    f'{name}: {cycles.total() / 1e6:.1f} million cycles, {moved / 1e9:.2f} GB, '
    f'{flops / 1e12:.2f} TFLOP'
  )
  for step, total in cycles.most_common(largest):
    print(
      f'{total / 1e6:10.2f} million = {step.times:6} x {step.cycles:8} cycles, '
      f'{step.bytes / 1e6:9.2f} MB  {step.source[-90:]}'
    )


if __name__ == '__main__':
  sys.exit(main())
