"""The command that has an endpoint answer requests; see `exchange` for the files.

    python -m valkyrie.lab.decomposition.ask RUN/labels_STEP/prompts.jsonl \\
        RUN/labels_STEP/labels.jsonl --model NAME --send

It says how many tokens there are, and sends nothing without --send. Each answer is written as it
comes, and a request that has one is not sent again: the same command continues.
"""

import argparse
from collections.abc import Sequence
from concurrent import futures
import os
import pathlib
import sys
import threading
from typing import Any, BinaryIO

from valkyrie import foreign
from valkyrie.distributed import console
from valkyrie.errors import Unreachable, UsageError, converted, first_of, with_home, write_errors
from valkyrie.lab.decomposition import exchange
from valkyrie.lab.decomposition.endpoint import KEY, URL, Answer, Endpoint, Failed
from valkyrie.lab.decomposition.exchange import Request
from valkyrie.storage import appended, locks

_BYTES_PER_TOKEN = 4  # of English text, by the tokenizers of large models
_MOST_FAILURES = 5  # in a row, after which the endpoint is given up
_MOST_NAMED = 3
_LARGEST = 100_000  # of a flag
_LIMITS = ('max_tokens', 'max_completion_tokens')
_FIXED = {'model': '--model', 'messages': 'the file of requests'}  # fields: their origins
_ABOUT = f"""Has an endpoint in the form of OpenAI's chat completions answer requests. The variables
{URL} and {KEY} of the environment have its address and key."""


@console.program
def main(arguments: Sequence[str] | None = None) -> None:
  """Says what would be sent, and sends it with --send."""
  parser = argparse.ArgumentParser(description=_ABOUT, allow_abbrev=False)
  parser.add_argument('requests', help='a file of requests, such as prompts.jsonl')
  parser.add_argument('answers', help='the file of answers, which grows')
  parser.add_argument('--model', required=True, help='the name that the endpoint gives the model')
  parser.add_argument('--send', action='store_true', help='send the requests')
  parser.add_argument(
    '--fields',
    default='{"max_tokens": 300}',
    help='more fields of each request, as a JSON object (default: %(default)s)',
  )
  parser.add_argument(
    '--at_once',
    type=int,
    default=4,
    help='requests under way (default: %(default)s)',
  )
  parser.add_argument(
    '--timeout',
    type=float,
    default=120,
    help='seconds of an attempt (default: %(default)s)',
  )
  parser.add_argument(
    '--attempts',
    type=int,
    default=5,
    help='attempts of a request (default: %(default)s)',
  )
  flags = parser.parse_args(arguments)
  console.print_result(_plan(flags))
  if flags.send:
    console.print_result(_send(flags))


def _plan(flags: argparse.Namespace) -> str:
  """What is said before anything is sent."""
  for name in ('at_once', 'timeout', 'attempts'):
    value = getattr(flags, name)
    if not 0 < value <= _LARGEST:
      raise UsageError(f'--{name}={value} is out of range. Use a number from 1 to {_LARGEST:,}.')
  fields = _fields(flags)
  requests = exchange.read_requests(_path(flags.requests))
  unanswered = _unanswered(requests, exchange.read_answers(_path(flags.answers)))
  size = sum(request.size for request in unanswered)
  limits = [fields[name] for name in _LIMITS if isinstance(fields.get(name), int)]
  written = 'an unlimited number of tokens'
  if limits:
    written = f'at most {min(limits) * len(unanswered):,} tokens'
  lines = [
    f'{len(unanswered):,} of {len(requests):,} requests have no answer.',
    f'They have about {size // _BYTES_PER_TOKEN:,} tokens, by {_BYTES_PER_TOKEN} bytes of UTF-8 '
    f'each; the answers may have {written}. A repeated attempt sends its request again.',
  ]
  if flags.send:
    lines.append(f'They go to {_endpoint(flags, threading.Event()).place}.')
  else:
    lines.append('Nothing was sent. Add --send to send them.')
  return ''.join(f'{line}\n' for line in lines)


def _fields(flags: argparse.Namespace) -> dict[str, Any]:
  """The fields of the body of each request."""
  advice = 'Write it as \'{"max_tokens": 300}\'.'
  with converted((ValueError,), UsageError, '--fields cannot be used', advice):
    fields = foreign.json_object(flags.fields.encode(errors='replace'))
  for name, origin in _FIXED.items():
    if name in fields:
      raise UsageError(
        f'--fields has {name!r}: {foreign.shown(repr(fields[name])):.80}, but this field comes '
        f'from {origin}. Leave it out of --fields.'
      )
  return {**fields, 'model': flags.model}


def _endpoint(flags: argparse.Namespace, stopped: threading.Event) -> Endpoint:
  """The endpoint of the environment, whose attempts end with the event."""
  fields = _fields(flags)
  return Endpoint(fields, timeout=flags.timeout, attempts=flags.attempts, wait=stopped.wait)


def _path(name: str) -> pathlib.Path:
  return pathlib.Path(with_home(name))


def _unanswered(requests: Sequence[Request], answers: Any) -> list[Request]:
  return [request for request in requests if request.id not in answers]


def _send(flags: argparse.Namespace) -> str:
  """Sends the requests that have no answer, and writes the answers; returns what is said of it."""
  stopped = threading.Event()
  endpoint = _endpoint(flags, stopped)
  requests = exchange.read_requests(_path(flags.requests))
  path = _path(flags.answers)
  done = _Done()
  may_fail = write_errors(f'{path} cannot be written', 'name another file')
  with may_fail, appended.opened(path) as file:
    if locks.attempt(file) is False:
      raise UsageError(
        f'Another process writes {path} now. Wait until it has ended, or name another file.'
      )
    unanswered = _unanswered(requests, exchange.read_answers(path))
    _end_last_line(file)
    threads = futures.ThreadPoolExecutor(flags.at_once)
    try:
      under_way = {threads.submit(_outcome, endpoint, each): each for each in unanswered}
      for future in futures.as_completed(under_way):
        done.add(under_way[future], future.result(), file)
        if done.is_hopeless:
          break
    finally:
      stopped.set()
      threads.shutdown(wait=False, cancel_futures=True)
  return done.summary(endpoint.place, len(unanswered))


def _outcome(endpoint: Endpoint, request: Request) -> Answer | Failed:
  """The answer to a request, or why there is none."""
  try:
    return endpoint.answer(request)
  except Failed as failure:
    return failure


def _end_last_line(file: BinaryIO) -> None:
  """Ends the last line of a file, which another program may have left without its end."""
  size = file.seek(0, os.SEEK_END)
  if size:
    file.seek(size - 1)
    if file.read(1) != b'\n':
      appended.write_whole(file, b'\n')


class _Done:
  """The outcomes so far.

  is_hopeless: whether the requests that are left would fail, too.
  """

  def __init__(self):
    self.is_hopeless = False
    self._answers = 0
    self._read = 0
    self._written = 0
    self._failures: list[str] = []
    self._in_a_row = 0

  def add(self, request: Request, outcome: Answer | Failed, file: BinaryIO) -> None:
    """Writes an answer, or remembers a failure."""
    if isinstance(outcome, Answer):
      line = exchange.line_of({'id': request.id, 'answer': outcome.text})
      appended.write_whole(file, line)
      self._answers += 1
      self._read += outcome.read
      self._written += outcome.written
      self._in_a_row = 0
      return
    self._failures.append(f'{foreign.shown(request.id)}: {outcome}')
    self._in_a_row += 1
    if outcome.ends or self._in_a_row == _MOST_FAILURES:
      self.is_hopeless = True

  def summary(self, place: str, asked: int) -> str:
    """What is printed at the end; raises an Unreachable if a request has no answer."""
    text = f'{place} answered {self._answers:,} of {asked:,} requests.'
    if self._read:
      text += f' It counted {self._read:,} tokens in them, and {self._written:,} in its answers.'
    if self._answers < asked:
      first = '; '.join(first_of(self._failures, _MOST_NAMED))
      raise Unreachable(
        f'{text} No answer: {first}. Mend what this says, and run the same command again: the '
        'answers are kept, and only the other requests are sent.'
      )
    return f'{text}\n'


if __name__ == '__main__':
  sys.exit(main())
