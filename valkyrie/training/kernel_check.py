"""Kernels that a run asks for, compared with the plain forms on its own devices."""

from collections.abc import Callable, Iterator
import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp

from valkyrie.errors import ConfigurationError, Disagreement, reason_of
from valkyrie.models import language_model
from valkyrie.models.attention import kernels
from valkyrie.sharding import ambient
from valkyrie.training.setup import Setup


def kernel_results(
  setup: Setup,
) -> Iterator[tuple[Any, tuple[int, int, int], Callable[[bool], Any]]]:
  """The mixers that ask for kernels, what one device reads at once, and `kernels.results`."""
  blocks = language_model.asked(setup.settings.model, lambda model: model.blocks())
  about = setup.model.about
  row_parts = setup.partitioner.parts_of('batch')
  time_parts = setup.partitioner.parts_of('time')
  rows = setup.settings.batch_size // row_parts // setup.settings.micro_batches
  mixers = list(itertools.chain.from_iterable(block.mixers for block in blocks))
  times = {phase.chunk_size // time_parts for phase in setup.curriculum.phases}
  for time in sorted(times):
    for mixer in mixers:
      if getattr(mixer, 'kernels', None):
        shape = (rows, time, about.width)
        rebuild = functools.partial(dataclasses.replace, mixer)
        results = functools.partial(kernels.results, rebuild, shape, about.compute_dtype)
        yield mixer, shape, results


def agreeing_lengths(setup: Setup, say: Callable[[str], None], bound: float = 2**-6) -> set[int]:
  """The tokens of pieces on which kernels agree with the plain forms, for `Setup.with_kernels`.

  The norm of a difference may be `bound`, four units in the last place of bfloat16, to which TPUs
  round what they multiply. If a kernel is required, raises a Disagreement
  if the results differ, and a ConfigurationError if there is no kernel.
  """
  agreed = set()
  failed = set()
  norm = jnp.linalg.norm
  for mixer, (rows, time, _), results in kernel_results(setup):
    name = f'{type(mixer).__name__}.kernels'
    found = ''
    error = ConfigurationError
    automatic = None
    if not setup.partitioner.manual:
      automatic = setup.partitioner
    with ambient.within(partitioner=automatic):
      misfit = kernels.why_not(mixer.kernels, time)
    if not misfit:
      error = Disagreement
      try:
        compute_plain = jax.jit(functools.partial(results, False))
        compute_by_kernel = jax.jit(functools.partial(results, True))
        plain = compute_plain()
        kernel = compute_by_kernel()
        parts = jax.tree.map(lambda x, y: norm(x - y) / (norm(y) + 1e-30), kernel, plain)
        apart = float(jnp.max(jnp.stack(parts)))
      except Exception as failure:
        first, _, _ = reason_of(failure).partition('\n')
        misfit = f'it fails ({first})'
      else:
        found = f'{apart:.2g} of the norm from the plain form, on {rows} x {time:,} tokens'
        if apart > bound:
          misfit = f'{found}, more than {bound:.2g}'
    if misfit and mixer.kernels != 'prefer':
      raise error(f'{name}={mixer.kernels!r}: {misfit}. Set {name} = None.')
    if misfit:
      say(f'{name}: {misfit}: the plain form is used')
      failed.add(time)
    else:
      say(f'{name}: {found}')
      agreed.add(time)
  return agreed - failed
