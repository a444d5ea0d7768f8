"""A program and its console: the signals that stop it, its standard streams and its last words."""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import functools
import io
import os
import signal
import sys
from typing import Any, ParamSpec, TextIO, cast

from valkyrie.distributed.unread import UnreadStream, may_wait
from valkyrie.errors import (
  StorageError,
  ValkyrieError,
  message_of,
  notes_of,
  reason_of,
  write_errors,
)
from valkyrie.foreign import shown_lines

_Arguments = ParamSpec('_Arguments')

# The signals that ask a process to save and end.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def heard_signals() -> tuple[signal.Signals, ...]:
  """The stop signals to handle: all, except a SIGHUP that nohup lets the process ignore."""
  ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
  numbers = []
  for number in STOP_SIGNALS:
    is_ignored = ignored and number == signal.SIGHUP
    if not is_ignored:
      numbers.append(number)
  return tuple(numbers)


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
  interrupts = _interrupts
  if interrupts is None or signal.getsignal(signal.SIGINT) is not signal.SIG_DFL:
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


def _descriptor(stream: TextIO | None) -> int | None:
  """Where a stream writes; None if that is elsewhere, as in a notebook, or kept in memory."""
  if not isinstance(stream, io.TextIOWrapper):
    return None
  try:
    return stream.fileno()
  except io.UnsupportedOperation:
    return None


class LastingStream:
  """A stream whose reader may go away: what cannot be written is dropped, for the reason `lost`.

  A reader that does not read is not waited for: see `unread`, whose stream is `raw`. Characters
  that a terminal would obey are shown instead: what is printed may quote a stranger.
  """

  def __init__(self, stream: TextIO | None):  # None: it was closed before Python started
    self.stream = stream
    self.lost = ''
    self._stream = stream or open(os.devnull, 'w')  # noqa: SIM115, for as long as the process
    self.raw: UnreadStream | None = None
    descriptor = _descriptor(stream)
    if isinstance(stream, io.TextIOWrapper) and descriptor is not None and may_wait(descriptor):
      self.raw = UnreadStream(descriptor)
      self._stream = io.TextIOWrapper(
        cast(Any, self.raw),
        encoding=stream.encoding,
        errors='backslashreplace',
        line_buffering=True,
        write_through=True,
      )

  def write(self, text: str) -> int:
    self._attempt(self._stream.write, shown_lines(text))
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
    if self.raw is not None and self.stream is not None:
      self.raw.restore()
      self.raw = None
      self._stream = self.stream
    _drop_the_rest(self._stream)

  def __getattr__(self, name: str) -> Any:
    return getattr(self._stream, name)


def _drop_the_rest(stream: TextIO) -> None:
  with contextlib.suppress(OSError, ValueError):
    try:
      stream.flush()
    except OSError:
      nowhere = os.open(os.devnull, os.O_WRONLY)
      os.dup2(nowhere, stream.fileno())
      os.close(nowhere)
      stream.flush()


def of_a_child(stream: Any) -> int | None:
  """The descriptor of a standard stream for a child process, which may wait; None inherits it."""
  if isinstance(stream, LastingStream) and stream.raw is not None:
    return stream.raw.waiting
  return None


class _Terminal:
  """A terminal on which a model's text, or a stranger's, is shown rather than obeyed."""

  def __init__(self, stream: TextIO):
    self._stream = stream

  def write(self, text: str) -> int:
    self._stream.write(shown_lines(text))
    return len(text)

  def __getattr__(self, name: str) -> Any:
    return getattr(self._stream, name)


@contextlib.contextmanager
def standard_output(otherwise: str) -> Iterator[TextIO]:
  """Standard output, in UTF-8, of a program whose result it is, and waits for its reader.

  A file or pipe gets the result as it is. A terminal is shown the characters that it would obey.

  Raises a StorageError if it is closed or cannot be written; `otherwise` is what to do instead.
  """
  stream: Any = sys.stdout
  raw: UnreadStream | None = None
  if isinstance(stream, LastingStream):
    raw = stream.raw
    stream = stream.stream
  if stream is None:
    raise StorageError(f'Standard output is closed. Open it, or {otherwise}.')
  if isinstance(stream, io.TextIOWrapper):  # not in a notebook
    stream.reconfigure(encoding='utf-8')
  file = stream
  if stream.isatty():
    file = cast(TextIO, _Terminal(stream))
  with contextlib.ExitStack() as stack:
    if raw is not None:
      stack.enter_context(raw.patiently())
    stack.callback(_drop_the_rest, stream)
    with write_errors('Standard output cannot be written', otherwise):
      yield file
      stream.flush()


def print_result(text: str) -> None:
  """Prints a text, which is the result of the program; raises as `standard_output`."""
  with standard_output('name another file after >') as file:
    file.write(text)


def explain(error: ValkyrieError | KeyboardInterrupt) -> int:
  """Prints why a program ends on standard error; returns its exit code."""
  if isinstance(error, KeyboardInterrupt):
    print('valkyrie: interrupted', file=sys.stderr)
    return 128 + signal.SIGINT
  lines = [f'valkyrie: {message_of(error)}', *notes_of(error)]
  print(shown_lines('\n'.join(lines)), file=sys.stderr)
  return error.exit_code


def program(main: Callable[_Arguments, int | None]) -> Callable[_Arguments, int]:
  """A decorator: `main` returns an exit code, and explains an error of ours or an interrupt."""

  @functools.wraps(main)
  def explained(*arguments: _Arguments.args, **options: _Arguments.kwargs) -> int:
    try:
      return main(*arguments, **options) or 0
    except (ValkyrieError, KeyboardInterrupt) as error:
      return explain(error)

  return explained


@contextlib.contextmanager
def lasting_streams() -> Iterator[None]:
  """A context, or a decorator, in which a standard stream that is lost or unread ends nothing."""
  for descriptor in range(3):
    try:
      os.fstat(descriptor)
    except OSError:  # closed: a file of the run would get its number, and foreign output
      os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
  output = LastingStream(sys.stdout)
  errors = LastingStream(sys.stderr)
  try:
    with contextlib.redirect_stdout(cast(TextIO, output)), contextlib.redirect_stderr(errors):
      yield
  finally:
    output.flush()
    reason = output.lost
    if not reason and output.raw and output.raw.dropped:
      reason = 'nobody read it'
    if reason:
      print(f'A part of standard output was lost ({reason}).', file=errors)
    output.end()
    errors.end()
