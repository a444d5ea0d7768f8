"""The lines that a run has recorded, with the costs until each line."""

from collections.abc import Mapping
import os
import pathlib
from typing import Any, NamedTuple

import numpy as np

from valkyrie import foreign
from valkyrie.config.paths import TOKENIZER
from valkyrie.errors import ConfigurationError, is_there, storage_errors
from valkyrie.monitoring.json_lines import by_step
from valkyrie.monitoring.pictures import can_be_drawn

# What training until a line has cost: (field, its unit).
COSTS = (('tokens', 'tokens'), ('seconds', 'seconds of training'), ('flops', 'FLOPs of the model'))
Line = dict[str, Any]


class Run(NamedTuple):
  """What a run has recorded.

  lines, evaluations: of metrics.jsonl and eval/metrics.jsonl, with seconds and flops until then.
  refused: of refused_steps.jsonl.
  version, bindings: of Valkyrie, which wrote its configuration, and its {name: value}.
  about: the number of parameters, of model_info.txt.
  tokenizer: its files; none if the run reads bytes.
  data: the fingerprints of its validation data, which depend on the tokenizer; none if unknown.
  """

  name: str
  lines: list[Line]
  evaluations: list[Line]
  refused: list[Line]
  version: str
  bindings: Mapping[str, Any]
  about: str
  tokenizer: tuple[bytes, ...]
  data: tuple[bytes, ...]

  @property
  def tokens(self) -> tuple:
    """What the losses of two runs must share."""
    return self.tokenizer, self.data


def read_run(model_dir: str | os.PathLike) -> Run:
  """Reads the files of a run; raises a ValkyrieError if there are none, or one cannot be read."""
  folder = pathlib.Path(model_dir)
  if not is_there(folder / 'metrics.jsonl'):
    raise ConfigurationError(f'{model_dir} has no metrics.jsonl. Name a run that has taken steps.')
  lines = _lines(folder, 'metrics')
  evaluations = _lines(folder, 'eval/metrics')
  refused = _lines(folder, 'refused_steps')
  advice = 'Restore it from a copy, or leave the run out.'
  file = folder / 'config.json'
  with storage_errors(f'{file} cannot be read', advice, also=(ValueError,)):
    config: dict[str, Any] = {'bindings': {}}
    if file.exists():
      content = foreign.content(file)
      config = foreign.json_object(content, bindings=dict)
  file = folder / 'model_info.txt'
  with storage_errors(f'{file} cannot be read', advice, also=(ValueError,)):
    about = ''
    if file.exists():
      text = foreign.content(file).decode()
      about, _, _ = text.partition(' in ')
  with storage_errors(f'{folder} cannot be read', advice, also=(ValueError,)):
    tokenizer_files = sorted(folder.glob(f'{TOKENIZER}.*'))
    data_files = folder.glob('eval/data.json')
    tokenizer = tuple(map(foreign.content, tokenizer_files))
    data = tuple(map(foreign.content, data_files))
  lines = _with_costs(lines)
  evaluations = _located(evaluations, lines)
  absolute = folder.resolve()
  version = config.get('version', '')
  bindings = config['bindings']
  return Run(absolute.name, lines, evaluations, refused, version, bindings, about, tokenizer, data)


def _lines(folder: pathlib.Path, name: str) -> list[Line]:
  """The lines of a file of a run, one for each step."""
  lines = by_step(folder / f'{name}.jsonl')
  return list(lines.values())


def _with_costs(lines: list[Line]) -> list[Line]:
  """Lines of training with the seconds and FLOPs until then."""
  seconds = 0.0
  step = 0
  with_costs = []
  for line in lines:
    numbers = {name: value for name, value in line.items() if can_be_drawn(value)}
    steps = line['step'] - step
    seconds += numbers.get('step_seconds', 0.0) * steps
    step = line['step']
    speed = numbers.get('tokens_per_second_per_device')
    rate = numbers.get('tflops_per_second_per_device')
    flops = None
    if speed and rate:
      flops_of_token = 1e12 * rate / speed
      flops = flops_of_token * numbers.get('tokens', 0)
    with_costs.append({**line, 'seconds': seconds, 'flops': flops})
  return with_costs


def _located(evaluations: list[Line], lines: list[Line]) -> list[Line]:
  """Evaluations with the tokens, seconds and FLOPs until then, between two lines of training."""
  located = evaluations
  for axis, _ in COSTS:
    steps = [0]
    values = [0.0]
    for line in lines:
      if can_be_drawn(line.get(axis)):
        steps.append(line['step'])
        values.append(line[axis])
    if len(steps) == 1:
      continue
    with_axis = []
    for line in located:
      value = np.interp(line['step'], steps, values)
      with_axis.append({**line, axis: float(value)})
    located = with_axis
  return located
