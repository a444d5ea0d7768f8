"""Conversations in the forms of OpenAI and ShareGPT, read as one form.

A row has a list of messages, of OpenAI (role, content) or of ShareGPT (from, value). It may have
the tools that the assistant may call, as OpenAI's `tools` or earlier `functions`, and ShareGPT's
`system`. Chat templates are written for the form in which transformers hands messages over, so

  tools and calls in their earlier forms become `tools`, `tool_calls` and messages of the role tool,
  arguments of a call that are JSON in a text become their value,
  a content of several texts becomes one text, and one that is null beside calls becomes empty,
  fields that are null are left out, since tables have all fields in all rows.
"""

from collections.abc import Mapping, Sequence
import json
from typing import Any, NamedTuple

from valkyrie import foreign
from valkyrie.errors import DataError

COLUMNS = ('messages', 'conversations')  # of OpenAI, and of ShareGPT
_ROLES = {'human': 'user', 'gpt': 'assistant', 'function': 'tool', 'observation': 'tool'}
# What an assistant says besides its content.
SAID = ('tool_calls', 'reasoning_content', 'reasoning', 'thinking')
_FLAGS = ('weight', 'train')  # whether an answer is learned


class Conversation(NamedTuple):
  """Messages with role and content, and the tools as OpenAI has them; None without any."""

  messages: list[dict[str, Any]]
  tools: list[Any] | None = None


def also(column: str) -> dict[str, bool]:
  """Columns to read besides the one of the messages, and whether each may take its place."""
  others = {name: True for name in COLUMNS if name != column} if column in COLUMNS else {}
  return others | dict.fromkeys(('tools', 'functions', 'system'), False)


def conversation(row: Mapping[str, Any], column: str, place: str) -> Conversation:
  """The conversation of a row; raises a DataError that names the place."""
  names = [column, *(name for name, instead in also(column).items() if instead)]
  given = [name for name in names if row.get(name) is not None]
  name = given[0] if given else column
  messages = row.get(name)
  if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
    raise DataError(
      f'{place} has {messages!r:.80} in the column {name}, expected a list such as '
      '[{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi!"}].'
    )
  read = [
    _message(message, f'{place}: the message {number}')
    for number, message in enumerate(messages, 1)
  ]
  system = row.get('system')
  if system and not any(message.get('role') == 'system' for message in read):
    read.insert(0, {'role': 'system', 'content': system})
  return Conversation(read, _tools(row, place))


def is_learned(message: Mapping[str, Any]) -> bool:
  """Whether a message is an answer to learn."""
  return message.get('role') == 'assistant' and all(message.get(flag, 1) for flag in _FLAGS)


def _message(given: Mapping[str, Any], place: str) -> dict[str, Any]:
  message = _without_nulls(given)
  if 'from' in message and 'role' not in message:
    message['role'] = message.pop('from')
    message['content'] = message.pop('value', None)
  message['role'] = _ROLES.get(str(message.get('role')), message.get('role'))
  if 'function_call' in message:
    call = message.pop('function_call')
    message.setdefault('tool_calls', [{'type': 'function', 'function': call}])
  if 'tool_calls' in message:
    message['tool_calls'] = [_call(call, place) for call in _listed(message['tool_calls'], place)]
  content = message.get('content')
  if isinstance(content, list):
    message['content'] = ''.join(_text(part, place) for part in content)
  if content is None and any(name in message for name in SAID):
    message['content'] = ''
  flags = {name: message[name] for name in _FLAGS if name in message}
  if any(flag not in (0, 1) for flag in flags.values()) or len({*flags.values()}) > 1:
    raise DataError(
      f'{place} has {flags!r:.80}, expected 0 or 1: an answer is learned, or it is only read. '
      'Correct it.'
    )
  return message


def _text(part: Any, place: str) -> str:
  text = part.get('text') if isinstance(part, dict) else part
  if not isinstance(text, str) or (isinstance(part, dict) and part.get('type', 'text') != 'text'):
    raise DataError(
      f'{place} has the part {part!r:.80} in its content. Only texts are read: '
      '{"type": "text", "text": "Hello"}. Leave the conversation out.'
    )
  return text


def _call(call: Any, place: str) -> Any:
  """A call whose arguments are a value: OpenAI has them as JSON in a text."""
  function = call.get('function') if isinstance(call, dict) else None
  if not isinstance(function, dict) or not isinstance(function.get('name'), str):
    raise DataError(
      f'{place} has the call {call!r:.80}, expected one such as {{"type": "function", "function": '
      '{"name": "add", "arguments": {"a": 1}}}. Correct it.'
    )
  arguments = function.get('arguments', {})
  if isinstance(arguments, str):
    arguments = _json(arguments or '{}', f'{place} has arguments of a call which')
  return {**call, 'function': {**function, 'arguments': arguments}}


def _tools(row: Mapping[str, Any], place: str) -> list[Any] | None:
  """The tools of a row; None if it has none."""
  tools = row.get('tools')
  if isinstance(tools, str):  # many tables have them so, since all rows of a column have one form
    tools = _json(tools or 'null', f'{place} has tools which')
  functions = row.get('functions')
  if isinstance(functions, str):
    functions = _json(functions or 'null', f'{place} has functions which')
  found = _listed(tools or [], place)
  if not found:
    found = [{'type': 'function', 'function': one} for one in _listed(functions or [], place)]
  return [_without_nulls(tool) for tool in found] or None


def _listed(value: Any, place: str) -> Sequence[Any]:
  if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
    raise DataError(
      f'{place} has {value!r:.80} for tools or calls, expected a list of objects. Correct it.'
    )
  return value


def _json(text: str, place: str) -> Any:
  try:
    return foreign.json_value(text.encode())
  except ValueError as error:
    raise DataError(f'{place} are not JSON ({foreign.reason(error)}): {text!r:.80}.') from error


def _without_nulls(value: Any) -> Any:
  if isinstance(value, dict):
    return {name: _without_nulls(each) for name, each in value.items() if each is not None}
  if isinstance(value, list):
    return [_without_nulls(each) for each in value]
  return value


def hashed(messages: Sequence[Mapping[str, Any]]) -> str:
  """The text of messages by which a conversation is held out or not."""
  return json.dumps(messages, default=str)
