"""The log of the steps of training, read one step behind the devices, with what hooks return."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import time
from typing import Any, Protocol

import jax

from valkyrie.monitoring import chips, hook_values, memory
from valkyrie.monitoring.log_schedule import LogSchedule, is_due
from valkyrie.monitoring.metrics import Metrics, speed_metrics, step_time_metrics, text_metrics
from valkyrie.monitoring.writers import RunWriter
from valkyrie.training.reading import Reading
from valkyrie.training.setup import Setup
from valkyrie.training.train_step import StepMetrics

_MOST_SAID = 20  # lines about what hooks returned


class Hook(Protocol):
  """An action after a step. `step` counts completed steps: it is 1 after the first one."""

  def __call__(self, step: int, state: Any, metrics: Any) -> Mapping[str, float | str] | None:
    """Reads the state and metrics of a step from the devices, and changes neither.

    The numbers and texts that it returns are logged with the next line of training, as
    'hooks/NAME'. If a hook has the method `pauses(step)`, the speed leaves out the calls for which
    it returns True.
    """


@dataclasses.dataclass
class TrainingLog:
  """Averages the metrics of steps, and writes them while a later step is running.

  Reading a number from a device waits for the device. The log therefore reads the metrics of a step
  only after the next step was dispatched, and then passes them to `check`. It writes a line when
  `every` says so, and after the last. Speeds count steps only: the time inside `untimed` is left
  out. `began` is the time at which the process began.
  """

  writer: RunWriter
  setup: Setup
  reading: Reading
  _: dataclasses.KW_ONLY
  every: LogSchedule
  total_steps: int
  check: Callable[[int, StepMetrics], None] = lambda step, metrics: None
  began: float = dataclasses.field(default_factory=time.perf_counter)
  say: Callable[[str], None] = lambda text: None

  def __post_init__(self):
    self._said: set[str] = set()
    self._ended_at: float | None = None  # when the running step had ended, if its dispatch waited
    self._running: tuple[int, StepMetrics] | None = None
    self._steps: list[StepMetrics] = []  # read since the last line
    self._noted: dict[str, float | str] = {}
    self._timed: dict[int, float] = {}  # the seconds of the steps that count for the next line
    self._seconds = 0.0  # their time, and the running step's so far
    self._all_seconds = 0.0  # the time of all steps before
    self._since: float | None = None  # when the clock was read; None while it stands still

  def __call__(self, step: int, metrics: StepMetrics) -> None:
    """Takes the metrics of step `step`, counted from 1, directly after its dispatch."""
    ended_at = None
    if _is_ready(metrics):
      ended_at = time.perf_counter()
    if ended_at is not None and self._ended_at is None and self._since is not None:
      self._ended_at = (self._since + ended_at) / 2  # both steps have ended since then
    self.flush()
    self._running = (step, metrics)
    self._ended_at = ended_at
    if self._since is not None:
      self._timed[step] = 0.0

  def call_hooks(
    self,
    hooks: Iterable[Hook],
    step: int,
    state: Any,
    metrics: Any,
  ) -> None:
    """Calls hooks, and adds their numbers and texts to the next line, as 'hooks/NAME'."""
    for hook in hooks:
      pauses_at = getattr(hook, 'pauses', None)
      timing = contextlib.nullcontext()
      if pauses_at is not None and pauses_at(step):
        timing = self.untimed()
      with timing:
        values = hook(step, state, metrics)
      if values is not None:
        noted, refused = hook_values.read_values(values)
        for name, value in noted.items():
          self._noted[f'hooks/{name}'] = value
        self._say_once(hook, refused)

  def _say_once(self, hook: Hook, refused: Sequence[str]) -> None:
    """Says which results of a hook cannot be logged, each once."""
    for text in refused:
      line = f'warning: the hook {type(hook).__name__} returned {text}'
      is_new = line not in self._said
      if is_new and len(self._said) < _MOST_SAID:
        self._said.add(line)
        self.say(line)

  def clock(self, runs: bool) -> None:
    """Reads the clock; the time that follows counts for the speed if it `runs`."""
    time_now = time.perf_counter()
    if self._since is not None:
      self._seconds += time_now - self._since
    self._since = None
    if runs:
      self._since = time_now

  def _read_clock(self) -> None:
    """Reads the clock at the end of the last step.

    The dispatch of a step may wait until the step has ended, as on CPUs: the time after that
    belongs to the next step, although this log reads the older step only then.
    """
    if self._since is None:
      return
    end = self._ended_at
    if end is None:
      end = time.perf_counter()
    end = max(end, self._since)  # the clock stood still since then
    self._seconds += end - self._since
    self._since = end

  @contextlib.contextmanager
  def untimed(self) -> Iterator[None]:
    """Leaves the time inside, with any steps, out of the speed; waits for the steps before."""
    jax.block_until_ready((self._steps, self._running))
    ran = self._since is not None
    self.clock(runs=False)
    yield
    self.clock(runs=ran)

  def flush(self) -> None:
    """Reads the metrics of the last step, and writes a line if one is due; raises as `check`."""
    running = self._running
    self._running = None
    if running is None:
      return
    step, metrics = running
    self._steps.append(metrics)
    jax.block_until_ready(metrics)
    self._read_clock()
    if step in self._timed:
      before = sum(self._timed.values())
      self._timed[step] = self._seconds - before
    is_last = step == self.total_steps
    if is_last or is_due(self.every, step):
      self._write(step)
    self.check(step, metrics)

  def _write(self, step: int) -> None:
    steps: list[StepMetrics] = jax.device_get(self._steps)
    self._steps = []
    self._all_seconds += self._seconds
    scalars: dict[str, Any] = {'tokens': self.reading.tokens(step)}
    scalars |= self.reading.progress(step)
    scalars |= self._losses(steps)
    seconds_since_start = time.perf_counter() - self.began
    scalars['goodput'] = self._all_seconds / seconds_since_start
    scalars['phase'] = self.reading.curriculum.index(step - 1)
    scalars['skipped'] = int(steps[-1].skipped)
    scalars |= memory.peaks()
    scalars |= self._speeds()
    self._seconds = 0.0
    self._timed = {}
    scalars |= self._noted
    self.writer.write_scalars(step, scalars)
    texts = {}
    for name, value in self._noted.items():
      if isinstance(value, str):
        texts[name] = value
    if texts:
      self.writer.write_texts(step, texts)
    self._noted = {}

  def _losses(self, steps: Sequence[StepMetrics]) -> Metrics:
    """The losses of steps, and gradients and rates of the last one."""

    def total(name: str) -> float:  # in float64: float32 counts only to 2^24
      values = [float(getattr(step.sums, name)) for step in steps]
      return sum(values)

    last = steps[-1]
    weight = total('weight')
    followed = total('followed')
    tokens_per_byte = self.reading.feed.tokens_per_byte
    metrics = text_metrics(followed, weight, tokens_per_byte)
    if last.sums.loss is None:  # the objective predicts no tokens, so its value is not a loss
      metrics = {'objective': metrics['loss'], 'targets': metrics['targets']}
    metrics['grad_norm'] = float(last.grad_norm)
    for part, norm in last.part_norms.items():
      metrics[f'grad_norm/{part}'] = float(norm)
    metrics['learning_rate'] = float(last.learning_rate)
    known_weight = max(weight, 1.0)
    for name in last.sums.terms:
      values = [float(step.sums.terms[name]) for step in steps]
      metrics[f'terms/{name}'] = sum(values) / known_weight
    beyond_window = total('beyond_window')
    metrics['beyond_window'] = beyond_window / known_weight
    return metrics

  def _speeds(self) -> Metrics:
    """The speed of the steps since the last line; {} if it is unknown."""
    if not self._timed or self._seconds <= 0:
      return {}
    tokens_until = self.reading.tokens
    tokens = 0
    for number in self._timed:
      tokens += tokens_until(number) - tokens_until(number - 1)
    speeds = speed_metrics(
      tokens=tokens,
      steps=len(self._timed),
      seconds=self._seconds,
      devices=self.setup.partitioner.mesh.size,
      flops_per_token=self.setup.model.about.train_flops_per_token,
      peak_flops=chips.peak_flops(jax.devices()[0].device_kind),
    )
    return speeds | step_time_metrics(self._timed)


def _is_ready(metrics: StepMetrics) -> bool:
  """Whether a step has ended; False for values that are not jax arrays."""
  leaves: list[Any] = jax.tree.leaves(metrics)
  are_arrays = [isinstance(leaf, jax.Array) for leaf in leaves]
  if not all(are_arrays):
    return False
  return all(leaf.is_ready() for leaf in leaves)
