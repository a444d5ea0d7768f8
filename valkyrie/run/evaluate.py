"""The run mode `eval`: a run's checkpoint on the whole validation split."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import pathlib
import re
import sys
import time
from typing import Any

import gin
import jax

from valkyrie.checkpoint.chosen_steps import record
from valkyrie.checkpoint.manager import LATEST
from valkyrie.checkpoint.steps import Steps, steps_of
from valkyrie.config.computation import may_change_on_resume
from valkyrie.config.ranges import NonNegativeInt
from valkyrie.errors import (
  ConfigurationError,
  StorageError,
  ValkyrieError,
  check_choice,
  is_there,
)
from valkyrie.models import language_model
from valkyrie.models.carry_cuts import CUTS
from valkyrie.models.language_model import LanguageModel
from valkyrie.monitoring import pictures
from valkyrie.monitoring.json_lines import by_step
from valkyrie.monitoring.metrics import Metrics
from valkyrie.monitoring.progress import describe
from valkyrie.monitoring.trackers import Tracker, Tracking
from valkyrie.monitoring.waiting import doing
from valkyrie.monitoring.watcher import Watcher
from valkyrie.monitoring.writers import create_writers
from valkyrie.run.evaluator import Evaluator
from valkyrie.sharding.partitioner import Partitioner
from valkyrie.training.objective import evaluations, terms_of
from valkyrie.training.setup import StepSettings
from valkyrie.weights.changed import changed_bindings, record_changes
from valkyrie.weights.restored import restored_params

# The bindings that name what is measured, and by what.
_MEASURED = ('evaluate.model', 'evaluate.evaluator', 'StepSettings.objective')
_OF_A_CUT = re.compile(f'(^|_)cut_({"|".join(CUTS)})$')
_PAUSE_SECONDS = 2.0  # between two looks of a follower


@may_change_on_resume()
@gin.configurable
def evaluate(
  model_dir: str,
  *,
  model: Callable[..., LanguageModel],
  partitioner: Callable[[], Partitioner],
  evaluator: Callable[..., Evaluator],
  settings: Callable[[], StepSettings] | None = None,
  last_step: NonNegativeInt,
  cuts: Sequence[str] = (),
  name: str = '',
  step: str = LATEST,
  follow: bool = False,
  trackers: Sequence[Tracker] = (),
) -> None:
  """Evaluates a run's checkpoint on the whole validation split; writes and prints metrics.

  Args:
    settings: the settings of the run, whose objective can have more to report; None without.
    last_step: the last step of the run, at which a follower ends.
    cuts: parts of the carry, 'state' or 'all'. For each, one more evaluation resets it before every
      chunk, and writes to model_dir/eval_cut_NAME.
    name: a name for data other than the run's own validation: metrics go to model_dir/eval_NAME and
      eval_NAME_cut_CUT, the picture to loss_by_position_NAME.png.
    step: the checkpoint, see `weights.restored`; the mean of several needs a `name`.
    follow: evaluate every checkpoint that has no evaluation yet, and those to come, as they are
      committed. Without a name, the metrics go to model_dir/eval_whole.
    trackers: receive the metrics, as a run of their own.

  Raises a ConfigurationError without such a step, or if metrics would mix with those of other data
  or bindings.
  """
  for cut in cuts:
    check_choice('evaluate.cuts', cut, CUTS)
  if not all(letter.isalnum() or letter in '._-' for letter in name):
    raise ConfigurationError(
      f'evaluate.name={name!r} is part of a file name. Use letters, digits, dots and dashes.'
    )
  if name == 'whole' or _OF_A_CUT.search(name):
    raise ConfigurationError(
      f'evaluate.name={name!r} names a folder that evaluations make themselves: eval_whole is for '
      '--follow, and eval_cut_... for evaluate.cuts. Use another name.'
    )
  if ',' in step and not name:
    raise ConfigurationError(
      f"--step={step} averages several checkpoints; its metrics would be mixed with the run's own. "
      'Give them a name of their own, such as --gin.evaluate.name=\'"mean"\'.'
    )
  is_named = bool(name)
  name = name or ('whole' if follow else '')
  stream = f'eval{name and "_"}{name}'
  mesh = partitioner()
  if _bound('open_run.first_carry') is not None:
    _say('warning: open_run.first_carry is not used: evaluations begin with the one of the run')
  terms = ()
  if settings:
    terms = evaluations(terms_of(settings().objective))
  with doing('opening the validation data', _say):
    measure = evaluator(language_model.transform(model), mesh, terms=terms)

  tracking = Tracking(trackers, model_dir, 0, _say, stream)

  def of_step(step: str) -> None:
    with doing('reading the checkpoint', _say):
      params, numbers = restored_params(measure.model, mesh, model_dir, measure.vocabulary, step)
    number = max(numbers)
    changed = changed_bindings(model_dir, step, _MEASURED)
    record_changes(model_dir, stream, changed, is_named=is_named)
    measure.record_data(model_dir, stream, may_differ=False)
    if cuts:
      changed = changed_bindings(model_dir, step, _MEASURED, is_cut=True)
    for cut in cuts:
      place = f'{stream}_cut_{cut}'
      record_changes(model_dir, place, changed, is_named=is_named)
      measure.record_data(model_dir, place, may_differ=False)
    for line in changed:
      _say(f'changed since the checkpoint: {line}')
    found = {}
    for cut in (None, *cuts):
      title = f'validation, {cut} carry cut between chunks'
      if cut is None:
        title = 'validation'
      with doing(f'evaluating step {number}', _say):
        metrics = measure(params, whole=True, cut=cut)
      found[title] = metrics
      place = f'{stream}_cut_{cut}'
      if cut is None:
        place = stream
      with create_writers(model_dir, name=place, also=[tracking.stream(place)]) as writer:
        writer.write_scalars(number, metrics)
      if jax.process_index() == 0:
        described = ', '.join(describe(metrics))
        print(f'step {number}, {title}: {described}', flush=True)
    if jax.process_index() == 0:
      _draw(pathlib.Path(model_dir), found, name)

  with contextlib.closing(tracking):
    if not follow:
      of_step(step)
      return
    steps = steps_of(model_dir)
    done = set(by_step(pathlib.Path(model_dir, stream, 'metrics.jsonl')))
    for number in _committed(model_dir, steps, done, last_step):
      try:
        of_step(str(number))
      except ValkyrieError:
        if number in steps.find():
          raise
        print(f'step {number} was deleted before it was read (Checkpoints.keep)', file=sys.stderr)


def _say(line: str) -> None:
  if jax.process_index() == 0:
    print(line, file=sys.stderr, flush=True)


def _bound(name: str) -> Any:
  """The value of a binding; None without one."""
  with contextlib.suppress(ValueError):
    return gin.query_parameter(name)
  return None


def _draw(model_dir: pathlib.Path, found: Mapping[str, Metrics], name: str) -> None:
  """Draws the picture, which only shows what has been written: without it the evaluation stands."""
  watcher = Watcher('the picture', lambda text: print(text, file=sys.stderr))
  watcher.call('draw', pictures.write_loss_by_position, model_dir, found, name)
  watcher.close()


def _committed(model_dir: str, steps: Steps, done: set[int], last: int) -> Iterator[int]:
  """Yields the steps that are not done, as they appear, until the run has ended.

  Raises a StorageError if the directory of the run is no longer there.
  """
  while True:
    found = steps.find()
    if not found and not is_there(model_dir):
      raise StorageError(
        f'{model_dir} is no longer there, so that no checkpoint can appear. If the run was moved, '
        'follow it by its new path.'
      )
    for number in found:
      if number not in done:
        done.add(number)
        yield number
    with contextlib.suppress(StorageError):  # the newest was deleted meanwhile
      if found and (found[-1] >= last or record(steps, found[-1]).get('stopped')):
        return
    time.sleep(_PAUSE_SECONDS)
