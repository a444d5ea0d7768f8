"""Fingerprints of compiled programs: equal programs compute equal bits."""

from collections.abc import Mapping, Sequence
import hashlib
import json
import re
from typing import Any

from jax.stages import Compiled

from valkyrie.distributed import processes
from valkyrie.errors import ConfigurationError

# The lines of the compiler's text that are the program: tables of source lines stand above them,
# and each line may end with metadata.
_PROGRAM = re.compile(r'^(?:HloModule|ENTRY|%|  |\})')
_METADATA = re.compile(r', metadata=\{(?:"[^"]*"|[^{}"])*\}')


def fingerprint(compiled: Compiled) -> str:
  """A hash of the optimized program, independent of its source lines."""
  lines = (compiled.as_text() or '').splitlines()
  program = (_METADATA.sub('', line) + '\n' for line in lines if _PROGRAM.match(line))
  return hashlib.sha256(''.join(program).encode()).hexdigest()


def is_autotuned(devices: Sequence[Any]) -> bool:
  """Whether the compiler times kernels and takes the fastest: each compilation may differ then.

  XLA does so on GPUs (https://openxla.org/xla/determinism).
  """
  return devices[0].platform == 'gpu'


def fingerprints(programs: Mapping[str, Compiled]) -> dict[str, str]:
  """{name: fingerprint}, which must be the same in all processes.

  Raises:
    ConfigurationError: with the numbers of two processes that have compiled different programs.
  """
  found = {name: fingerprint(program) for name, program in programs.items()}
  for process, text in enumerate(texts := processes.exchange('executable', json.dumps(found))):
    if text != texts[0]:
      raise ConfigurationError(
        f'Processes 0 and {process} have compiled different programs from the same bindings. Use '
        'the same packages, XLA_FLAGS and kind of device on all hosts.'
      )
  return found
