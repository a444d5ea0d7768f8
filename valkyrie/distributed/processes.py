"""The processes of one run: start-up, exchange of values, and a common end.

The processes exchange values through the key-value store of jax's coordination service, in process
0. No device takes part: the exchange works before anything is compiled, in any thread, and while
the devices wait for a lost process. A run of one process exchanges nothing and does not import jax.

A process announces its exit code before it ends. The other processes read it within half a second:
on 75 (stop and save) each sends itself a SIGTERM, and on any other code it ends at once with that
code. If a process dies without an announcement, jax's own heartbeat aborts the others (134).
"""

import atexit
import contextlib
import json
import os
import signal
import sys
import threading
import time
from typing import Any, NamedTuple

from valkyrie.distributed import heartbeat
from valkyrie.errors import ConfigurationError, Preempted, Unreachable

COORDINATOR = '127.0.0.1:8476'  # the default: only processes of this machine can join
DETECTED = 'auto'  # in place of the number of processes: jax detects the cluster

_HEARTBEAT_SECONDS = 20  # after which jax reports a process that was killed or stopped
_EXCHANGE_SECONDS = 24 * 3600.0  # a supervisor, or jax's heartbeat, ends a hang sooner
_POLL_SECONDS = 0.5
_LINGER_SECONDS = 5.0  # in which the processes wait for each other at their end
_EXIT_SECONDS = 10.0  # for the exit handlers of a program that is held up
_LAST_WORDS_SECONDS = 3.0  # for a message before an end
_ENDING = 'valkyrie/ending/'  # keys of announced exit codes

_client: Any = None
_listener: threading.Thread | None = None
_exits = threading.Event()
_ending = threading.Lock()  # of the thread that ends this process
_code: int | None = None  # with which this process exits, once `exit_with` has named it
_is_held_up = False  # by a watcher that does not return
_index = 0
_count = 1
_turns: dict[str, int] = {}


class Member(NamedTuple):
  """One process of a run; all fields are None if jax detects the cluster."""

  coordinator: str | None
  processes: int | None
  process: int | None


def member(coordinator: str | None, processes: str, process: int | None) -> Member:
  """The process that the flags of these names describe.

  Process 0 listens at `coordinator` and nowhere else; None means COORDINATOR. Raises a
  ConfigurationError if the flags contradict each other, or one is invalid.
  """
  if processes == DETECTED:
    if coordinator is not None or process is not None:
      raise ConfigurationError(
        f'--processes={DETECTED} detects --coordinator and --process. Leave them out, or pass the '
        'number of processes.'
      )
    return Member(None, None, None)
  if not processes.isdecimal() or process is None or not 0 <= process < int(processes):
    raise ConfigurationError(
      f'--processes={processes} and --process={process} do not fit together. Pass the number of '
      f'processes and the number of this one, counted from 0, or only --processes={DETECTED}.'
    )
  address = coordinator or COORDINATOR
  host, _, port = address.rpartition(':')
  is_port = port.isdecimal() and 0 < int(port) < 2**16
  if not host or not is_port:
    raise ConfigurationError(
      f'--coordinator={address} is not an address. Use HOST:PORT, such as {COORDINATOR}.'
    )
  return Member(address, int(processes), process)


def join(this: Member, seconds: int) -> None:
  """Connects this process with the others; must be called before jax uses a device.

  Raises:
    ConfigurationError: jax detects no cluster.
    Unreachable: the other processes did not join within `seconds`.
  """
  global _client, _listener, _index, _count  # noqa: PLW0603, as jax: one cluster a process
  address = this.coordinator
  import jax  # noqa: PLC0415
  from jax._src import distributed  # noqa: PLC0415, the key-value store has no public name

  # jax's preemption service would handle SIGTERM instead of `preemption`.
  jax.config.update('jax_enable_preemption_service', False)
  where = address or 'the coordinator of the cluster that jax detected'
  failure = (
    f'The processes of this run did not connect at {where}: {{}}. Start all, each with its '
    'own --process, and check that the address is free and belongs to the host of process 0. Then '
    'run the same command again.'
  )
  # At its own time limit jax would abort with a C++ stack.
  late = failure.format(f'--join_seconds={seconds} have passed')
  timer = threading.Timer(seconds, abort, [late])
  timer.start()
  try:
    jax.distributed.initialize(
      address,
      this.processes,
      this.process,
      coordinator_bind_address=address,
      cluster_detection_method=None if address is None else 'deactivate',
      initialization_timeout=seconds + 60,
      heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
    )
  except (ValueError, TypeError, RuntimeError) as error:
    reason, _, _ = str(error).partition('\n')
    if isinstance(error, jax.errors.JaxRuntimeError):
      raise Unreachable(failure.format(reason)) from error
    if address is not None:
      raise
    raise ConfigurationError(
      f'--processes={DETECTED} found no cluster: {reason} jax detects TPU pods, SLURM, Kubernetes '
      'and MPI. Elsewhere pass --coordinator=HOST:PORT, --processes=N and --process=I.'
    ) from error
  finally:
    timer.cancel()
  _client = distributed.global_state.client
  _index = distributed.global_state.process_id
  _count = distributed.global_state.num_processes
  heartbeat.beat(process=_index)
  _listener = threading.Thread(target=_listen, name='cluster', daemon=True)
  _listener.start()


def exchange(name: str, value: Any, seconds: float = _EXCHANGE_SECONDS) -> list[Any]:
  """An all-gather of JSON: the `value` of every process, in the order of their numbers.

  All processes must make the same number of calls with a name, and each from one thread.

  Raises:
    ConfigurationError: there are several processes, and they have not joined.
    RuntimeError: raised by jax: a process is lost, or `seconds` have passed.
  """
  if _client is None:
    import jax  # noqa: PLC0415

    if jax.process_count() > 1:  # a TPU pod shows all its devices to every process
      raise ConfigurationError(
        f'{jax.process_count()} processes share these devices, but are not connected. Start each '
        f'process with --processes={DETECTED}.'
      )
    return [value]
  turn = _turns.get(name, 0) + 1
  _turns[name] = turn
  place = f'valkyrie/{name}/{turn}'
  _client.key_value_set(f'{place}/{_index}', json.dumps(value))
  milliseconds = int(seconds * 1000)
  _client.wait_at_barrier(place, milliseconds)
  found = {}
  for key, text in _client.key_value_dir_get(f'{place}/'):
    _, _, process = key.rpartition('/')
    found[process] = text
  if _index == 0 and turn > 1:  # all processes have read the values of the call before
    _client.key_value_delete(f'valkyrie/{name}/{turn - 1}/')
  texts = [found[str(process)] for process in range(_count)]
  return [json.loads(text) for text in texts]


def latest(name: str, value: Any) -> dict[int, Any]:
  """Tells the others a `value`, and returns {process: the latest that it has told}; waits for none.

  The value of a process that has told none, or cannot be asked, is missing. Values are JSON.
  """
  if _client is None:
    return {_index: value}
  place = f'valkyrie/latest/{name}/'
  found = {_index: value}
  with contextlib.suppress(RuntimeError):  # process 0 has ended
    _client.key_value_set(f'{place}{_index}', json.dumps(value), allow_overwrite=True)
    for key, text in _client.key_value_dir_get(place):
      _, _, process = key.rpartition('/')
      found[int(process)] = json.loads(text)
  return found


def announce(code: int) -> None:
  """Announces the exit code of this process, on which the other processes end too."""
  if _client is not None:
    with contextlib.suppress(RuntimeError):  # process 0 has ended
      _client.key_value_set(f'{_ENDING}{_index}', str(code), allow_overwrite=True)


def end(code: int, error: BaseException | None = None) -> None:
  """Exits, and ends the other processes; returns in a run of one process.

  A normal exit of Python would wait for the other processes, and for steps that cannot finish.
  Print messages before this call. The loss of another process may have raised an `error` of jax:
  this process then waits first, since jax may report the loss.
  """
  if _client is None:
    return
  if code != Preempted.exit_code and _is_of_jax(error):
    say('checking whether another process is lost')
    time.sleep(_HEARTBEAT_SECONDS + 5)  # if one is, `_listen` or jax ends this process meanwhile
  announce(code)
  _ending.acquire()  # for good
  import jax  # noqa: PLC0415

  with contextlib.suppress(RuntimeError):  # a process is lost, or comes later
    _client.wait_at_barrier(_ENDING, int(_LINGER_SECONDS * 1000))
    jax.distributed.shutdown()  # jax would abort a process that has not left before process 0 exits
  for stream in (sys.stdout, sys.stderr):
    with contextlib.suppress(OSError, ValueError):
      stream.flush()
  os._exit(code)


def exit_with(code: int) -> None:
  """Lets a program exit with `code` when Python's exit handlers have run, and nothing after them.

  After a signal jax 0.10 returns from a compilation that goes on in other threads. Python and C++
  would destroy what they use, and the process would end with a segmentation fault.
  """
  global _code  # noqa: PLW0603
  _code = code
  if _is_held_up:
    threading.Thread(target=_exit_in_time, args=(code,), daemon=True).start()


def exit_in_time() -> None:
  """Lets a program end that something holds up at its exit, such as a thread of a tracker."""
  global _is_held_up  # noqa: PLW0603
  _is_held_up = True


def _exit_in_time(code: int) -> None:
  time.sleep(_EXIT_SECONDS)
  os._exit(code)


def say(message: str) -> None:
  """Prints a message of this process to standard error."""
  print(f'valkyrie: {message}', file=sys.stderr, flush=True)


def say_in_a_thread(message: str) -> threading.Thread:
  """Prints a line to standard error in a thread, which a stream that waits cannot hold up."""
  line = {'file': sys.stderr, 'flush': True}
  thread = threading.Thread(target=print, args=(message,), kwargs=line, daemon=True)
  thread.start()
  return thread


def abort(message: str) -> None:
  """Exits with 75 after a message, from any thread; the other processes save and stop."""
  speaking = say_in_a_thread(f'valkyrie: {message}')
  speaking.join(_LAST_WORDS_SECONDS)
  end(Preempted.exit_code)
  os._exit(Preempted.exit_code)


@atexit.register  # before jax is imported, so that this comes after jax's own last barrier
def _exit() -> None:
  """Ends the thread: Python aborts if it exits while a thread is inside a call of jax."""
  _exits.set()
  if _listener is not None:
    _listener.join()
  if _code is not None:
    with contextlib.suppress(OSError):  # then Python says what it cannot write
      for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
          stream.flush()
      os._exit(_code)


def _listen() -> None:
  """Acts on the exit codes that other processes announce."""
  stopping = False
  while not _exits.wait(_POLL_SECONDS):
    endings = {}
    with contextlib.suppress(RuntimeError):  # process 0 has ended
      found = _client.key_value_dir_get(_ENDING)
      endings = {}
      for key, code in found:
        _, _, process = key.rpartition('/')
        endings[int(process)] = int(code)
    if endings.pop(_index, None) is not None:  # this process is ending
      stopping = True
    for process, code in endings.items():
      if code != Preempted.exit_code:
        say(f'process {process} ended with exit code {code}, and this process ends with it')
        end(code)
      # Without a handler, which start-up soon installs, the signal would set another exit code.
      handler = signal.getsignal(signal.SIGTERM)
      if not stopping and callable(handler):
        stopping = True
        say(f'process {process} is stopping, and this process stops with it')
        os.kill(os.getpid(), signal.SIGTERM)


def _is_of_jax(error: BaseException | None) -> bool:
  import jax  # noqa: PLC0415

  while error is not None and not isinstance(error, jax.errors.JaxRuntimeError):
    error = error.__cause__ or error.__context__
  return error is not None
