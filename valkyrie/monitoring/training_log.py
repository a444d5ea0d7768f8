"""The log of the steps of training, read one step behind the devices, with what hooks return."""

from collections.abc import Callable, Iterable, Iterator, Mapping
import contextlib
import dataclasses
import time
from typing import Any, Protocol

import jax

from valkyrie.monitoring import chips, memory
from valkyrie.monitoring.metrics import Metrics, speed_metrics, text_metrics
from valkyrie.monitoring.writers import RunWriter
from valkyrie.training.reading import Reading
from valkyrie.training.setup import Setup
from valkyrie.training.train_step import StepMetrics


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
  only after the next step was dispatched, and then passes them to `check`. It writes a line every
  `every` steps, and after the last. Speeds are only of steps: what `untimed` surrounds is left out.
  `began` is when the process did.
  """

  writer: RunWriter
  setup: Setup
  reading: Reading
  _: dataclasses.KW_ONLY
  every: int
  total_steps: int
  check: Callable[[int, StepMetrics], None] = lambda step, metrics: None
  began: float = dataclasses.field(default_factory=time.perf_counter)

  def __post_init__(self):
    self._running: tuple[int, StepMetrics] | None = None
    self._steps: list[StepMetrics] = []  # that were read since the last line
    self._noted: dict[str, float | str] = {}
    self._timed: list[int] = []  # the steps since the last line that count for its speed
    self._seconds = self._all_seconds = 0.0  # that these took, and with the lines before
    self._since: float | None = None  # when the clock was read; None while it stands still

  def __call__(self, step: int, metrics: StepMetrics) -> None:
    """Takes the metrics of step `step`, counted from 1, directly after its dispatch."""
    self.flush()
    self._running = step, metrics
    if self._since is not None:
      self._timed.append(step)

  def call_hooks(self, hooks: Iterable[Hook], step: int, state: Any, metrics: Any) -> None:
    """Calls hooks, and adds their numbers and texts to the next line, as 'hooks/NAME'."""
    for hook in hooks:
      pauses = getattr(hook, 'pauses', lambda step: False)(step)
      with self.untimed() if pauses else contextlib.nullcontext():
        found = hook(step, state, metrics) or {}
      for name, value in found.items():
        self._noted[f'hooks/{name}'] = value if isinstance(value, str) else float(value)

  def clock(self, runs: bool) -> None:
    """Reads the clock; the time that follows counts for the speed if it `runs`."""
    now = time.perf_counter()
    self._seconds += 0.0 if self._since is None else now - self._since
    self._since = now if runs else None

  @contextlib.contextmanager
  def untimed(self) -> Iterator[None]:
    """Leaves what happens inside, steps too, out of the speed; waits for the steps before."""
    jax.block_until_ready((self._steps, self._running))
    ran = self._since is not None
    self.clock(runs=False)
    yield
    self.clock(runs=ran)

  def flush(self) -> None:
    """Reads the metrics of the last step, and writes a line if one is due; raises as `check`."""
    last, self._running = self._running, None
    if last is None:
      return
    step, metrics = last
    self._steps.append(metrics)
    if step % self.every == 0 or step == self.total_steps:
      self._write(step)
    self.check(step, metrics)

  def _write(self, step: int) -> None:
    steps, self._steps = jax.device_get(self._steps), []
    self.clock(runs=self._since is not None)
    seconds, self._seconds = self._seconds, 0.0
    timed, self._timed = self._timed, []
    self._all_seconds += seconds
    read, about = self.reading.tokens, self.setup.model.about

    def total(name: str) -> float:  # in float64: float32 counts only to 2^24
      return sum(float(getattr(s.sums, name)) for s in steps)

    weight, last = total('weight'), steps[-1]
    followed = text_metrics(total('followed'), weight, self.reading.feed.tokens_per_byte)
    if last.sums.loss is None:  # the objective predicts no tokens, so that its value is no loss
      followed = {'objective': followed['loss'], 'targets': followed['targets']}
    terms = {n: sum(float(s.sums.terms[n]) for s in steps) for n in last.sums.terms}
    scalars: Metrics = {
      'tokens': read(step),
      **self.reading.progress(step),
      **followed,
      'grad_norm': float(last.grad_norm),
      **{f'grad_norm/{part}': float(norm) for part, norm in last.part_norms.items()},
      'learning_rate': float(last.learning_rate),
      **{f'terms/{name}': value / max(weight, 1.0) for name, value in terms.items()},
      'beyond_window': total('beyond_window') / max(weight, 1.0),
      'goodput': self._all_seconds / (time.perf_counter() - self.began),
      'phase': self.reading.curriculum.index(step - 1),
      'skipped': int(last.skipped),
      'host_memory_peak': memory.host_peak(),
      'device_memory_peak': memory.device_peak(),
    }
    if timed:  # else the speed is unknown
      scalars |= speed_metrics(
        tokens=sum(read(number) - read(number - 1) for number in timed),
        steps=len(timed),
        seconds=seconds,
        devices=self.setup.partitioner.mesh.size,
        flops_per_token=about.train_flops_per_token,
        peak_flops=chips.peak_flops(jax.devices()[0].device_kind),
      )
    self.writer.write_scalars(step, {**scalars, **self._noted})
    if texts := {name: value for name, value in self._noted.items() if isinstance(value, str)}:
      self.writer.write_texts(step, texts)
    self._noted = {}
