"""Requests to a language model in one file of JSON lines, and its answers in another.

    {"id": "layers.0.mlp.out/3/0f5a81c29be4", "messages": [{"role": "user", "content": "..."}]}
    {"id": "layers.0.mlp.out/3/0f5a81c29be4", "answer": "..."}

Any program may answer; `ask` has an endpoint do it. An id ends with digits of the messages, so
that an answer never counts for a question that has changed. What comes back is text, and no more.
"""

from collections.abc import Iterable, Iterator, Sequence
import contextlib
import hashlib
import json
import pathlib
from typing import Any, NamedTuple

from valkyrie import foreign
from valkyrie.errors import DataError, is_there, reason_of
from valkyrie.storage import whole_file

LONGEST_ANSWER = 100_000  # characters
_LONGEST_ID = 500  # characters
_LONGEST_LINE = 2**24  # bytes
_DIGITS = 12  # of the messages, in an id


class Request(NamedTuple):
  """What a language model is asked: messages in the form of OpenAI's chat completions."""

  id: str
  messages: Sequence[dict[str, str]]

  @property
  def size(self) -> int:
    """The bytes of its messages."""
    return sum(len(message['content'].encode(errors='replace')) for message in self.messages)


def request(name: str, system: str, user: str) -> Request:
  """A request with two messages; its id is NAME/DIGITS."""
  messages = [{'role': 'system', 'content': system}, {'role': 'user', 'content': user}]
  digits = hashlib.sha256(json.dumps(messages).encode()).hexdigest()[:_DIGITS]
  return Request(f'{name}/{digits}', messages)


def write_lines(path: pathlib.Path, lines: Iterable[dict[str, Any]]) -> None:
  """Writes or replaces a file of JSON lines."""
  whole_file.write(path, b''.join(map(line_of, lines)))


def line_of(value: dict[str, Any]) -> bytes:
  """A JSON object on a line of ASCII."""
  return json.dumps(value).encode() + b'\n'


def read_requests(path: pathlib.Path) -> list[Request]:
  """The requests in a file; raises a DataError if it is something else."""
  found = []
  for place, fields in objects(path, messages=list):
    messages = []
    for message in fields['messages']:
      with told(place):
        of_message = foreign.fields(message, role=str, content=str)
      messages.append({'role': of_message['role'], 'content': of_message['content']})
    found.append(Request(fields['id'], messages))
  return found


def read_answers(path: pathlib.Path) -> dict[str, str]:
  """{id: answer} of a file, which may be missing; raises a DataError if it is something else."""
  if not is_there(path):
    return {}
  answers = {}
  for place, fields in objects(path, answer=str):
    if len(fields['answer']) > LONGEST_ANSWER:
      raise DataError(
        f'{place} has an answer of {len(fields["answer"]):,} characters, expected at most '
        f'{LONGEST_ANSWER:,}. Remove the line.'
      )
    answers[fields['id']] = fields['answer']
  return answers


def objects(path: pathlib.Path, **kinds: Any) -> Iterator[tuple[str, dict[str, Any]]]:
  """(place for a message, JSON object) of each line.

  Each object has an id of its own, and fields of these types.

  Raises a DataError if the file is something else.
  """
  numbers: dict[str, int] = {}
  try:
    with foreign.opened(path, foreign.LARGEST_FILE) as stream:
      for number, line in enumerate(foreign.lines(stream, _LONGEST_LINE), 1):
        place = f'{path}, line {number},'
        with told(place):
          fields = foreign.json_object(line, id=str, **kinds)
          if not 0 < len(fields['id']) <= _LONGEST_ID:
            raise ValueError(f"its field 'id' has {len(fields['id']):,} characters")
          first = numbers.setdefault(fields['id'], number)
          if first != number:
            raise ValueError(f'line {first} has the id {fields["id"]!r}, too')
        yield place, fields
  except (OSError, ValueError) as error:
    raise DataError(f'{path} cannot be read ({reason_of(error)}). Name another file.') from error


@contextlib.contextmanager
def told(place: str) -> Iterator[None]:
  """A context that raises a DataError, which names the place, for a ValueError inside."""
  try:
    yield
  except ValueError as error:
    raise DataError(
      f'{place} cannot be used: {foreign.reason(error)}. Mend or remove the line.'
    ) from error
