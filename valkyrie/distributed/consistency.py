"""Whether the processes of a run were told the same, and read the same."""

from collections.abc import Mapping, Sequence
import hashlib
import json
from typing import Any

import gin

from valkyrie.config.computation import may_change_on_resume
from valkyrie.data.feed import TaskFeed
from valkyrie.distributed import processes
from valkyrie.errors import ConfigurationError, DataError
from valkyrie.types import Batch


def agree_on_bindings(bindings: Mapping[str, Any]) -> None:
  """Compares the gin bindings of all processes.

  Raises:
    ConfigurationError: in all processes, naming what differs.
  """
  first, *others = [json.loads(t) for t in processes.exchange('bindings', json.dumps(bindings))]
  for process, told in enumerate(others, 1):
    differences = [
      f'  {name} = {told.get(name)!r}, which is {first.get(name)!r} in process 0'
      for name in sorted({*first, *told})
      if first.get(name) != told.get(name)
    ]
    if differences:
      raise ConfigurationError(
        f'Process {process} was not told what process 0 was:\n' + '\n'.join(differences) + '\n'
        'Start all processes of a run with the same gin files and flags.'
      )


@may_change_on_resume()
@gin.configurable
class Agreement:
  """Compares hashes of what stands in each row, every so many steps; one process has nothing to do.

  Then each process also reads the rows of the next one, and what two of them find in a row must be
  the same. So a store that differs on one host is found out, and named.
  """

  def __init__(self, feed: TaskFeed, rows: Sequence[int], every: int = 100):
    """Takes the feed, the rows that this process reads, and the steps from one look to the next."""
    if every < 1:
      raise ConfigurationError(f'Agreement.every={every} is not a number of steps; give 1 or more.')
    self._feed = feed
    self._every = every
    held = [json.loads(text) for text in processes.exchange('rows', json.dumps(list(rows)))]
    self._rows = list(rows)
    self._alone = len(held) == 1
    others = held[(held.index(self._rows) + 1) % len(held)]
    self._others = [row for row in others if row not in self._rows]

  def __call__(self, step: int, position: int, batch: Batch) -> None:
    """Looks at the batch of a step, whose first token is each row's token number `position`.

    Raises:
      DataError: in all processes, where two of them differ.
    """
    if self._alone or step % self._every:
      return
    hashes = _hashes(self._rows, batch)
    if self._others:
      length = batch.inputs.shape[1]
      hashes |= _hashes(self._others, self._feed.read(position, length, self._others))
    told = processes.exchange('tokens', json.dumps({'step': step, 'rows': hashes}))
    seen: dict[str, tuple[int, str]] = {}
    for process, found in enumerate(map(json.loads, told)):
      if found['step'] != step:
        raise DataError(
          f'Process {process} is at step {found["step"]} while another is at {step}: they do not '
          'run the same command. Stop all of them, and start them with one.'
        )
      for row, digest in found['rows'].items():
        first, expected = seen.setdefault(row, (process, digest))
        if digest != expected:
          raise DataError(
            f'In step {step}, processes {first} and {process} read different tokens in row {row}, '
            f'of {self._feed.describe(position, batch.inputs.shape[1])}. The token stores of their '
            'hosts differ, or one is damaged: copy one to all of them.'
          )


def _hashes(rows: Sequence[int], batch: Batch) -> dict[str, str]:
  """{row: hash of all that a batch holds of it}; JSON has no other names than texts."""
  return {
    str(row): hashlib.sha256(b''.join(leaf[number].tobytes() for leaf in batch)).hexdigest()
    for number, row in enumerate(rows)
  }
