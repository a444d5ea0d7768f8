"""Conversations in the forms of OpenAI and ShareGPT, read as one form.

A row has a list of messages, of OpenAI (role, content) or of ShareGPT (from, value). It may have
the tools that the assistant may call, as OpenAI's `tools` or earlier `functions`, and ShareGPT's
`system`. Chat templates are written for the form in which transformers hands messages over, so

  tools and calls in their earlier forms become `tools`, `tool_calls` and messages of the role tool,
  arguments of a call that are JSON in a text become their value,
  a content of several texts becomes one text, and one that is null beside calls becomes empty,
  fields that are null are left out, since every row of a table has all fields.
"""

from collections.abc import Mapping, Sequence
import json
from typing import Any, NamedTuple, TypeGuard

from valkyrie import foreign
from valkyrie.errors import DataError

COLUMNS = ('messages', 'conversations')  # the names of OpenAI and ShareGPT
_ROLES = {'human': 'user', 'gpt': 'assistant', 'function': 'tool', 'observation': 'tool'}
# Fields of an assistant's message beside its content.
SAID = ('tool_calls', 'reasoning_content', 'reasoning', 'thinking')
_FLAGS = ('weight', 'train')  # whether an answer is learned


class Conversation(NamedTuple):
  """Messages with role and content, and the tools as OpenAI has them; None without any."""

  messages: list[dict[str, Any]]
  tools: list[Any] | None = None


def also(column: str) -> dict[str, bool]:
  """Columns to read besides the one of the messages, and whether each may take its place."""
  columns: dict[str, bool] = {'tools': False, 'functions': False, 'system': False}
  if column not in COLUMNS:
    return columns
  instead = dict.fromkeys(COLUMNS, True)
  del instead[column]
  return instead | columns


def conversation(row: Mapping[str, Any], column: str, place: str) -> Conversation:
  """The conversation of a row; raises a DataError that names the place."""
  name = _column_in(row, column)
  messages = row.get(name)
  if not _is_list_of_objects(messages):
    raise DataError(
      f'{place} has {messages!r:.80} in the column {name}, expected a list such as '
      '[{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi!"}].'
    )
  read = []
  for number, given in enumerate(messages, 1):
    message = _message(given, f'{place}: the message {number}')
    read.append(message)
  system = row.get('system')
  roles = [message.get('role') for message in read]
  if system and 'system' not in roles:
    read.insert(0, {'role': 'system', 'content': system})
  return Conversation(read, _tools(row, place))


def _column_in(row: Mapping[str, Any], column: str) -> str:
  """The column that has the messages of a row: `column`, or one that may take its place."""
  if row.get(column) is not None:
    return column
  for name, may_replace in also(column).items():
    if may_replace and row.get(name) is not None:
      return name
  return column


def is_learned(message: Mapping[str, Any]) -> bool:
  """Whether a message is an answer to learn."""
  if message.get('role') != 'assistant':
    return False
  flags = [message.get(flag, 1) for flag in _FLAGS]
  return all(flags)


def _message(given: Mapping[str, Any], place: str) -> dict[str, Any]:
  message = _without_nulls(given)
  is_of_sharegpt = 'from' in message and 'role' not in message
  if is_of_sharegpt:
    message['role'] = message.pop('from')
    message['content'] = message.pop('value', None)
  role = message.get('role')
  message['role'] = _ROLES.get(str(role), role)
  if 'function_call' in message:
    function = message.pop('function_call')
    if message.get('tool_calls'):
      raise DataError(f'{place} has function_call and tool_calls. Leave one of them out.')
    message['tool_calls'] = [_as_call(function)]
  if 'tool_calls' in message:
    calls = _listed(message['tool_calls'], place)
    message['tool_calls'] = [_call(call, place) for call in calls]
  content = message.get('content')
  if isinstance(content, list):
    texts = [_text(part, place) for part in content]
    message['content'] = ''.join(texts)
  says_more = any(name in message for name in SAID)
  if content is None and says_more:
    message['content'] = ''
  _check_flags(message, place)
  return message


def _check_flags(message: Mapping[str, Any], place: str) -> None:
  """Checks that the flags of a message are 0 or 1, and say one thing."""
  flags = {name: message[name] for name in _FLAGS if name in message}
  values = list(flags.values())
  wrong = [value for value in values if value not in (0, 1)]
  if wrong or len(set(values)) > 1:
    raise DataError(
      f'{place} has {flags!r:.80}, expected 0 or 1: an answer is learned, or it is only read. '
      'Correct it.'
    )


def _text(part: Any, place: str) -> str:
  text = part
  kind = 'text'
  if isinstance(part, dict):
    text = part.get('text')
    kind = part.get('type', 'text')
  if not isinstance(text, str) or kind != 'text':
    raise DataError(
      f'{place} has the part {part!r:.80} in its content. Only texts are read: '
      '{"type": "text", "text": "Hello"}. Leave the conversation out.'
    )
  return text


def _call(call: Any, place: str) -> Any:
  """A call whose arguments are a value: OpenAI has them as JSON in a text."""
  function = None
  if isinstance(call, dict):
    function = call.get('function')
  if not isinstance(function, dict) or not isinstance(function.get('name'), str):
    raise DataError(
      f'{place} has the call {call!r:.80}, expected one such as {{"type": "function", "function": '
      '{"name": "add", "arguments": {"a": 1}}}. Correct it.'
    )
  arguments = function.get('arguments', {})
  if isinstance(arguments, str):
    arguments = _json(arguments or '{}', f'{place} has arguments of a call which')
  read = function | {'arguments': arguments}
  return call | {'function': read}


def _as_call(function: Any) -> dict[str, Any]:
  """A function in the form of OpenAI's tools and calls."""
  return {'type': 'function', 'function': function}


def _tools(row: Mapping[str, Any], place: str) -> list[Any] | None:
  """The tools of a row; None if it has none."""
  tools = _listed(_parsed(row, 'tools', place), place)
  functions = _parsed(row, 'functions', place)
  if tools and functions:
    raise DataError(f'{place} has tools and functions. Leave one of them out.')
  if not tools:
    listed_functions = _listed(functions, place)
    tools = [_as_call(function) for function in listed_functions]
  read = [_without_nulls(tool) for tool in tools]
  return read or None


def _parsed(row: Mapping[str, Any], column: str, place: str) -> Any:
  """The list in a column, which may be JSON in a text; [] for an empty column."""
  value = row.get(column)
  if isinstance(value, str):  # in tables, where all values of a column have one form
    text = value or 'null'
    value = _json(text, f'{place} has {column} which')
  return value or []


def _is_list_of_objects(value: Any) -> TypeGuard[list[dict[str, Any]]]:
  if not isinstance(value, list):
    return False
  return all(isinstance(item, dict) for item in value)


def _listed(value: Any, place: str) -> Sequence[Any]:
  if not _is_list_of_objects(value):
    raise DataError(
      f'{place} has {value!r:.80} for tools or calls, expected a list of objects. Correct it.'
    )
  return value


def _json(text: str, place: str) -> Any:
  try:
    return foreign.json_value(text.encode())
  except ValueError as error:
    raise DataError(
      f'{place} are not JSON ({foreign.reason(error)}): {text!r:.80}. Correct it.'
    ) from error


def _without_nulls(value: Any) -> Any:
  if isinstance(value, dict):
    present = {name: inner for name, inner in value.items() if inner is not None}
    return {name: _without_nulls(inner) for name, inner in present.items()}
  if isinstance(value, list):
    return [_without_nulls(inner) for inner in value]
  return value


def hashed(messages: Sequence[Mapping[str, Any]]) -> str:
  """The text of messages by which a conversation is held out or not."""
  return json.dumps(messages, default=str)
