"""The model `valkyrie` of EleutherAI's lm-evaluation-harness."""

# pyright: reportMissingImports=false

from collections.abc import Sequence
import sys
from typing import Any

from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from valkyrie.errors import ConfigurationError
from valkyrie.inference.harness_answers import Answers
from valkyrie.inference.opened import load


@register_model('valkyrie')
class HarnessModel(LM):
  """A run behind the harness's interface; a request holds its arguments in `args`."""

  def __init__(
    self,
    model_dir: str,
    step: str = 'latest',
    batch_size: int | str = 8,
    allow_import: str | Sequence[str] = (),
    **of_torch: Any,
  ):
    """Opens a run; see `valkyrie.load`.

    Args:
      model_dir: the directory of the run.
      step: the number of a step, 'latest' or 'best'.
      batch_size: the number of continuations that are read at the same time.
      allow_import: packages of yours that the run's configuration may import.
      of_torch: the harness's arguments for other models, `device` and `max_batch_size`: ignored.

    Raises:
      ConfigurationError: an argument is unknown, or the run cannot be opened.
    """
    super().__init__()
    unknown = sorted(set(of_torch) - {'device', 'max_batch_size'})
    if unknown:
      raise ConfigurationError(
        f'--model_args has {unknown[0]}. Use model_dir, step, batch_size and allow_import.'
      )
    if not str(batch_size).isdecimal() or int(batch_size) < 1:
      raise ConfigurationError(f'--batch_size is {batch_size}. Use a number of 1 or more.')
    packages = [allow_import] if isinstance(allow_import, str) else allow_import
    run = load(model_dir, step, allow_import=packages)
    self._answers = Answers(run, int(batch_size), lambda line: print(line, file=sys.stderr))

  def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
    answers = self._answers.log_likelihoods([request.args for request in requests])
    return self._kept('loglikelihood', requests, answers)

  def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
    answers = self._answers.rolling([request.args[0] for request in requests])
    return self._kept('loglikelihood_rolling', requests, answers)

  def generate_until(self, requests: Sequence[Any]) -> list[str]:
    answers = self._answers.continuations([request.args for request in requests])
    return self._kept('generate_until', requests, answers)

  def _kept(self, kind: str, requests: Sequence[Any], answers: list) -> list:
    """Adds the answers to the harness's own cache (`--use_cache`), and returns them."""
    for request, answer in zip(requests, answers, strict=True):
      self.cache_hook.add_partial(kind, request.args, answer)
    return answers
