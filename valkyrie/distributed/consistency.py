"""Checks that all processes of a run have the same bindings, programs and tokens."""

from collections.abc import Mapping, Sequence
import hashlib
import re
from typing import Any

import gin
from jax.stages import Compiled

from valkyrie.config.computation import may_change_on_resume
from valkyrie.config.ranges import PositiveInt, checked
from valkyrie.distributed import processes
from valkyrie.errors import ConfigurationError, DataError
from valkyrie.types import Batch, TaskFeed

# The program's own lines in the compiler's text. Tables of source lines stand above them, and each
# line may end with metadata.
_PROGRAM = re.compile(r'^(?:HloModule|ENTRY|%|  |\})')
_METADATA = re.compile(r', metadata=\{(?:"[^"]*"|[^{}"])*\}')


def check_same_bindings(bindings: Mapping[str, Any]) -> None:
  """Raises a ConfigurationError in all processes, with the bindings in which two differ."""
  first, *others = processes.exchange('bindings', bindings)
  for process, found in enumerate(others, 1):
    differences = []
    for name in sorted({*first, *found}):
      value = found.get(name)
      first_value = first.get(name)
      if value != first_value:
        differences.append(f'  {name} = {value!r}, but {first_value!r} in process 0')
    if differences:
      raise ConfigurationError(
        f'The gin bindings of process {process} differ from process 0:\n'
        + '\n'.join(differences)
        + '\nStart all processes of a run with the same gin files and flags.'
      )


def fingerprint(compiled: Compiled) -> str:
  """A hash of the optimized program without source lines: equal hashes mean equal results."""
  lines = (compiled.as_text() or '').splitlines()
  program = (_METADATA.sub('', line) + '\n' for line in lines if _PROGRAM.match(line))
  return hashlib.sha256(''.join(program).encode()).hexdigest()


def is_autotuned(devices: Sequence[Any]) -> bool:
  """Whether XLA may compile differently each time: on GPUs (openxla.org/xla/determinism)."""
  return devices[0].platform == 'gpu'


def fingerprints(programs: Mapping[str, Compiled]) -> dict[str, str]:
  """{name: fingerprint}; raises a ConfigurationError if two processes have different programs."""
  hashes = {name: fingerprint(program) for name, program in programs.items()}
  of_processes = processes.exchange('executable', hashes)
  for process, other in enumerate(of_processes):
    if other != of_processes[0]:
      raise ConfigurationError(
        f'Processes 0 and {process} have compiled different programs from the same bindings. Use '
        'the same packages, XLA_FLAGS and kind of device on all hosts.'
      )
  return hashes


@may_change_on_resume()
@gin.configurable
class TokenConsistency:
  """Compares hashes of the tokens of each row between processes; finds a differing token store.

  In every `every`-th step each process, which reads the rows numbered `rows`, also reads the
  rows of the next process, so that each row is read twice. A run of one process compares nothing.
  """

  @checked
  def __init__(self, feed: TaskFeed, rows: Sequence[int], every: PositiveInt = 100):
    self._feed = feed
    self._every = every
    self._rows = list(rows)
    rows_of = processes.exchange('rows', self._rows)
    self._is_alone = len(rows_of) == 1
    next_place = (rows_of.index(self._rows) + 1) % len(rows_of)
    rows_of_next = rows_of[next_place]
    self._others = [row for row in rows_of_next if row not in self._rows]

  def __call__(self, step: int, position: int, batch: Batch) -> None:
    """Compares the batch of a step, which begins at token `position` of each row.

    Raises a DataError in all processes if two have read different tokens.
    """
    if self._is_alone or step % self._every:
      return
    hashes = _hashes(self._rows, batch)
    if self._others:
      length = batch.inputs.shape[1]
      batch_of_others = self._feed.read(position, length, self._others)
      hashes |= _hashes(self._others, batch_of_others)
    seen: dict[str, tuple[int, str]] = {}
    exchanged = processes.exchange('tokens', {'step': step, 'rows': hashes})
    for process, found in enumerate(exchanged):
      if found['step'] != step:
        raise DataError(
          f'Process {process} is at step {found["step"]}, but another process is at step {step}: '
          'they do not run the same command. Stop all processes, and start them with one command.'
        )
      for row, digest in found['rows'].items():
        first, expected = seen.setdefault(row, (process, digest))
        if digest != expected:
          raise DataError(
            f'In step {step}, processes {first} and {process} read different tokens in row {row}, '
            f'of {self._feed.describe(position, batch.inputs.shape[1])}. The token stores of their '
            'hosts differ, or one is damaged. Copy one store to all hosts.'
          )


def _hashes(rows: Sequence[int], batch: Batch) -> dict[str, str]:
  """{row: hash of the row in all leaves}; the keys are strings, as in JSON."""
  hashes = {}
  for number, row in enumerate(rows):
    rows_of_leaves = [leaf[number].tobytes() for leaf in batch]
    content = b''.join(rows_of_leaves)
    hashes[str(row)] = hashlib.sha256(content).hexdigest()
  return hashes
