"""An endpoint in the form of OpenAI's chat completions, and what its failures mean.

The environment has the address, OPENAI_BASE_URL, such as http://localhost:8000/v1, and the key,
OPENAI_API_KEY, which a local server may not need. The key is sent to this address only: no
redirection is followed. It is in no message, and what the endpoint says is shown without it.
"""

from collections.abc import Callable, Mapping
import email.utils
import http.client
import json
import os
import time
from typing import Any, NamedTuple
import urllib.error
import urllib.parse
import urllib.request

from valkyrie import foreign
from valkyrie.errors import UsageError
from valkyrie.lab.decomposition.exchange import LONGEST_ANSWER, Request

URL = 'OPENAI_BASE_URL'
KEY = 'OPENAI_API_KEY'
_LARGEST = 2**24  # bytes of a response
_PIECE = 2**16  # bytes that are read at once
_LONGEST_WAIT = 60.0  # seconds between two attempts
_SHORTEST_SECRET = 8  # characters: 'EMPTY' is what a server that needs no key is given
# A later attempt may succeed: the server was busy, or something before it failed.
_PASSING = (408, 409, 425, 429, 500, 502, 503, 504, 529)
# No other request would succeed: the key, the address or the model is wrong.
_FINAL = (301, 302, 303, 307, 308, 401, 402, 403, 404, 405)


class Failed(Exception):
  """A request without an answer; `ends` says that every other one would have the same ending."""

  def __init__(self, reason: str, ends: bool = False):
    """Takes what is said of it."""
    super().__init__(reason)
    self.ends = ends


class _Passing(Exception):
  """A failure after which another attempt may succeed, in so many seconds if that is known."""

  def __init__(self, reason: str, seconds: float | None = None):
    super().__init__(reason)
    self.seconds = seconds


class Answer(NamedTuple):
  """A text, and the tokens that the endpoint counted for it: read and written, 0 if it does not."""

  text: str
  read: int
  written: int


class Endpoint:
  """Answers requests.

  Attributes:
    place: its address, for messages.
  """

  def __init__(
    self,
    fields: Mapping[str, Any],
    *,
    timeout: float,
    attempts: int,
    wait: Callable[[float], bool],
    environment: Mapping[str, str] = os.environ,
  ):
    """Takes how to ask.

    Args:
      fields: of the body of each request, beside its messages.
      timeout: seconds for which an attempt may take.
      attempts: of a request.
      wait: waits for so many seconds, and returns whether the attempts are to end.
      environment: has the address and the key.

    Raises a UsageError if there is no address, or one of the two cannot be used.
    """
    self._fields = fields
    self._timeout = timeout
    self._attempts = attempts
    self._wait = wait
    self._key = _checked_key(environment.get(KEY, ''))
    self.place = _checked_address(environment.get(URL, ''))
    self._opener = urllib.request.build_opener(_NoRedirection)

  def answer(self, request: Request) -> Answer:
    """Sends a request until there is an answer; raises Failed without one."""
    pause = 1.0
    for attempt in range(1, self._attempts + 1):
      try:
        return self._attempt(request)
      except _Passing as error:
        if attempt == self._attempts:
          raise Failed(f'{error} (attempts: {attempt})') from None
        seconds = pause if error.seconds is None else error.seconds
        pause *= 2
        if self._wait(min(seconds, _LONGEST_WAIT)):
          raise Failed('it was stopped') from None
    raise AssertionError(request.id)

  def _attempt(self, request: Request) -> Answer:
    """One attempt; raises Failed or _Passing."""
    body = json.dumps({**self._fields, 'messages': [*request.messages]}).encode()
    message = urllib.request.Request(f'{self.place}/chat/completions', body, method='POST')
    message.add_header('Content-Type', 'application/json')
    if self._key:
      message.add_unredirected_header('Authorization', f'Bearer {self._key}')
    end = time.monotonic() + self._timeout
    try:
      with self._opener.open(message, timeout=self._timeout) as response:
        content = _content(response, end)
    except urllib.error.HTTPError as error:
      with error:
        raise self._refusal(error, end) from None
    except (OSError, http.client.HTTPException, UnicodeError) as error:  # the last of a host's name
      reason = getattr(error, 'reason', error)  # of a URLError
      raise _Passing(self._shown(reason)) from None
    return self._read(content)

  def _refusal(self, error: urllib.error.HTTPError, end: float) -> Failed | _Passing:
    """What a status other than 200 means."""
    try:
      said = _content(error, end).decode(errors='replace')
    except (OSError, http.client.HTTPException):
      said = ''
    if not said.strip():
      said = error.reason
    reason = f'status {error.code}: {self._shown(said)}'
    if error.code in _PASSING:
      return _Passing(reason, _seconds(error.headers.get('Retry-After')))
    return Failed(reason, ends=error.code in _FINAL)

  def _read(self, content: bytes) -> Answer:
    """The answer in the body of a response."""
    try:
      body = foreign.json_object(content, choices=list)
      choice = foreign.fields(body['choices'][0], message=dict)
    except (ValueError, IndexError):  # a proxy's page, an error, or a part of a response
      said = content.decode(errors='replace')
      raise _Passing(f'the response is not a completion: {self._shown(said)}') from None
    if choice.get('finish_reason') == 'length':
      raise Failed('the answer was cut at the limit on its tokens, see --fields')
    text = choice['message'].get('content')
    if not isinstance(text, str) or not text.strip() or len(text) > LONGEST_ANSWER:
      raise Failed(f'the answer is not a text of at most {LONGEST_ANSWER:,} characters')
    usage = body.get('usage')
    return Answer(
      self._without_key(text), _count(usage, 'prompt_tokens'), _count(usage, 'completion_tokens')
    )

  def _shown(self, said: object) -> str:
    """What somebody else said, for a message."""
    text = self._without_key(str(said))
    return foreign.reason(ValueError(text))

  def _without_key(self, text: str) -> str:
    if len(self._key) < _SHORTEST_SECRET:
      return text
    return text.replace(self._key, f'${KEY}')


class _NoRedirection(urllib.request.HTTPRedirectHandler):
  """Makes a redirection an error, since the request and the key are meant for one address."""

  def redirect_request(self, *_: Any) -> None:
    return None


def _checked_key(key: str) -> str:
  """The key; what is wrong with it is said without it."""
  key = key.strip()
  if not key.isascii() or not key.isprintable() or ' ' in key:
    raise UsageError(
      f'{KEY} has a blank, or a character that is not ASCII. Set it to the key alone.'
    )
  return key


def _checked_address(url: str) -> str:
  """The address, without a slash at its end."""
  if not url:
    raise UsageError(
      f'{URL} is not set. Set it to the address of an endpoint, such as http://localhost:8000/v1.'
    )
  url = url.strip().rstrip('/')
  advice = f'Set it to an address such as http://localhost:8000/v1, and a key in {KEY}.'
  try:
    parts = urllib.parse.urlsplit(url)
    port = parts.port
  except ValueError:
    raise UsageError(f'{URL} is not an address. {advice}') from None
  is_plain = url.isascii() and url.isprintable() and ' ' not in url
  if parts.scheme not in ('http', 'https') or not parts.hostname or port == 0 or not is_plain:
    raise UsageError(f'{URL} is not an address that begins with http:// or https://. {advice}')
  if '@' in parts.netloc or parts.query or parts.fragment:  # which may be a password
    raise UsageError(f'{URL} has more than a host, a port and a path. {advice}')
  return url


def _content(response: Any, end: float) -> bytes:
  """The body of a response, which is there at the time `end`."""
  pieces = []
  size = 0
  while True:
    piece = response.read1(_PIECE)
    if not piece:
      return b''.join(pieces)
    pieces.append(piece)
    size += len(piece)
    if size > _LARGEST:
      raise http.client.HTTPException(f'the response has more than {_LARGEST:,} bytes')
    if time.monotonic() > end:
      raise TimeoutError('timed out')


def _seconds(text: str | None) -> float | None:
  """The seconds that a server asks to wait, from a number or a date; None if it names neither."""
  if text is None:
    return None
  if text.isascii() and text.isdigit():
    return float(text[:6])
  try:
    date = email.utils.parsedate_to_datetime(text)
    return max(0.0, date.timestamp() - time.time())
  except (ValueError, OverflowError):
    return None


def _count(usage: Any, name: str) -> int:
  """A count of tokens, 0 if it is missing or something else."""
  if not isinstance(usage, dict):
    return 0
  count = usage.get(name)
  if not isinstance(count, int) or count < 0:
    return 0
  return count
