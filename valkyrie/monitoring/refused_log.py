"""Log of the refused steps: model_dir/refused_steps.jsonl.

    {"step": 412, "why": "loss spike", "loss": 9.1, "grad_norm": 3.0, "read": "these documents .."}
    {"step": 412, "rewound_to": 400}

Each line has the reason and the documents read, or the step whose parameters a rewind restored.
Steps that are repeated after a crash appear again.
"""

from collections.abc import Callable
import dataclasses
import os
import pathlib
from typing import Self

import jax

from valkyrie.monitoring.json_lines import JsonLines
from valkyrie.monitoring.metrics import text_metrics
from valkyrie.training.train_step import StepMetrics


@dataclasses.dataclass
class RefusedLog:
  """Writes the file, in the first process of a run only. A context manager that closes it.

  Attributes:
    model_dir: the directory of the run.
    skipped: number of steps refused so far.
    describe: names the documents of a step, given its number, counted from 1.
    say: prints a line on the console.
  """

  model_dir: str | os.PathLike
  skipped: int
  describe: Callable[[int], str]
  say: Callable[[str], None]

  def __post_init__(self):
    writes = jax.process_index() == 0
    self._lines = JsonLines(pathlib.Path(self.model_dir, 'refused_steps.jsonl')) if writes else None

  def __call__(self, step: int, metrics: StepMetrics) -> None:
    """Waits for `step`, counted from 1, and writes a line if it was refused.

    Raises:
      StorageError: the file cannot be written.
    """
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

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *error: object) -> None:
    if self._lines is not None:
      self._lines.close()
