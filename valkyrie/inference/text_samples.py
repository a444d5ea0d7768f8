"""A hook that continues prompts while a model trains."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gin
import jax

from valkyrie.data import vocabularies
from valkyrie.errors import ConfigurationError
from valkyrie.inference.generation import Sampling
from valkyrie.inference.loaded import LoadedModel
from valkyrie.models import language_model
from valkyrie.models.language_model import LanguageModel


@gin.configurable
class TextSamples:
  """Logs continuations of prompts every `every` steps, while training waits.

  Their names in metrics.jsonl, TensorBoard and reports are `hooks/sample_1`, ...
  """

  def __init__(
    self,
    prompts: Sequence[str],
    every: int,
    max_tokens: int = 64,
    temperature: float = 0.0,
    *,
    model: Callable[..., LanguageModel],
    vocabulary: str,
    chunk_size: int,
  ):
    """Configures the samples.

    Args:
      prompts: the texts to continue.
      every: the number of steps between two calls.
      max_tokens: the largest number of tokens of a continuation.
      temperature: of the choice; 0 is greedy.
      model: the class of the model.
      vocabulary: 'bytes', or the path of the tokenizer's file.
      chunk_size: the largest number of tokens of a prompt that are read at once.

    Raises:
      ConfigurationError: there are several processes, or the model cannot continue texts.
    """
    if jax.process_count() > 1:
      raise ConfigurationError(
        'TextSamples needs all parameters in one process, and this run has '
        f'{jax.process_count()}. Continue its checkpoints by --run_mode=infer.'
      )
    self._prompts, self._every = prompts, every
    self._options = {'max_tokens': max_tokens, 'sampling': Sampling(temperature=temperature)}
    functions, tokenizer = language_model.transform(model), vocabularies.load(vocabulary)
    self._loaded = LoadedModel(
      functions, {}, tokenizer, model_dir='', steps=(), chunk_size=chunk_size
    )

  def __call__(self, step: int, state: Any, metrics: Any) -> Mapping[str, str] | None:
    if step % self._every:
      return None
    self._loaded.params = jax.device_put(state.evaluated, jax.local_devices()[0])
    made = self._loaded.generate(self._prompts, seed=step, **self._options)
    self._loaded.params = {}
    pairs = enumerate(zip(self._prompts, made, strict=True), 1)
    return {f'sample_{number}': prompt + one.text for number, (prompt, one) in pairs}
