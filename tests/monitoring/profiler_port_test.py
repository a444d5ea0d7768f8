"""The port at which people look at a running process."""

import socket

from held_ports import held_port
import pytest

from valkyrie.monitoring.profiler_port import listening_at


def test_a_profiler_listens_as_long_as_the_run():
  said = []
  port = held_port()
  with listening_at(port, said.append):
    socket.create_connection(('localhost', port)).close()
    with listening_at(None, said.append):
      pass
  (line,) = said
  assert line.startswith(f'the profiler listens at port {port}, of every network')


def test_a_port_of_these_tests_is_held():
  port = held_port()
  with socket.socket() as other, pytest.raises(OSError, match='in use'):
    other.bind(('', port))


def test_a_port_that_is_taken_is_said_and_ends_nothing():
  said = []
  with (
    socket.create_server(('', 0)) as server,
    listening_at(server.getsockname()[1], said.append),
  ):
    pass
  (line,) = said
  assert 'Address already in use' in line and 'train.profiler_port' in line
