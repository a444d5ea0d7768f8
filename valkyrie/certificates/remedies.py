"""What helps where a step needs more memory than there is: each change is compiled, not guessed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from valkyrie.certificates.report import gib
from valkyrie.config import paths
from valkyrie.config.load import override_gin
from valkyrie.config.parse import FLAG
from valkyrie.config.record import bindings
from valkyrie.errors import ConfigurationError
from valkyrie.sharding.partitioner import Partitioner

_PARTS = (2, 4, 8, 16)  # of a chunk that is too long


class Change(NamedTuple):
  """Gin files and flags to lay over the run's."""

  files: Sequence[str] = ()
  flags: Sequence[str] = ()

  def __str__(self) -> str:
    return ' '.join([*(f'--gin_file={file}' for file in self.files), *self.flags])


def advice(
  worst: Mapping[str, Any],
  layouts: Sequence[str] | None,
  ask: Callable[[], Mapping[str, Any]],
  partitioner: Callable[[], Partitioner],
) -> str:
  """What was too large, and what each change to the command makes of it.

  Args:
    worst: the certificate of the step that needs most.
    layouts: gin files of partitioners to try; None takes all of gin/partition that can serve.
    ask: the certificate of the same step under the bindings of the moment.
    partitioner: the layout under the bindings of the moment.
  """
  needs = gib(worst['total_bytes']) if worst['total_bytes'] else 'more'
  lines = [
    f'Phase {worst["phase"]} needs {needs} of a device that has {gib(worst["hbm_bytes"])}. '
    'Tried, each compiled:'
  ]
  tried = []
  for knob in _knobs(worst, layouts):
    for change, found in _turned(knob, ask, partitioner):
      lines.append(f'  {change}: {_told(found)}')
      print(lines[-1].strip(), flush=True)
      tried.append((change, found))
  return '\n'.join([*lines, best(tried, worst)])


def best(tried: Sequence[tuple[Change, Mapping[str, Any]]], before: Mapping[str, Any]) -> str:
  """The change to make: the fastest of those that fit, else the one that needs least."""
  fitting = [
    (found.get('estimated_tokens_per_second_per_chip', 0.0), -found['total_bytes'], str(change))
    for change, found in tried
    if found['fits']
  ]
  if fitting:
    return f'What helps most: add {max(fitting)[-1]}'
  less = [
    (found['total_bytes'], str(change))
    for change, found in tried
    if found['total_bytes'] and found['total_bytes'] < (before['total_bytes'] or float('inf'))
  ]
  if less:
    size, change = min(less)
    return f'None is enough alone. What helps most: add {change}, which leaves {gib(size)}'
  return 'None helps. Take a smaller model, or more chips.'


def _turned(
  knob: Sequence[Change],
  ask: Callable[[], Mapping[str, Any]],
  partitioner: Callable[[], Partitioner],
) -> Iterator[tuple[Change, Mapping[str, Any]]]:
  """Each change of a knob with what came of it, up to the first that fits."""
  before = _run(partitioner())
  for change in knob:
    try:
      with override_gin(change.files, change.flags):
        if _run(partitioner()) == before:
          continue  # nothing is changed: the layout is the same
        found = ask()
    except ConfigurationError as error:
      refused = str(error).partition('\n')[0]
      found = {'fits': False, 'total_bytes': None, 'not_possible': refused}
    yield change, found
    if found['fits']:
      return


def _run(layout: Partitioner) -> tuple[Any, ...]:
  """What the bindings of the moment come to; those of a layout may be written in several ways."""
  others = {
    name: value for name, value in bindings().items() if not name.startswith('Partitioner.')
  }
  if layout.mesh.size == 1:
    return (others,)
  rules = {logical: layout.axes_of(logical) for logical in layout.axis_rules}
  return others, dict(layout.mesh.shape), rules, layout.local


def _told(found: Mapping[str, Any]) -> str:
  if 'not_possible' in found:
    return f'not possible: {found["not_possible"]}'
  size = gib(found['total_bytes']) if found['total_bytes'] else 'more than there is'
  speed = found.get('estimated_tokens_per_second_per_chip')
  by_estimate = f', {speed:,.0f} tokens/s a chip by estimate' if speed else ''
  return f'{size}, {"fits" if found["fits"] else "does not fit"}{by_estimate}'


def _knobs(worst: Mapping[str, Any], layouts: Sequence[str] | None) -> list[list[Change]]:
  """The changes of each knob, from a small turn to a large one."""
  knobs = [
    [_shorter(worst, parts) for parts in _PARTS if worst['chunk_size'] % parts == 0],
    [Change(flags=[f"{FLAG}LanguageModel.remat='nothing'"])],
  ]
  if worst['rows'] > 1:
    knobs.append([Change(flags=[f'{FLAG}batch_size={worst["rows"] // 2}'])])
  if layouts is None:
    known = sorted(path.stem for path in (paths.GIN / 'partition').glob('*.gin'))
    layouts = [f'gin/partition/{name}.gin' for name in known if name not in ('axes', 'single')]
  return knobs + [[Change(files=[layout])] for layout in layouts]


def _shorter(worst: Mapping[str, Any], parts: int) -> Change:
  """Chunks of a part of their size, and as many more."""
  sizes = {
    'chunk_size': worst['chunk_size'] // parts,
    'chunks': parts * worst['chunks'],
    'backprop_chunks': parts * worst['backprop_chunks'],
  }
  return Change(flags=[f'{FLAG}{name}={value}' for name, value in sizes.items()])
