"""Progress of a run for people: a bar on a terminal, plain lines elsewhere."""

from collections.abc import Mapping
import sys
from typing import Any, TextIO

from tqdm import tqdm

_BAR = 'step {n_fmt}/{total_fmt} |{bar:20}| {percentage:3.0f}%{postfix}'


class Progress:
  """Shows the step, the loss, bits, the speed and the remaining time."""

  def __init__(self, total_steps: int, stream: TextIO | None = None):
    """Writes to `stream`, by default standard error."""
    self._total_steps = total_steps
    self._stream = sys.stderr if stream is None else stream
    self._bar: tqdm | None = None

  def show(self, step: int, metrics: Mapping[str, Any]) -> None:
    """Shows the metrics of the last step, as numbers of the host."""
    texts = describe(metrics)
    if metrics.get('step_seconds') is not None:
      remaining = max(0, self._total_steps - step) * metrics['step_seconds']
      texts.append(f'{tqdm.format_interval(remaining)} left')
    text = ', '.join(texts)
    if not self._stream.isatty():
      share = min(1.0, step / self._total_steps)
      self.say(f'step {step}/{self._total_steps} ({share:.0%}): {text}')
      return
    if self._bar is None:
      self._bar = tqdm(
        total=self._total_steps,
        initial=step,
        file=self._stream,
        bar_format=_BAR,
        dynamic_ncols=True,
      )
    self._bar.n = step
    self._bar.set_postfix_str(text)

  def say(self, text: str) -> None:
    """Prints a line, above the bar if there is one."""
    if self._bar is None:
      print(text, file=self._stream, flush=True)
    else:
      self._bar.write(text, file=self._stream)

  def close(self) -> None:
    """Ends the line of the bar."""
    if self._bar is not None:
      self._bar.close()
      self._bar = None


def describe(metrics: Mapping[str, Any]) -> list[str]:
  """The known metrics as ['loss 1.2345', '1.781 bits per byte', '8,123 tokens/s'].

  The losses of the sources of a mixture follow, as 'web 1.2345'.
  """
  known = {name: value for name, value in metrics.items() if value is not None}
  bits = 'bits_per_byte' if 'bits_per_byte' in known else 'bits_per_token'
  texts = {
    'loss': 'loss {:.4f}',
    bits: '{:.3f} ' + bits.replace('_', ' '),
    'accuracy': 'accuracy {:.2%}',
    'tokens_per_second': '{:,.0f} tokens/s',
    'tflops_per_second_per_device': '{:.3g} TFLOP/s per device',
    'mfu': '{:.1%} of peak',
    'grad_norm': 'gradient {:.3g}',
    'learning_rate': 'learning rate {:.2g}',
  }
  said = [text.format(known[name]) for name, text in texts.items() if name in known]
  sources = [name for name in known if name.startswith('loss/')]
  return said + [f'{name.removeprefix("loss/")} {known[name]:.4f}' for name in sources]
