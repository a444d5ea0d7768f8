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
_MOST_GROWTH = 64  # times the bytes of a text
_ONE_AFTER_ANOTHER = ('normalizer', 'pre_tokenizer'), ('post_processor',), ('decoder',)
_INSIDE = 'normalizers', 'pretokenizers', 'processors', 'decoders'  # the steps of a Sequence
_GROWTH = {'ByteLevel': 2.0, 'Precompiled': 4.0}  # for usual texts; other steps hardly add to them


def check(content: bytes) -> None:
  """Raises a ValueError if the steps of a tokenizer.json are too many, or let a text grow much."""
  try:
    tokenizer = json.loads(content)
    for names in _ONE_AFTER_ANOTHER:
      steps: list[dict[str, Any]] = []
      for name in names:
        steps += _steps(tokenizer.get(name))
      growth = 1.0
      for step in steps:
        growth *= _growth(step)
      are_too_many = len(steps) > _MOST_STEPS
      if are_too_many or growth > _MOST_GROWTH:
        raise ValueError(
          f'the {len(steps)} steps of its {" and ".join(names)} let a text grow {growth:,.0f} '
          f'times, but {_MOST_STEPS} steps and {_MOST_GROWTH} times are the most'
        )
  except (AttributeError, KeyError, RecursionError, TypeError, OverflowError) as error:
    raise ValueError(f'its steps are not of a tokenizer: {error!r:.80}') from error


def _steps(part: Any) -> Iterator[dict[str, Any]]:
  """The steps of a part, also inside its sequences."""
  if part is None:
    return
  inner_parts: list[Any] = []
  for name in _INSIDE:
    inner_parts += part.get(name) or []
  if not inner_parts:
    yield part
  for inner_part in inner_parts:
    yield from _steps(inner_part)


def _growth(step: dict[str, Any]) -> float:
  """How many times as long a step can make a text."""
  kind = step.get('type')
  if kind == 'Replace':
    new = len(step['content'].encode(errors='replace'))
    ((form, pattern),) = step['pattern'].items()
    old = 1
    if form == 'String':
      old = len(pattern.encode(errors='replace'))
    if old == 0:
      return 1.0 + new
    return max(1.0, new / old)
  if kind == 'TemplateProcessing':
    copies = ['Sequence' in piece for piece in step['single']]
    return max(1.0, sum(copies))
  return _GROWTH.get(str(kind), 1.0)


@contextlib.contextmanager
def refused(message: str, error: type[ValkyrieError], advice: str) -> Iterator[None]:
  """Converts the errors of a codec: 'MESSAGE (reason). ADVICE'.

  A panic of Rust is a BaseException, but not an Exception.
  """
  try:
    yield
  except ValkyrieError:
    raise
  except BaseException as failure:
    is_panic = type(failure).__name__ == 'PanicException'
    if not isinstance(failure, Exception) and not is_panic:
      raise
    raise error(f'{message} ({foreign.reason(failure)}). {advice}') from failure
