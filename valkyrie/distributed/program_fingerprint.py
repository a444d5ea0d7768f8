"""Which programs a run was compiled to: the same program computes the same bits."""

from collections.abc import Sequence
import hashlib
import json
import re

import jax
from jax.stages import Compiled

from valkyrie.distributed import processes
from valkyrie.errors import ConfigurationError
from valkyrie.training.curriculum import Phase

# Of the compiler's text, the program; tables of source lines stand above it, and metadata in it.
_PROGRAM = re.compile(r'^(?:HloModule|ENTRY|%|  |\})')
_METADATA = re.compile(r', metadata=\{(?:"[^"]*"|[^{}"])*\}')


def fingerprint(compiled: Compiled) -> str:
  """A hash of the optimised program, whatever the lines of the source that it came from."""
  lines = (line for line in (compiled.as_text() or '').splitlines() if _PROGRAM.match(line))
  digest = hashlib.sha256()
  for line in lines:
    digest.update(_METADATA.sub('', line).encode() + b'\n')
  return digest.hexdigest()


def fingerprints(
  steps: Sequence[Compiled], phases: Sequence[Phase], train_steps: int, donated: bool
) -> dict[str, str]:
  """{what a step does, and for whom: its fingerprint}, which all processes must have in common.

  The name holds what may change in a run and changes the program: the end of the learning rate's
  schedule, among how many processes the devices are divided, and whether a state is `donated`.

  Raises:
    ConfigurationError: naming two processes that have compiled different programs.
  """
  among = f'of {train_steps} steps, {jax.process_count()} processes'
  among += '' if donated else ', each state kept'
  found = {
    f'{phase.chunks} x {phase.chunk_size} tokens a row, gradient through {phase.backprop_chunks}, '
    f'planner {phase.planner}, {among}': fingerprint(step)
    for step, phase in zip(steps, phases, strict=True)
  }
  told = processes.exchange('executable', json.dumps(found))
  for process, text in enumerate(told):
    if text != told[0]:
      raise ConfigurationError(
        f'Processes 0 and {process} have compiled different programs from the same bindings. Give '
        'all hosts the same packages, XLA_FLAGS and kind of device.'
      )
  return found
