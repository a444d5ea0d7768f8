"""A port of jax's profiler, by which people look at a running process."""

from collections.abc import Callable, Iterator
import contextlib
import socket

import jax


@contextlib.contextmanager
def listening_at(port: int | None, say: Callable[[str], None]) -> Iterator[None]:
  """A context in which jax's profiler listens at a port; None listens at none.

  Process N of a run listens at `port` + N, since several may be on one machine. A port that is not
  free is reported, and the run goes on without it.
  """
  if port is None:
    yield
    return
  own_port = port + jax.process_index()
  try:
    # jax reports no failure, and shares a port with another profiler.
    socket.create_server(('', own_port)).close()
  except OSError as error:
    say(
      f'warning: the profiler cannot listen at port {own_port} ({error.strerror}); name another '
      'train.profiler_port'
    )
    yield
    return
  jax.profiler.start_server(own_port)
  say(
    f'the profiler listens at port {own_port}, of every network of this machine and without a '
    'password'
  )
  try:
    yield
  finally:
    jax.profiler.stop_server()
