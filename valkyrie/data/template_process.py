"""The process that renders a chat template, which may loop or allocate without end."""

from collections.abc import Mapping, Sequence
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import threading
from typing import Any
import weakref

SECONDS = 5  # of a processor, for an answer
_PROGRAM = pathlib.Path(__file__).with_name('template_program.py')


class TemplateProcess:
  """A template that is compiled and rendered in a process of its own, started when it is needed."""

  def __init__(self, source: str, names: Mapping[str, str]):
    """Takes the template, and the names that it can use besides the messages."""
    self._first = {'source': source, 'names': dict(names)}
    self._lock = threading.Lock()
    self._process: subprocess.Popen | None = None

  def compile(self) -> None:
    """Starts the process; raises a ValueError if the template is wrong."""
    with self._lock:
      self._started()

  def render(
    self,
    messages: Sequence[Mapping[str, Any]],
    *,
    asks: bool,
    tools: Sequence[Any] | None = None,
  ) -> str:
    """The text of messages; raises a ValueError with the reason why there is none."""
    asked = {'messages': messages, 'asks': asks, 'tools': tools}
    with self._lock:
      return self._answer(self._started(), asked)

  def _started(self) -> subprocess.Popen:
    if self._process is None:
      folders = os.pathsep.join(filter(None, sys.path))
      process = subprocess.Popen(
        [sys.executable, '-P', str(_PROGRAM), str(SECONDS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        # It finds jinja2 where this process does.
        env=os.environ | {'PYTHONPATH': folders},
        start_new_session=True,  # the signals that stop a run are not for it
      )
      self._process = process
      weakref.finalize(self, _end, process)
      self._answer(process, self._first)
    return self._process

  def _answer(self, process: subprocess.Popen, asked: Mapping[str, Any]) -> str:
    assert process.stdin is not None and process.stdout is not None
    line = json.dumps(asked, default=str) + '\n'
    try:
      process.stdin.write(line.encode())
      process.stdin.flush()
      answer = process.stdout.readline()
    except BrokenPipeError:
      answer = b''
    if not answer:
      self._process = None
      _end(process)
      raise ValueError(
        f'its process ended with {process.returncode}: {SECONDS} seconds and 1 GiB are the most'
      )
    found = json.loads(answer)
    if 'error' in found:
      if asked is self._first:
        self._process = None
        _end(process)
      raise ValueError(found['error'])
    return found['text']


def _end(process: subprocess.Popen) -> None:
  process.kill()
  process.wait()
  for stream in (process.stdin, process.stdout):
    assert stream is not None
    with contextlib.suppress(OSError):  # of what it has not read
      stream.close()
