"""The process that builds token stores for a run, and keeps TensorFlow out of training.

It answers one order after the other, so that what a task loads is loaded once.
"""

from collections.abc import Iterator, Sequence
import contextlib
import contextvars
import json
import os
import shlex
import subprocess
import sys
from typing import Any

from valkyrie import errors
from valkyrie.distributed import heartbeat

_COMMAND = ('python', '-m', 'valkyrie.data.build_store')
_shared: contextvars.ContextVar['Builder | None'] = contextvars.ContextVar('builder', default=None)


class Builder:
  """The process, which the first order starts; a context manager, which ends it.

  It ends with this process, however this one ends: its standard input is a pipe, which the system
  closes. It sends the heartbeats of this process, and its progress goes to standard error.
  """

  def __init__(self):
    self._process: subprocess.Popen[str] | None = None

  def order(self, arguments: Sequence[str], task: str) -> Any:
    """What `python -m valkyrie.data.build_store` makes of these arguments: store.json, or rates.

    Raises:
      ValkyrieError: of the command, with its class and message.
      DataError: the process has ended; `task` says for what it was needed.
    """
    process = self._process = self._process or _started()
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
      print(json.dumps(list(arguments)), file=process.stdin, flush=True)
    if not (answer := process.stdout.readline()):
      self._process = None
      raise errors.DataError(
        f'{task} ended with exit code {process.wait()}; its output is above. Finished shards are '
        f'kept. Run again to continue, or run this by itself:\n  {command(arguments)}'
      )
    answered = json.loads(answer)
    if 'error' in answered:
      raise getattr(errors, answered['error'])(answered['message'])
    return answered['done']

  def __enter__(self) -> 'Builder':
    return self

  def __exit__(self, *_: object) -> None:
    if self._process is not None:
      self._process.kill()
      self._process.communicate()


@contextlib.contextmanager
def shared() -> Iterator[None]:
  """Within, one process answers all orders."""
  if _shared.get():
    yield
    return
  with Builder() as builder:
    token = _shared.set(builder)
    try:
      yield
    finally:
      _shared.reset(token)


def order(arguments: Sequence[str], task: str) -> Any:
  """`Builder.order`, of the shared process if there is one."""
  with contextlib.ExitStack() as stack:
    builder = _shared.get() or stack.enter_context(Builder())
    return builder.order(arguments, task)


def command(arguments: Sequence[str]) -> str:
  """The command line that does the same."""
  return shlex.join([*_COMMAND, *arguments])


def _started() -> subprocess.Popen[str]:
  # The process searches packages, such as a user's own, where this one does.
  path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
  return subprocess.Popen(
    [sys.executable, *_COMMAND[1:], '--orders'],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
    env=os.environ | {'PYTHONPATH': path},
    pass_fds=heartbeat.inherited(),
  )
