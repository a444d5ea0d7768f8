"""Program of the process in which a stranger's chat template runs; it imports nothing of ours.

It reads JSON lines, first {"source", "names"} and then {"messages", "tools", "asks"}, and answers
each with {"text"} or {"error"}. The sandbox of Jinja keeps the template from files and from the
attributes of Python, and the system limits the memory of this process and its time for each answer.
"""

import datetime
import functools
import json
import re
import resource
import sys
from typing import Any, NoReturn

import jinja2.sandbox  # pyright: ignore[reportMissingImports]

_MEMORY = 2**30  # bytes of addresses
_LONGEST = 2**26  # characters of a text
_DATE = datetime.date(2024, 7, 26)  # in Llama 3.2's template; today's would change texts every day
# Marks answers for an extension of Jinja in transformers; here they are found without it.
_GENERATION = re.compile(r'({%[-+]?\s*)(end)?generation(?=\s*[-+]?%})')


def _refuse(reason: str) -> NoReturn:
  raise ValueError(reason)


def _compiled(source: str, names: dict[str, Any]) -> Any:
  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=['jinja2.ext.loopcontrols'],
  )
  environment.globals |= names | {'raise_exception': _refuse, 'strftime_now': _DATE.strftime}
  environment.filters['tojson'] = functools.partial(json.dumps, ensure_ascii=False)
  unmarked = _GENERATION.sub(_as_condition, source)
  return environment.from_string(unmarked)


def _as_condition(tag: re.Match[str]) -> str:
  begin, end = tag.groups()
  if end:
    return f'{begin}endif'
  return f'{begin}if true'


def _text(template: Any, messages: Any, tools: Any, asks: bool) -> str:
  given = {'messages': messages, 'tools': tools, 'documents': None, 'add_generation_prompt': asks}
  pieces: list[str] = []
  length = 0
  for piece in template.generate(given):
    pieces.append(piece)
    length += len(piece)
    if length > _LONGEST:
      _refuse(f'it writes more than {_LONGEST:,} characters')
  return ''.join(pieces)


def _limit(seconds: int) -> None:
  """Ends this process by SIGXCPU unless the next answer takes so many seconds of a processor."""
  used = resource.getrusage(resource.RUSAGE_SELF)
  seconds_used = int(used.ru_utime + used.ru_stime)
  most = seconds_used + 1 + seconds
  _, hard = resource.getrlimit(resource.RLIMIT_CPU)
  resource.setrlimit(resource.RLIMIT_CPU, (most, hard))


def main(seconds: int) -> None:
  """Answers each line of standard input, until its end, within `seconds` of a processor."""
  resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
  template = None
  for line in sys.stdin:
    _limit(seconds)
    asked = json.loads(line)
    try:
      if template is None:
        template = _compiled(asked['source'], asked['names'])
        answer = {'text': ''}
      else:
        text = _text(template, asked['messages'], asked['tools'], asked['asks'])
        answer = {'text': text}
    except Exception as error:  # a stranger's code raises any
      answer = {'error': str(error) or type(error).__name__}
    print(json.dumps(answer), flush=True)


if __name__ == '__main__':
  main(int(sys.argv[1]))
