"""Tokenizers of strangers: checked before their packages get them, and their errors after that.

The steps of a tokenizer.json rewrite a text one after another. Forty that double a letter make
terabytes of it, for which Rust ends the process.
"""

from collections.abc import Iterator
import contextlib
import json
from typing import Any

from valkyrie import foreign
from valkyrie.errors import ValkyrieError

LARGEST = 2**28  # bytes of a file
MOST_TOKENS = 2**24  # and the largest id
_MOST_STEPS = 256
_MOST_GROWTH = 64  # of the bytes of a text
_ONE_AFTER_ANOTHER = ('normalizer', 'pre_tokenizer'), ('post_processor',), ('decoder',)
_INSIDE = 'normalizers', 'pretokenizers', 'processors', 'decoders'  # of a Sequence
_GROWTH = {'ByteLevel': 2.0, 'Precompiled': 4.0}  # of text in the wild; others hardly add to it


def check(content: bytes) -> None:
  """Raises a ValueError if the steps of a tokenizer.json are too many, or let a text grow much."""
  try:
    found = json.loads(content)
    for names in _ONE_AFTER_ANOTHER:
      steps = [step for name in names for step in _steps(found.get(name))]
      growth = 1.0
      for step in steps:
        growth *= _growth(step)
      if len(steps) > _MOST_STEPS or growth > _MOST_GROWTH:
        raise ValueError(
          f'the {len(steps)} steps of its {" and ".join(names)} let a text grow {growth:,.0f} '
          f'times, but {_MOST_STEPS} steps and {_MOST_GROWTH} times are the most'
        )
  except (AttributeError, KeyError, RecursionError, TypeError, OverflowError) as error:
    raise ValueError(f'its steps are not of a tokenizer: {error!r:.80}') from error


def _steps(found: Any) -> Iterator[dict[str, Any]]:
  """The steps of a part, with those of sequences inside it."""
  if found is None:
    return
  inside = [each for name in _INSIDE for each in found.get(name) or []]
  if not inside:
    yield found
  for each in inside:
    yield from _steps(each)


def _growth(step: dict[str, Any]) -> float:
  """How many times as long a step can make a text."""
  kind = step.get('type')
  if kind == 'Replace':
    new = len(step['content'].encode(errors='replace'))
    ((form, pattern),) = step['pattern'].items()
    old = len(pattern.encode(errors='replace')) if form == 'String' else 1
    return max(1.0, new / old) if old else 1.0 + new
  if kind == 'TemplateProcessing':
    return max(1.0, sum('Sequence' in piece for piece in step['single']))
  return _GROWTH.get(str(kind), 1.0)


@contextlib.contextmanager
def refused(message: str, error: type[ValkyrieError], advice: str) -> Iterator[None]:
  """Converts what a codec raises: 'MESSAGE (reason). ADVICE'. A panic of Rust is no Exception."""
  try:
    yield
  except ValkyrieError:
    raise
  except BaseException as failure:
    if not isinstance(failure, Exception) and type(failure).__name__ != 'PanicException':
      raise
    raise error(f'{message} ({foreign.reason(failure)}). {advice}') from failure
