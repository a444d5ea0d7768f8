"""The model `valkyrie` of EleutherAI's lm-evaluation-harness."""

# pyright: reportMissingImports=false

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import json
import math
import sys
from typing import Any, NamedTuple

from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
import numpy as np

from valkyrie.errors import ConfigurationError
from valkyrie.inference.generation import Sampling
from valkyrie.inference.opened import load
from valkyrie.inference.text_rows import batches

_SAMPLING = [field.name for field in dataclasses.fields(Sampling)]
_LIMITS = ('max_gen_toks', 'max_new_tokens', 'max_tokens', 'max_completion_tokens')
_MAX_TOKENS = 256


@register_model('valkyrie')
class HarnessModel(LM):
  """A run behind the harness's interface; a request holds its arguments in `args`.

  A context that several requests share is read once.
  """

  def __init__(
    self,
    model_dir: str,
    step: str = 'latest',
    batch_size: int | str = 8,
    allow_import: str | Sequence[str] = (),
    **ignored: Any,
  ):
    """Opens a run; see `valkyrie.load`.

    Args:
      batch_size: the number of continuations that are read at the same time.
      ignored: the harness's arguments for other models, `device` and `max_batch_size`.

    Raises a ConfigurationError if an argument is unknown, or the run cannot be opened.
    """
    super().__init__()
    unknown = sorted(set(ignored) - {'device', 'max_batch_size'})
    if unknown:
      raise ConfigurationError(
        f'--model_args has {unknown[0]}. Use model_dir, step, batch_size and allow_import.'
      )
    is_count = str(batch_size).isdecimal() and int(batch_size) > 0
    if not is_count:
      raise ConfigurationError(f'--batch_size is {batch_size}. Use a number of 1 or more.')
    packages = allow_import
    if isinstance(allow_import, str):
      packages = [allow_import]
    self._run = load(model_dir, step, allow_import=packages)
    self._batch_size = int(batch_size)
    self._longest = self._run.model.about.max_context
    self._cut = 0  # contexts that were too long

  def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
    """For each (context, continuation): log p(continuation | context), and whether it is greedy.

    Without a BOS, the first token of a document, after an empty context, is scored as a uniform
    guess, log(vocabulary size) nats: the model predicts tokens only within documents.
    """
    rows = [self._split(*request.args) for request in requests]
    by_context: dict[bytes, list[int]] = defaultdict(list)
    for number, (context, _) in enumerate(rows):
      same_context = by_context[context.tobytes()]
      same_context.append(number)
    answers: dict[int, tuple[float, bool]] = {}
    longest_first = sorted(by_context, key=len, reverse=True)
    for contexts in batches(longest_first, self._batch_size):
      tokens = [np.frombuffer(context, np.int32) for context in contexts]
      context_carry = self._run.read(tokens)
      continuations = []  # (row of the context, number of the request)
      for row, context in enumerate(contexts):
        for number in by_context[context]:
          continuations.append((row, number))
      for batch in batches(continuations, self._batch_size):
        context_rows, numbers = zip(*batch, strict=True)
        carry = self._run.rows(context_carry, context_rows)
        texts = []
        for number in numbers:
          _, continuation = rows[number]
          texts.append(continuation)
        scores = self._run.score(texts, carry, batch_size=self._batch_size)
        for number, score in zip(numbers, scores, strict=True):
          log_prob = self._sum(score.log_probs)
          is_greedy = bool(score.greedy.all())
          answers[number] = (log_prob, is_greedy)
    return self._answered('loglikelihood', requests, answers)

  def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
    """log p(text) of each text as a document.

    A text longer than the model can read is read in windows, as the harness's own models do: each
    token is scored once. A later window begins with at least one token that is not scored again.
    """
    tokenizer = self._run.tokenizer
    begin_tokens = len(tokenizer.bos)
    windows: list[_Window] = []
    for number, request in enumerate(requests):
      text, *_ = request.args
      ids = tokenizer.begun(text)
      windows += _windows(number, ids, self._longest, begin_tokens)
    windows.sort(key=lambda window: -len(window.tokens))
    texts = [window.tokens for window in windows]
    scores = self._run.score(texts, batch_size=self._batch_size)
    numbers = range(len(requests))
    sums = dict.fromkeys(numbers, 0.0)
    for window, score in zip(windows, scores, strict=True):
      first = len(window.tokens) - window.new
      new_log_probs = score.log_probs[first:]
      sums[window.request] += self._sum(new_log_probs)
    return self._answered('loglikelihood_rolling', requests, sums)

  def generate_until(self, requests: Sequence[Any]) -> list[str]:
    """For each (context, generation settings): the text up to a stop string or the end.

    Raises a ConfigurationError if a setting is unknown or out of range.
    """
    by_settings: dict[str, list[int]] = defaultdict(list)
    for number, request in enumerate(requests):
      given = request.args[1]
      settings = json.dumps(given, sort_keys=True)
      by_settings[settings].append(number)
    texts: dict[int, str] = {}
    for settings, numbers in by_settings.items():
      options = _generation(json.loads(settings))
      texts_of_contexts = {}
      for number in numbers:
        texts_of_contexts[number] = requests[number].args[0]
      numbers.sort(key=lambda number: -len(texts_of_contexts[number]))
      contexts = []
      for number in numbers:
        text = texts_of_contexts[number]
        context = self._shortened(text, options['max_tokens'])
        contexts.append(context)
      continuations = self._run.generate(contexts, batch_size=self._batch_size, **options)
      for number, continuation in zip(numbers, continuations, strict=True):
        texts[number] = continuation.text
    return self._answered('generate_until', requests, texts)

  def _split(self, context: str, continuation: str) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of the whole text, split at the first token that the continuation changes."""
    whole = self._run.tokenizer.begun(context + continuation)
    before_space = context.rstrip()  # a space belongs to the next word
    context_alone = self._run.tokenizer.begun(before_space)
    size = min(len(context_alone), len(whole))
    is_equal = context_alone[:size] == whole[:size]
    is_equal_or_end = np.append(is_equal, False)
    split = int(is_equal_or_end.argmin())
    begin = 0
    if self._longest is not None:
      begin = max(0, len(whole) - self._longest)
    if begin >= split > 0:
      raise ConfigurationError(
        f'A continuation has {len(whole) - split} tokens, too many for the {self._longest} that '
        'the model can read (FullAttention.max_context).'
      )
    if begin > 0:
      self._cut += 1
    return whole[begin:split], whole[split:]

  def _shortened(self, context: str, max_tokens: int) -> np.ndarray:
    """The last tokens of a context, so that the continuation fits in the model."""
    tokens = self._run.tokenizer.begun(context)
    longest = self._longest
    if longest is None or len(tokens) + max_tokens <= longest:
      return tokens
    self._cut += 1
    kept = max(1, longest - max_tokens)
    return tokens[-kept:]

  def _sum(self, log_probs: np.ndarray) -> float:
    """The sum of log-probabilities, where a NaN counts as a uniform guess."""
    is_guess = np.isnan(log_probs)
    known = log_probs[~is_guess].sum(dtype=np.float64)
    guess = math.log(self._run.model.about.vocabulary_size)
    guesses = int(is_guess.sum())
    return float(known) - guesses * guess

  def _answered(self, kind: str, requests: Sequence[Any], answers: Mapping[int, Any]) -> list:
    """The answers by number as a list; the harness's cache (`--use_cache`) gets them, too."""
    if self._cut:
      print(
        f'{self._cut} contexts were longer than the {self._longest} tokens that the model can '
        'read (FullAttention.max_context): only their ends were read.',
        file=sys.stderr,
      )
    self._cut = 0
    for number, request in enumerate(requests):
      self.cache_hook.add_partial(kind, request.args, answers[number])
    return [answers[number] for number in range(len(requests))]


class _Window(NamedTuple):
  """A part of the text of a request.

  request: the number of the request.
  new: how many tokens at the end of the window are scored.
  tokens: int32 [T].
  """

  request: int
  new: int
  tokens: np.ndarray


def _windows(request: int, ids: np.ndarray, longest: int | None, bos: int) -> Iterator[_Window]:
  """Windows of at most `longest` tokens, in order. The first `bos` tokens are never new."""
  size = len(ids)
  if longest is not None:
    size = longest
  end = min(size, len(ids))
  new = max(end - bos, 0)
  yield _Window(request, new, ids[:end])
  most_new = max(size - 1, 1)
  while end < len(ids):
    left = len(ids) - end
    new = min(most_new, left)
    end += new
    begin = max(0, end - size)
    yield _Window(request, new, ids[begin:end])


def _generation(settings: dict[str, Any]) -> dict[str, Any]:
  """The arguments of `LoadedModel.generate`; raises ConfigurationError for an unknown setting."""
  settings = {name: value for name, value in settings.items() if value is not None}
  until = settings.pop('until', ())
  limits = {}
  for name in _LIMITS:
    if name in settings:
      limits[name] = settings.pop(name)
  max_tokens = next(iter(limits.values()), _MAX_TOKENS)
  if any(limit != max_tokens for limit in limits.values()):
    given = ' and '.join(f'{name}={limit}' for name, limit in limits.items())
    raise ConfigurationError(f'{given} are limits of the same tokens. Leave only one of them.')
  # As in the models of the harness, a temperature without do_sample samples.
  has_temperature = settings.get('temperature', 0) > 0
  samples = settings.pop('do_sample', has_temperature)
  beams = settings.pop('num_beams', 1)
  if beams != 1:
    raise ConfigurationError(f'num_beams={beams}, but there is no beam search. Use num_beams=1.')
  unknown = [name for name in settings if name not in _SAMPLING]
  if unknown:
    known = ', '.join((*_LIMITS, *_SAMPLING))
    raise ConfigurationError(
      f'{unknown[0]} is not a setting of the generation. Use until, do_sample, num_beams, {known}.'
    )
  if samples:
    settings.setdefault('temperature', 1.0)
  else:
    settings['temperature'] = 0.0
  sampling = Sampling(**settings)
  return {'stop': until or (), 'max_tokens': max_tokens, 'sampling': sampling}
