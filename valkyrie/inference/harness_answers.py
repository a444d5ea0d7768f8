"""Answers of a loaded model to the questions of EleutherAI's lm-evaluation-harness."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
import json
import math
from typing import Any

import numpy as np

from valkyrie.errors import ConfigurationError
from valkyrie.inference.generation import Sampling
from valkyrie.inference.loaded import LoadedModel

_SAMPLING = ('temperature', 'top_k', 'top_p', 'min_p', 'repetition_penalty')
_MAX_TOKENS = 256


class Answers:
  """Answers of a model to the harness. A context that several questions share is read once."""

  def __init__(self, run: LoadedModel, batch_size: int, say: Callable[[str], None]):
    """Reads `batch_size` continuations at the same time; `say` prints a line."""
    self._run, self._batch_size, self._say = run, batch_size, say
    self._longest = run.model.about.max_context
    self._cut = 0  # contexts that were too long

  def log_likelihoods(self, questions: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
    """For each (context, continuation): log p(continuation | context), and whether it is greedy.

    The first token of a document, after an empty context, is scored as a uniform guess,
    log(vocabulary size) nats: the model predicts tokens only within documents.
    """
    rows = [self._split(*question) for question in questions]
    by_context: dict[bytes, list[int]] = defaultdict(list)
    for number, (context, _) in enumerate(rows):
      by_context[context.tobytes()].append(number)
    answers: dict[int, tuple[float, bool]] = {}
    for contexts in _batches(sorted(by_context, key=len, reverse=True), self._batch_size):
      begun = self._run.read([np.frombuffer(context, np.int32) for context in contexts])
      asked = [(row, n) for row, context in enumerate(contexts) for n in by_context[context]]
      for batch in _batches(asked, self._batch_size):
        carry = self._run.rows(begun, [row for row, _ in batch])
        scores = self._run.score([rows[number][1] for _, number in batch], carry)
        for (_, number), score in zip(batch, scores, strict=True):
          answers[number] = (self._sum(score.log_probs), bool(score.greedy.all()))
    self._report_cut()
    return [answers[number] for number in range(len(questions))]

  def rolling(self, texts: Sequence[str]) -> list[float]:
    """log p(text) of each text as a document."""
    order = sorted(range(len(texts)), key=lambda number: -len(texts[number]))
    scores = self._run.score([texts[number] for number in order], batch_size=self._batch_size)
    found = dict(zip(order, scores, strict=True))
    return [self._sum(found[number].log_probs) for number in range(len(texts))]

  def continuations(self, questions: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """For each (context, generation settings): the text up to a stop string or the end.

    Raises:
      ConfigurationError: a setting is unknown or out of range, or a context is empty.
    """
    by_settings: dict[str, list[int]] = defaultdict(list)
    for number, (_, settings) in enumerate(questions):
      by_settings[json.dumps(settings, sort_keys=True)].append(number)
    texts: dict[int, str] = {}
    for numbers in by_settings.values():
      options = _generation(questions[numbers[0]][1])
      numbers.sort(key=lambda number: -len(questions[number][0]))
      contexts = [self._shortened(questions[n][0], options['max_tokens']) for n in numbers]
      made = self._run.generate(contexts, batch_size=self._batch_size, **options)
      texts |= {number: one.text for number, one in zip(numbers, made, strict=True)}
    self._report_cut()
    return [texts[number] for number in range(len(questions))]

  def _split(self, context: str, continuation: str) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of the whole text, split at the first token that the continuation changes."""
    whole = self._run.tokenizer.ids(context + continuation)
    context_alone = self._run.tokenizer.ids(context.rstrip())  # a space belongs to the next word
    split = _common(context_alone, whole)
    begin = 0 if self._longest is None else max(0, len(whole) - self._longest)
    if begin >= split > 0:
      raise ConfigurationError(
        f'A continuation has {len(whole) - split} tokens, too many for the {self._longest} that '
        'the model can read (FullAttention.max_context).'
      )
    self._cut += begin > 0
    return whole[begin:split], whole[split:]

  def _shortened(self, context: str, max_tokens: int) -> str:
    """The end of a context, so that the continuation fits in the model."""
    tokens = self._run.tokenizer.ids(context)
    if self._longest is None or len(tokens) + max_tokens <= self._longest:
      return context
    self._cut += 1
    return self._run.tokenizer.decode(tokens[-max(1, self._longest - max_tokens) :])

  def _report_cut(self) -> None:
    if self._cut:
      self._say(
        f'{self._cut} contexts were longer than the {self._longest} tokens that the model can '
        'read (FullAttention.max_context): only their ends were read.'
      )
    self._cut = 0

  def _sum(self, log_probs: np.ndarray) -> float:
    unknown = np.isnan(log_probs)
    known = float(log_probs[~unknown].sum(dtype=np.float64))
    return known - int(unknown.sum()) * math.log(self._run.model.about.vocabulary_size)


def _batches(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
  return [items[first : first + size] for first in range(0, len(items), size)]


def _common(first: np.ndarray, second: np.ndarray) -> int:
  """The length of the longest common prefix of two rows."""
  size = min(len(first), len(second))
  differs = np.flatnonzero(first[:size] != second[:size])
  return int(differs[0]) if len(differs) else size


def _generation(settings: Mapping[str, Any]) -> dict[str, Any]:
  """The arguments of `LoadedModel.generate`; raises ConfigurationError for an unknown setting."""
  left = dict(settings)
  until = left.pop('until', ())
  max_tokens = left.pop('max_gen_toks', _MAX_TOKENS)
  sampled = left.pop('do_sample', False)
  sampling = {name: left.pop(name) for name in _SAMPLING if name in left}
  if left:
    raise ConfigurationError(
      f'{next(iter(left))} is not a setting of the generation. Use until, max_gen_toks, do_sample, '
      f'{", ".join(_SAMPLING)}.'
    )
  sampling = {'temperature': 1.0, **sampling} if sampled else {**sampling, 'temperature': 0.0}
  return {
    'stop': [until] if isinstance(until, str) else list(until),
    'max_tokens': max_tokens,
    'sampling': Sampling(**sampling),
  }
