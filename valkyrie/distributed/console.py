"""A program and its console: the signals that stop it, and standard streams that never stop it."""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import io
import os
import signal
import sys
from typing import Any, TextIO, cast

from valkyrie.errors import StorageError, ValkyrieError, reason_of, storage_errors

# The signals that ask a process to save and end.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def heard_signals() -> tuple[signal.Signals, ...]:
  """The stop signals to handle: all, except a SIGHUP that nohup lets the process ignore."""
  ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
  return tuple(number for number in STOP_SIGNALS if number != signal.SIGHUP or not ignored)


# The interrupts of a program that ends after its run; None in a notebook, which goes on.
_interrupts: list[int] | None = None


@contextlib.contextmanager
def of_a_program() -> Iterator[None]:
  """The context of a program that ends after its run.

  SIGINT ends it at once until `raise_interrupts`, since interrupted imports raise errors other than
  KeyboardInterrupt, or none. Later such errors are converted to KeyboardInterrupt.
  """
  global _interrupts  # noqa: PLW0603
  interrupts = _interrupts = []
  if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell's jobs ignore it
    signal.signal(signal.SIGINT, signal.SIG_DFL)
  try:
    yield
  except Exception as error:
    if interrupts:
      raise KeyboardInterrupt from error
    raise
  finally:
    _interrupts = None


def raise_interrupts() -> None:
  """Lets SIGINT raise KeyboardInterrupt in a program from now on."""
  if (interrupts := _interrupts) is None or signal.getsignal(signal.SIGINT) is not signal.SIG_DFL:
    return

  def interrupt(number: int, frame: Any) -> None:
    interrupts.append(number)
    signal.default_int_handler(number, frame)

  signal.signal(signal.SIGINT, interrupt)


def restore_handlers(handlers: Mapping[signal.Signals, Any], stopped: bool) -> None:
  """Restores the handlers from before a run.

  Once a signal has `stopped` the run of a program, others are ignored: they would change its exit
  code, or print a traceback.
  """
  ends = stopped and _interrupts is not None
  for number, handler in handlers.items():
    signal.signal(number, signal.SIG_IGN if ends else handler)


class LastingStream:
  """A stream whose reader may go away: what cannot be written is dropped, for the reason `lost`."""

  def __init__(self, stream: TextIO | None):  # None: it was closed before Python started
    self.stream, self.lost = stream, ''
    self._stream = stream or open(os.devnull, 'w')  # noqa: SIM115, for as long as the process

  def write(self, text: str) -> int:
    self._attempt(self._stream.write, text)
    return len(text)

  def flush(self) -> None:
    self._attempt(self._stream.flush)

  def _attempt(self, write: Callable[..., Any], *arguments: str) -> None:
    try:
      write(*arguments)
    except (OSError, ValueError) as error:
      self.lost = self.lost or reason_of(error)

  def end(self) -> None:
    """Drops what cannot be written, which would make Python exit with 120."""
    with contextlib.suppress(OSError, ValueError):
      try:
        self._stream.flush()
      except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
        self._stream.flush()

  def __getattr__(self, name: str) -> Any:
    return getattr(self._stream, name)


@contextlib.contextmanager
def standard_output(advice: str) -> Iterator[TextIO]:
  """Standard output, in UTF-8, of a program whose result it is.

  Raises a StorageError with the advice if it is closed or cannot be written.
  """
  stream = sys.stdout.stream if isinstance(sys.stdout, LastingStream) else sys.stdout
  if stream is None:
    raise StorageError(f'Standard output is closed. Open it, or {advice}')
  if isinstance(stream, io.TextIOWrapper):  # not in a notebook
    stream.reconfigure(encoding='utf-8')
  try:
    with storage_errors('Standard output cannot be written', f'Make room, or {advice}'):
      yield stream
      stream.flush()
  finally:
    LastingStream(stream).end()


def printed(text_of: Callable[[], str]) -> int:
  """Prints a text, which is the result of the program; returns the exit code of its errors."""
  try:
    text = text_of()
    with standard_output('name another file after >.') as file:
      file.write(text)
  except ValkyrieError as error:
    print(f'valkyrie: {error}', file=sys.stderr)
    return error.exit_code
  return 0


@contextlib.contextmanager
def lasting_streams() -> Iterator[None]:
  """A context, or a decorator, in which losing a standard stream raises nothing."""
  for descriptor in range(3):
    try:
      os.fstat(descriptor)
    except OSError:  # closed: a file of the run would get its number, and foreign output
      os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
  output, errors = LastingStream(sys.stdout), LastingStream(sys.stderr)
  try:
    with contextlib.redirect_stdout(cast(TextIO, output)), contextlib.redirect_stderr(errors):
      yield
  finally:
    output.flush()
    if output.lost:
      print(f'A part of standard output was lost ({output.lost}).', file=errors)
    output.end()
    errors.end()
