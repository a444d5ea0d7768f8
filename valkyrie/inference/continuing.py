"""The continuation of prompts by a model.

`LoadedModel` documents the arguments and errors.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from valkyrie.config.ranges import NonNegativeInt, PositiveInt, Seed, check, checked
from valkyrie.errors import UsageError
from valkyrie.inference.documents import AnyCarry
from valkyrie.inference.generation import LENGTH, Continuation, Sampling
from valkyrie.inference.reader import check_finite
from valkyrie.inference.text_rows import Text, TextRows, batches
from valkyrie.types import Params


class Generated(NamedTuple):
  """A continuation.

  prompt: the number of its prompt.
  sample: its number among the samples of this prompt.
  ended: 'eos', 'stop' (a stop string, which is left out) or 'length'.
  """

  prompt: int
  sample: int
  text: str
  tokens: list[int]
  ended: str


@checked
def generate(
  rows: TextRows,
  params: Params,
  prompts: Text | Sequence[Text],
  carry: AnyCarry | None,
  *,
  samples: PositiveInt,
  stop: str | Sequence[str],
  first: Seed,
  batch_size: PositiveInt,
  **options,
) -> list[Generated]:
  """The samples of each prompt; `options` are the last arguments of `_extended`."""
  numbered = dict(enumerate(_prompts(rows, prompts, carry), first))
  numbers = []
  for prompt in numbered:
    for sample in range(samples):
      numbers.append((prompt, sample))
  results = []
  for batch in batches(numbers, batch_size):
    texts = []
    for prompt, _ in batch:
      text = Continuation(rows.tokenizer, stop, numbered[prompt])
      texts.append(text)
    for _ in _extended(rows, params, numbered, batch, texts, carry, **options):
      pass
    for (prompt, sample), text in zip(batch, texts, strict=True):
      generated = Generated(prompt, sample, text.text, text.tokens, str(text.ended))
      results.append(generated)
  return results


def stream(
  rows: TextRows,
  params: Params,
  prompt: Text,
  carry: AnyCarry | None,
  *,
  stop: str | Sequence[str],
  **options,
) -> Iterator[str]:
  """The first sample of a prompt, piece by piece; for `options` see `_extended`."""
  prompts = dict(enumerate(_prompts(rows, [prompt], carry)))
  text = Continuation(rows.tokenizer, stop, prompts[0])
  for _, new in _extended(rows, params, prompts, [(0, 0)], [text], carry, **options):
    yield new


def _prompts(
  rows: TextRows,
  prompts: Text | Sequence[Text],
  carry: AnyCarry | None,
) -> list[np.ndarray]:
  """The tokens of each prompt; an empty one begins a document with a line break."""
  tokens = rows.tokens(prompts, carry)
  if carry is None:
    tokens = [row if len(row) else rows.tokens_of('\n', begins=True) for row in tokens]
  if carry is None and not all(map(len, tokens)):
    raise UsageError('A prompt has no tokens. Write a text, or continue the carry of one.')
  return tokens


def _extended(
  rows: TextRows,
  params: Params,
  prompts: Mapping[int, np.ndarray],
  numbers: Sequence[tuple[int, int]],
  texts: Sequence[Continuation],
  carry: AnyCarry | None,
  *,
  sampling: Sampling,
  seed: int,
  max_tokens: int,
) -> Iterator[tuple[int, str]]:
  """Extends the text of each (prompt, sample) of `numbers`; yields (its row, its new text)."""
  check('generate.seed', seed, Seed)
  check('generate.max_tokens', max_tokens, NonNegativeInt)
  check('generate.first', max(prompts), Seed)
  reader = rows.reader
  asked = [prompt for prompt, _ in numbers]
  read_once = list(dict.fromkeys(asked))
  tokens = [prompts[prompt] for prompt in read_once]
  first = min(prompts)
  carry_rows = [number - first for number in read_once]
  begun = rows.begun(carry, len(prompts), carry_rows)
  most_read = int(begun.position.max())
  longest = max(map(len, tokens))
  reader.check_length(most_read + longest + max_tokens)
  begun = reader.read(params, begun, tokens)
  place = [read_once.index(prompt) for prompt, _ in numbers]
  before = [tokens[number] for number in place]
  for step in reader.generate(
    *(params, rows.chosen(begun, place), before, sampling),
    seed=seed,
    numbers=numbers,
    count=max_tokens,
  ):
    for row, text in enumerate(texts):
      if text.ended is None:
        check_finite(step[row] >= 0)
        if new := text.add(int(step[row])):
          yield row, new
    if all(text.ended for text in texts):
      return
  for row, text in enumerate(texts):
    if text.ended is None:
      yield row, text.end(LENGTH)
