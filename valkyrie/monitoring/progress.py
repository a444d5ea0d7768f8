"""Progress of a run for people: a bar on a terminal, plain lines elsewhere, and a log file."""

from collections.abc import Mapping
import pathlib
import sys
import time
from typing import Any, TextIO

from tqdm import tqdm

from valkyrie import foreign
from valkyrie.errors import StorageError
from valkyrie.monitoring.log_file import LogFile

_BAR = 'step {n_fmt}/{total_fmt} |{bar:20}| {percentage:3.0f}%{postfix}'


class Progress:
  """Shows the step, the loss, bits, the speed and the remaining time."""

  def __init__(self, total_steps: int, stream: TextIO | None = None, *, quiet: bool = False):
    """Writes to `stream`, by default standard error, or, with `quiet`, only to the log file."""
    self._total_steps = total_steps
    self._stream = sys.stderr if stream is None else stream
    self._quiet = quiet
    self._is_terminal = self._stream.isatty()
    self._bar: tqdm | None = None
    self._has_said_the_end = False
    self._early = ''  # lines from before the log is opened
    self._is_early = True
    self._log: LogFile | None = None

  def log_to(self, path: pathlib.Path | None) -> None:
    """Appends all lines, including earlier ones, to a file with their times; None writes no log.

    A file that cannot be written is reported once, and the run continues.
    """
    early = self._early
    self._early = ''
    self._is_early = False
    if path is None:
      return
    try:
      self._log = LogFile(path)
    except StorageError as error:  # there is something other than a file
      self.say(str(error))
    except OSError as error:
      self.say(f'the log {path} cannot be written ({error.strerror})')
    else:
      self._append(early)

  def show(self, step: int, metrics: Mapping[str, Any]) -> None:
    """Shows the metrics of the last step, as numbers of the host."""
    texts = describe(metrics)
    seconds = metrics.get('step_seconds')
    if seconds is not None:
      steps_left = max(0, self._total_steps - step)
      remaining = steps_left * seconds
      interval = tqdm.format_interval(remaining)
      texts.append(f'{interval} left')
      self._say_the_end(remaining)
    text = ', '.join(texts)
    share = min(1.0, step / self._total_steps)
    line = f'step {step}/{self._total_steps} ({share:.0%}): {text}'
    if self._quiet or not self._is_terminal:
      self.say(line)
      return
    self._write(line)
    if self._bar is None:
      options = {'file': self._stream, 'bar_format': _BAR, 'dynamic_ncols': True}
      self._bar = tqdm(total=self._total_steps, initial=step, **options)
    self._bar.n = step
    self._bar.set_postfix_str(text)

  def _say_the_end(self, remaining: float) -> None:
    """Says once when the steps will be done."""
    if self._has_said_the_end or not remaining:
      return
    self._has_said_the_end = True
    end = time.localtime(time.time() + remaining)
    ends = time.strftime('%Y-%m-%d %H:%M', end)
    self.say(f'at this speed the steps are done on {ends}; evaluations and saves come on top')

  def say(self, *lines: str) -> None:
    """Prints lines, above the bar if there is one."""
    for line in lines:
      self._write(line)
      if self._quiet:
        continue
      if self._bar is None:
        print(line, file=self._stream, flush=True)
      else:
        self._bar.write(line, file=self._stream)

  def close(self) -> None:
    """Ends the line of the bar."""
    if self._bar is not None:
      self._bar.close()
      self._bar = None

  def _write(self, text: str) -> None:
    """Appends a line to the log."""
    time_of_day = time.strftime('%Y-%m-%d %H:%M:%S')
    line = f'{time_of_day} {foreign.shown_lines(text)}\n'
    if self._is_early:
      self._early += line
    else:
      self._append(line)

  def _append(self, lines: str) -> None:
    """Appends lines to the file, and says what it has to say."""
    if self._log is None:
      return
    try:
      message = self._log.write(lines)
    except StorageError as error:  # the run was lost to another trainer
      self._log = None
      message = f'the log ends here: {error}'
    if message:
      self.say(message)


def describe(metrics: Mapping[str, Any]) -> list[str]:
  """The known metrics as ['loss 1.2345', '1.781 bits per byte', '8,123 tokens/s'].

  The losses of the sources of a mixture follow, as 'web 1.2345'.
  """
  known = {name: value for name, value in metrics.items() if value is not None}
  bits = 'bits_per_token'
  if 'bits_per_byte' in known:
    bits = 'bits_per_byte'
  texts = {
    'loss': 'loss {:.4f}',
    'objective': 'objective {:.4f}',
    bits: '{:.3f} ' + bits.replace('_', ' '),
    'perplexity': 'perplexity {:.4g}',
    'accuracy': 'accuracy {:.2%}',
    'tokens_per_second': '{:,.0f} tokens/s',
    'step_seconds': '{:.3g} s a step',
    'step_seconds_slowest': 'slowest {:.3g} s',
    'tflops_per_second_per_device': '{:.3g} TFLOP/s per device',
    'mfu': '{:.1%} of peak',
    'grad_norm': 'gradient {:.3g}',
    'learning_rate': 'learning rate {:.2g}',
  }
  said = []
  for name, text in texts.items():
    if name in known:
      said.append(text.format(known[name]))
  sources = [name for name in known if name.startswith('loss/')]
  for name in sources:
    source = name.removeprefix('loss/')
    said.append(f'{source} {known[name]:.4f}')
  return said
