"""Kernels that a run asks for, compared with the plain forms on its own devices."""

from collections.abc import Callable, Iterator
import functools
from typing import Any

import jax
import jax.numpy as jnp

from valkyrie.errors import ConfigurationError, Disagreement, reason_of
from valkyrie.models import kernel_choice, language_model
from valkyrie.models.layers import MixerOptions
from valkyrie.sharding import ambient
from valkyrie.training.setup import Setup, make_mixer
from valkyrie.types import Array


def kernel_results(
  setup: Setup,
) -> Iterator[tuple[Any, tuple[int, int, int], Callable[..., Any]]]:
  """The mixers that ask for kernels, what one device reads at once, and `kernel_choice.results`.

  The results are those of the block's mixer, which may be one around the mixer that asks.
  """
  make = setup.settings.model
  blocks = language_model.asked(make, lambda model: model.blocks())
  about = setup.model.about
  row_parts = setup.partitioner.parts_of('batch')
  time_parts = setup.partitioner.parts_of('time')
  rows = setup.settings.batch_size // row_parts // setup.settings.micro_batches
  times = {phase.chunk_size // time_parts for phase in setup.curriculum.phases}
  for time in sorted(times):
    shape = (rows, time, about.width)
    for number, block in enumerate(blocks):
      for place, mixer in enumerate(block.mixers):
        asking = kernel_choice.asking(mixer)
        if getattr(asking, 'kernels', None):
          rebuild = functools.partial(make_mixer, make, number, place)
          results = functools.partial(kernel_choice.results, rebuild, shape, about.compute_dtype)
          yield asking, shape, results


def asked_lengths(setup: Setup) -> set[tuple[str, int]]:
  """What `agreeing_lengths` compares: (class of a mixer, tokens of a piece)."""
  lengths = set()
  for mixer, shape, _ in kernel_results(setup):
    _, time, _ = shape
    lengths.add((type(mixer).__name__, time))
  return lengths


def agreeing_lengths(
  setup: Setup,
  say: Callable[[str], None],
  bound: float = 2**-6,
) -> set[tuple[str, int]]:
  """The classes of mixers, and tokens of pieces, whose kernels agree, for `Setup.with_kernels`.

  The norm of a difference may be `bound`, four units in the last place of bfloat16, to which TPUs
  round what they multiply. If a kernel is required, raises a Disagreement
  if the results differ, and a ConfigurationError if there is no kernel.
  """
  agreed = set()
  failed = set()
  for mixer, shape, results in kernel_results(setup):
    pair = (type(mixer).__name__, shape[1])
    misfit = _misfit(setup, mixer, shape)
    error = ConfigurationError
    finding = ''
    if not misfit:
      error = Disagreement
      finding, misfit = _compared(results, pair, shape, bound)
    name = f'{type(mixer).__name__}.kernels'
    if misfit and mixer.kernels != 'prefer':
      raise error(f'{name}={mixer.kernels!r}: {misfit}. Set {name} = None.')
    if misfit:
      say(f'{name}: {misfit}: the plain form is used')
      failed.add(pair)
    else:
      say(f'{name}: {finding}')
      agreed.add(pair)
  return agreed - failed


def _misfit(setup: Setup, mixer: Any, shape: tuple[int, int, int]) -> str | None:
  """Why the kernel of a mixer does not run here; None if it does."""
  _, time, _ = shape
  automatic = None
  shared_time = ()
  if setup.partitioner.manual:
    shared_time = setup.partitioner.axes_of('time')
  else:
    automatic = setup.partitioner
  with ambient.within(partitioner=automatic, time=shared_time):
    return kernel_choice.why_not(mixer, time)


def _compared(
  results: Callable[..., Any],
  pair: tuple[str, int],
  shape: tuple[int, int, int],
  bound: float,
) -> tuple[str, str]:
  """(How far the kernel is from the plain form, why that is too far or '')."""
  rows, time, _ = shape
  by_kernel = MixerOptions(kernel_lengths={pair})
  compute_plain = jax.jit(functools.partial(results, MixerOptions()))
  compute_by_kernel = jax.jit(functools.partial(results, by_kernel))
  distances = []
  for in_one_document in (False, True):
    try:
      plain = jax.block_until_ready(compute_plain(in_one_document))
    except jax.errors.JaxRuntimeError as failure:  # such as too little memory
      return '', f'the plain form fails ({_first_line(failure)})'
    try:
      kernel = jax.block_until_ready(compute_by_kernel(in_one_document))
    except Exception as failure:
      return '', f'it fails ({_first_line(failure)})'
    parts = jax.tree.map(_distance, kernel, plain)
    distances.append(jnp.max(jnp.stack(parts)))
  apart = float(jnp.max(jnp.stack(distances)))  # NaN, if one is
  finding = f'{apart:.2g} of the norm from the plain form, on {rows} x {time:,} tokens'
  if not apart <= bound:  # NaN is neither
    return finding, f'{finding}, more than {bound:.2g}'
  return finding, ''


def _first_line(failure: Exception) -> str:
  first, _, _ = reason_of(failure).partition('\n')
  return first


def _distance(x: Array, y: Array) -> Array:
  """The norm of the difference of two arrays, in parts of the norm of the second."""
  difference = jnp.linalg.norm(x - y)
  size = jnp.linalg.norm(y) + 1e-30
  return difference / size
