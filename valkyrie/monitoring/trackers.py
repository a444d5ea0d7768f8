"""Trackers, which send the numbers of a run to services such as Weights & Biases and Trackio."""

from collections.abc import Callable, Mapping, Sequence
import importlib
import os
import pathlib
from typing import Any, NamedTuple, Protocol
import uuid

import gin
import jax

from valkyrie import foreign, packages
from valkyrie.config.computation import may_change_on_resume
from valkyrie.config.record import bindings
from valkyrie.errors import ConfigurationError, StorageError, converted, storage_errors
from valkyrie.monitoring.watcher import Watcher
from valkyrie.storage import foreign_names, whole_file

Numbers = Mapping[str, Any]


class Run(NamedTuple):
  """What a tracker is told about a run.

  id: a name that stays the same when the run is resumed.
  step: the number of steps done by earlier processes.
  configuration: the gin bindings, without secrets.
  stream: of evaluations in a process of their own, such as 'eval_whole'; '' for training. They are
    another run in a service, since two processes cannot write to one.
  """

  model_dir: str
  id: str
  step: int
  configuration: Mapping[str, Any]
  stream: str = ''


class Tracker(Protocol):
  """Receives the numbers of a run, in order, in a thread of process 0.

  The run waits for it only at its end: for a minute for a call that does not return.
  """

  def start(self, run: Run) -> None:
    """Called once, before the first step of this process."""

  def write(self, stream: str, step: int, numbers: Numbers) -> None:
    """Called with the numbers of a step of training, 'train', or of an evaluation, such as 'eval'.

    A resumed run repeats the steps since the last checkpoint.
    """

  def end(self) -> None:
    """Called once, however the run ends."""


class Tracking:
  """Calls trackers in process 0, each in a thread, so that none delays or ends a run.

  A tracker that fails, or does not return at the end, is reported and left out.
  """

  def __init__(
    self,
    trackers: Sequence[Tracker],
    model_dir: str | os.PathLike,
    step: int,
    say: Callable[[str], None],
    stream: str = '',
  ):
    """Starts the trackers of a process that trains, or that evaluates for a stream."""
    active = []
    if jax.process_index() == 0:
      active = list(trackers)
    watchers = []
    for tracker in active:
      name = f'the tracker {type(tracker).__name__}'
      watcher = Watcher(name, say, leaves_after_an_error=True)
      watchers.append(watcher)
    self._watched = list(zip(active, watchers, strict=True))
    if active:
      identity = _id(pathlib.Path(model_dir), say)
      if stream:
        identity = f'{identity}-{stream}'
      run = Run(os.fspath(model_dir), identity, step, bindings(), stream)
      self._call('start', run)

  def stream(self, name: str) -> Callable[[int, Numbers], None]:
    """Returns a function that passes numbers on as this stream."""
    return lambda step, numbers: self._call('write', name, step, dict(numbers))

  def close(self) -> None:
    """Ends the trackers, and waits for them as `Watcher.close` does."""
    self._call('end')
    for _, watcher in self._watched:
      watcher.close()

  def _call(self, method: str, *arguments: Any) -> None:
    for tracker, watcher in self._watched:
      watcher.call(method, getattr(tracker, method), *arguments)


def _id(model_dir: pathlib.Path, say: Callable[[str], None] = print) -> str:
  """The content of model_dir/tracking_id, which is created once."""
  file = model_dir / 'tracking_id'
  advice = 'Move it away, or pass another --model_dir.'
  with storage_errors(f'{file} cannot be used', advice, also=(ValueError,)):
    if not file.exists():
      new = uuid.uuid4().hex
      try:
        whole_file.write(file, new)
      except StorageError as error:
        say(f'warning: trackers will show the next start as another run: {error}')
        return new
    advice = 'Delete this file: the tracker then begins another run.'
    found = foreign.content(file).decode(errors='replace').strip()
    return foreign_names.checked(found, file, advice)


class _Client:
  """A tracker that calls a package with the functions of wandb."""

  def __init__(self, package: str, **options: str | None):
    lacks = f'train.trackers needs the package {package}, which this Python does not have'
    advice = f'Install it: {packages.install(package)}'
    with converted((ImportError,), ConfigurationError, lacks, advice):
      self._package: Any = importlib.import_module(package)
    self._options = options

  def _init(self, run: Run, **options: Any) -> None:
    """Begins or resumes the run, which is by default named after its directory."""
    folder_name = os.path.basename(os.path.abspath(run.model_dir))
    name = self._options['name'] or folder_name
    if run.stream:
      name = f'{name} {run.stream}'
    options |= {**self._options, 'name': name, 'resume': 'allow'}
    configuration = dict(run.configuration)
    self._run = self._package.init(**options, config=configuration)

  def end(self) -> None:
    self._run.finish()


@may_change_on_resume()
@gin.configurable
class WeightsAndBiases(_Client):
  """A tracker that writes to Weights & Biases; needs the package wandb."""

  def __init__(
    self,
    project: str,
    name: str | None = None,
    entity: str | None = None,
    mode: str | None = None,
  ):
    """Takes arguments of wandb.init; if `name` is None, the run is named after its directory.

    `mode` is 'online', 'offline' or 'disabled'; None lets wandb decide.
    """
    super().__init__('wandb', name=name, project=project, entity=entity, mode=mode)

  def start(self, run: Run) -> None:
    self._init(run, id=run.id, dir=run.model_dir)
    # A resumed run repeats steps, which wandb's own counter would refuse.
    self._run.define_metric('*', step_metric='step')

  def write(self, stream: str, step: int, numbers: Numbers) -> None:
    tagged = {f'{stream}/{name}': number for name, number in numbers.items()}
    self._run.log({'step': step, **tagged})


@may_change_on_resume()
@gin.configurable
class Trackio(_Client):
  """A tracker that writes to Trackio, on this machine or in a Space; needs the package trackio."""

  def __init__(self, project: str, name: str | None = None, space_id: str | None = None):
    """Takes arguments of trackio.init; if `name` is None, the run is named after its directory."""
    super().__init__('trackio', name=name, project=project, space_id=space_id)

  def start(self, run: Run) -> None:
    self._init(run, embed=False)

  def write(self, stream: str, step: int, numbers: Numbers) -> None:
    tagged = {f'{stream}/{name}': number for name, number in numbers.items()}
    self._run.log(tagged, step=step)
