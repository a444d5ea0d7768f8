"""Ports for the servers of tests, which no other process is given meanwhile."""

import socket

_held: list[socket.socket] = []


def held_port() -> int:
  """A free port, held until this process ends.

  The socket that holds it does not listen, and shares it with servers that share addresses, as
  those of gRPC, Python and SLURM do. The system gives it to nobody who asks for any port.
  """
  holder = socket.socket()
  holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
  holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
  holder.bind(('', 0))
  _held.append(holder)
  return holder.getsockname()[1]
