"""Logs of the steps of training, which are read one step behind the devices."""

from collections.abc import Callable, Mapping
import contextlib
import dataclasses
import os
import pathlib
import time

import jax

from valkyrie.models.language_model import Model
from valkyrie.monitoring import chips, memory
from valkyrie.monitoring.hooks import check_every
from valkyrie.monitoring.json_lines import JsonLines
from valkyrie.monitoring.metrics import Metrics, speed_metrics, text_metrics
from valkyrie.monitoring.writers import RunWriter
from valkyrie.training.reading import Reading
from valkyrie.training.train_step import StepMetrics


@dataclasses.dataclass
class TrainingLog:
  """Averages the metrics of steps, and writes them while a later step is running.

  Reading a number from a device waits for the device. The log therefore reads the metrics of a step
  only after the next step was dispatched, and the devices never wait for the log. There are `every`
  steps between two lines; the last step has one too.
  """

  writer: RunWriter
  model: Model
  reading: Reading
  _: dataclasses.KW_ONLY
  every: int
  total_steps: int

  def __post_init__(self):
    check_every(self.every)
    self._steps: list[StepMetrics] = []
    self._due: int | None = None
    self._noted: dict[str, float | str] = {}
    self._since = time.perf_counter()

  def __call__(self, step: int, metrics: StepMetrics) -> None:
    """Takes the metrics of step `step`, counted from 1, directly after its dispatch."""
    self.flush()
    self._steps.append(metrics)
    if step % self.every == 0 or step == self.total_steps:
      self._due = step

  def note(self, found: Mapping[str, float | str] | None) -> None:
    """Adds the numbers and texts of a hook to the next line, as 'hooks/NAME'."""
    self._noted |= {
      f'hooks/{name}': value if isinstance(value, str) else float(value)
      for name, value in (found or {}).items()
    }

  def restart_clock(self) -> None:
    """Excludes the time since the last line, which was not training, from the speed."""
    self._since = time.perf_counter()

  def flush(self) -> None:
    """Waits for the metrics that are due, and writes them."""
    step, self._due = self._due, None
    if step is None:
      return
    steps, self._steps = jax.device_get(self._steps), []
    now = time.perf_counter()
    seconds, self._since = now - self._since, now
    read = self.reading.tokens

    def total(name: str) -> float:  # in float64: float32 counts only to 2^24
      return sum(float(getattr(s.sums, name)) for s in steps)

    weight, last = total('weight'), steps[-1]
    scalars: Metrics = {
      'tokens': read(step),
      **self.reading.progress(step),
      **text_metrics(total('loss'), weight, self.reading.feed.tokens_per_byte),
      'grad_norm': float(last.grad_norm),
      **{f'grad_norm/{part}': float(norm) for part, norm in last.part_norms.items()},
      'learning_rate': float(last.learning_rate),
      'beyond_window': total('beyond_window') / max(weight, 1.0),
      **speed_metrics(
        tokens=read(step) - read(step - len(steps)),
        steps=len(steps),
        seconds=seconds,
        devices=jax.device_count(),
        flops_per_token=self.model.about.train_flops_per_token,
        peak_flops=chips.peak_flops(jax.devices()[0].device_kind),
      ),
      'phase': self.reading.curriculum.index(step - 1),
      'skipped': int(last.skipped),
      'host_memory_peak': memory.host_peak(),
      'device_memory_peak': memory.device_peak(),
    }
    if self.model.about.plan_interval is not None:
      scalars['draft_loss'] = total('draft_loss') / max(weight, 1.0)
    self.writer.write_scalars(step, {**scalars, **self._noted})
    if texts := {name: value for name, value in self._noted.items() if isinstance(value, str)}:
      self.writer.write_texts(step, texts)
    self._noted = {}


@dataclasses.dataclass
class RefusedLog(contextlib.AbstractContextManager['RefusedLog']):
  """Writes refused_steps.jsonl, in process 0 only. A context manager that closes the file.

      {"step": 412, "why": "loss spike", "loss": 9.1, "grad_norm": 3.0, "read": "these documents"}
      {"step": 412, "rewound_to": 400}

  `skipped` steps were refused so far; `describe` names the documents of a step, counted from 1.
  """

  model_dir: str | os.PathLike
  skipped: int
  describe: Callable[[int], str]
  say: Callable[[str], None]

  def __post_init__(self):
    writes = jax.process_index() == 0
    self._lines = JsonLines(pathlib.Path(self.model_dir, 'refused_steps.jsonl')) if writes else None

  def __call__(self, step: int, metrics: StepMetrics) -> None:
    """Waits for `step`, counted from 1, and writes a line if it was refused."""
    before, self.skipped = self.skipped, int(metrics.skipped)
    if self.skipped > before and self._lines is not None:
      why = 'loss spike' if bool(metrics.spiked) else 'not finite'
      loss = text_metrics(float(metrics.sums.loss), float(metrics.sums.weight), None)['loss']
      line = {'step': step, 'why': why, 'loss': loss, 'grad_norm': float(metrics.grad_norm)}
      self._lines.write({**line, 'read': self.describe(step)})
      self.say(f'step {step} is refused: {why} (loss {loss:.4g})')

  def rewound(self, step: int, goal: int) -> None:
    """Writes that step `step` was rewound to the parameters and optimizer of step `goal`."""
    if self._lines is not None:
      self._lines.write({'step': step, 'rewound_to': goal})
    self.say(f'step {step} is a loss spike: continuing with the parameters of step {goal}')

  def __exit__(self, *error: object) -> None:
    if self._lines is not None:
      self._lines.close()
