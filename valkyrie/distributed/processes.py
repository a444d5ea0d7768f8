"""The processes of one run: how they find each other, agree on small things, and end together.

A run of one process needs none of it and pays nothing. Several tell each other which step is whole,
who is to stop and what a row holds through the key-value store of jax's coordination service, which
process 0 keeps. No device takes part, so that it works before anything is compiled, in any thread,
and while the devices wait for a process that is gone. jax is imported when there is one to join.

What a process is going to end with, it announces first. The others hear of it within half a second:
a wish to stop reaches them as a SIGTERM, and anything worse ends them at once with the same code.
A process that dies without a word is missed by jax's own heartbeat, which aborts the others (134).
"""

import contextlib
import os
import signal
import sys
import threading
import time
from typing import Any

from valkyrie.distributed import heartbeat
from valkyrie.errors import ConfigurationError, Preempted, Unreachable

COORDINATOR = '127.0.0.1:8476'  # unless another is named: nothing outside this machine can join
DETECTED = 'auto'  # the number of processes where jax's cluster detection is to find it

_HEARTBEAT = 20  # seconds after which jax misses a process that was killed or stopped
_PATIENCE = 24 * 3600.0  # what waits longer has a supervisor, or jax's heartbeat, to end it
_POLL = 0.5
_LINGER = 5.0  # seconds that process 0 waits for the others: with it goes what they talk through
_ENDING = 'valkyrie/ending/'  # what a process is going to end with
_GONE = 'valkyrie/gone/'  # what it ended with

_client: Any = None
_index = 0
_count = 1
_turns: dict[str, int] = {}


def join(coordinator: str | None, processes: str, process: int | None, seconds: int) -> None:
  """Connects this process with the others; to be called before jax touches a device.

  Args:
    coordinator: HOST:PORT at which process 0 listens, and nowhere else; None is COORDINATOR.
    processes: how many there are; DETECTED leaves all three to jax's cluster detection (TPU pods,
      SLURM, Kubernetes, MPI).
    process: which one this is, from 0.
    seconds: how long to wait for the others.

  Raises:
    ConfigurationError: the numbers do not fit, or there is no cluster to detect.
    Unreachable: the others did not come in time.
  """
  global _client, _index, _count  # noqa: PLW0603, as jax keeps its own: one cluster a process
  address, count = _checked(coordinator, processes, process)
  import jax  # noqa: PLC0415
  from jax._src import distributed  # noqa: PLC0415, the key-value store has no public name

  # It would catch SIGTERM in place of `preemption`, and agrees on steps that a run may skip.
  jax.config.update('jax_enable_preemption_service', False)
  where = address or 'the coordinator of the cluster that jax found'
  apart = (
    f'The processes of this run did not come together at {where}: {{}}. Start all of them, each '
    'with its own --process, and see that the address is free and one of process 0; then run the '
    'same command again.'
  )
  # jax would abort where it runs out of time, with the stack of its own code.
  late = threading.Timer(seconds, _give_up, [apart.format(f'--join_seconds={seconds} are over')])
  late.daemon = True
  late.start()
  try:
    jax.distributed.initialize(
      address,
      count,
      process,
      coordinator_bind_address=address,
      cluster_detection_method=None if address is None else 'deactivate',
      initialization_timeout=seconds + 60,
      heartbeat_timeout_seconds=_HEARTBEAT,
    )
  except jax.errors.JaxRuntimeError as error:
    raise Unreachable(apart.format(_first_line(error))) from error
  except (ValueError, TypeError, RuntimeError) as error:
    if address is not None:
      raise
    raise ConfigurationError(
      f'--processes={DETECTED} found no cluster here: {_first_line(error)} jax knows TPU pods, '
      'SLURM, Kubernetes and MPI; elsewhere name --coordinator=HOST:PORT, --processes=N and '
      '--process=I.'
    ) from error
  finally:
    late.cancel()
  _client = distributed.global_state.client
  _index, _count = distributed.global_state.process_id, distributed.global_state.num_processes
  heartbeat.beat(process=_index)
  threading.Thread(target=_listen, name='cluster', daemon=True).start()


def exchange(name: str, text: str, seconds: float = _PATIENCE) -> list[str]:
  """What every process gives under this name, by their numbers; returns when all have.

  All processes call it as often as each other for a name, each time from one thread.

  Raises:
    ConfigurationError: there are several processes, and they were never joined.
    RuntimeError: of jax: a process is lost, or `seconds` are over.
  """
  if _client is None:
    import jax  # noqa: PLC0415

    if jax.process_count() > 1:  # a TPU pod shows all its devices to whoever asks
      raise ConfigurationError(
        f'These devices are shared by {jax.process_count()} processes, which do not know of each '
        f'other. Start each of them with --processes={DETECTED}.'
      )
    return [text]
  turn = _turns[name] = _turns.get(name, 0) + 1
  place = f'valkyrie/{name}/{turn}'
  _client.key_value_set(f'{place}/{_index}', text)
  _client.wait_at_barrier(place, int(seconds * 1000))
  found = {key.rpartition('/')[2]: value for key, value in _client.key_value_dir_get(f'{place}/')}
  if _index == 0 and turn > 1:  # all have read what came before
    _client.key_value_delete(f'valkyrie/{name}/{turn - 1}/')
  return [found[str(process)] for process in range(_count)]


def announce(code: int) -> None:
  """Says what this process is going to end with; the others follow, each in its way."""
  if _client is not None:
    _tell(_ENDING, code)


def end(code: int, error: BaseException | None = None) -> None:
  """Ends this process where it is one of several, and the others with it; else returns.

  Python would wait at its end for all processes to do the same, and for steps that can no longer be
  finished: so what is to be said is to be said before.

  Args:
    code: the exit code. 75 lets the others save what they can, any other ends them too.
    error: what it is for. When a process is lost, the others see errors of jax that are none of
      their own: before one of these is taken for a bug, it is waited for what jax finds out.
  """
  if _client is None:
    return
  if code != Preempted.exit_code and _is_of_jax(error):
    print('valkyrie: waiting whether another process is lost', file=sys.stderr, flush=True)
    time.sleep(_HEARTBEAT + 5)  # `_listen`, or jax, ends this process meanwhile if it is
  announce(code)
  _tell(_GONE, code)
  until = time.monotonic() + _LINGER
  while _index == 0 and time.monotonic() < until and len(_told(_GONE)) < _count:
    time.sleep(0.05)
  for stream in (sys.stdout, sys.stderr):
    with contextlib.suppress(OSError, ValueError):
      stream.flush()
  os._exit(code)


def _give_up(message: str) -> None:
  print(f'valkyrie: {message}', file=sys.stderr, flush=True)
  os._exit(Unreachable.exit_code)


def _checked(
  coordinator: str | None, processes: str, process: int | None
) -> tuple[str | None, int | None]:
  """(address, number of processes), None where they are to be detected."""
  if processes == DETECTED:
    if coordinator is not None or process is not None:
      raise ConfigurationError(
        f'--processes={DETECTED} finds --coordinator and --process by itself: leave them out, or '
        'give the number of processes.'
      )
    return None, None
  if not processes.isdecimal() or process is None or not 0 <= process < int(processes):
    raise ConfigurationError(
      f'--processes={processes} and --process={process}: expected how many processes there are, '
      f'and which of them this is, counted from 0; or --processes={DETECTED} alone.'
    )
  address = coordinator or COORDINATOR
  host, _, port = address.rpartition(':')
  if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
    raise ConfigurationError(f'--coordinator={address}: expected HOST:PORT, such as {COORDINATOR}.')
  return address, int(processes)


def _tell(place: str, code: int) -> None:
  with contextlib.suppress(RuntimeError):  # nobody is left to be told
    _client.key_value_set(f'{place}{_index}', str(code), allow_overwrite=True)


def _told(place: str) -> dict[int, int]:
  """{process: the code that it told}."""
  try:
    found = _client.key_value_dir_get(place)
  except RuntimeError:
    return {}
  return {int(key.rpartition('/')[2]): int(code) for key, code in found}


def _listen() -> None:
  asked = False
  while True:
    time.sleep(_POLL)
    endings = _told(_ENDING)
    asked = asked or _index in endings
    for process, code in endings.items():
      if process == _index:
        continue
      if code != Preempted.exit_code:
        print(f'valkyrie: process {process} ended with {code}', file=sys.stderr, flush=True)
        end(code)
      # Without a handler the signal would leave another exit code: there soon is one.
      if not asked and callable(signal.getsignal(signal.SIGTERM)):
        asked = True
        print(f'valkyrie: process {process} is to stop', file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)


def _is_of_jax(error: BaseException | None) -> bool:
  import jax  # noqa: PLC0415

  while error is not None:
    if isinstance(error, jax.errors.JaxRuntimeError):
      return True
    error = error.__cause__ or error.__context__
  return False


def _first_line(error: Exception) -> str:
  return str(error).partition('\n')[0]
