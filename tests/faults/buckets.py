"""Runs in a bucket: kills, errors of the service, expired credentials, and two trainers."""

from collections.abc import Iterator
import contextlib
import importlib.util
import itertools
import json
import pathlib
import random
import re
import signal

from faults.harness import KILL, STEPS, Harness, another_container, ended, wait_for
from faults.kills import BITS, REPEATED
from faults.table import Trial, Unavailable, fault

# Requests of a save, in their order: (name, method, object, path). A run is killed during one.
PHASES = (
  ('arrays are uploaded', 'POST', r'.*/\d+\.unfinished-.*/d/.*', '/upload/.*'),
  ('metrics are uploaded', 'POST', r'.*/metrics\.jsonl.*', '.*'),
  ('objects get their final names', 'POST', '.*', '.*/rewriteTo/.*'),
  ('the manifest is written', 'POST', r'.*/manifest\.md5', '.*'),
  ('the step begins to count', 'POST', r'.*/trainer\.lock', '.*'),
  ('unfinished objects are deleted', 'DELETE', r'.*/\d+\.unfinished-.*', '.*'),
  ('an old step is deleted', 'DELETE', r'.*/checkpoints/\d+/.*', '.*'),
)
_QUICK = '--gin.checkpoint_every=12'  # two saves
_REFUSED = 74


@contextlib.contextmanager
def service() -> Iterator[tuple]:
  """(a server of a bucket, the options of runs that use it)."""
  if importlib.util.find_spec('gcsfs') is None:
    raise Unavailable("the clients of buckets are missing: pip install '.[gcs]'")
  from faults.fake_gcs import FakeGcs  # noqa: PLC0415

  with FakeGcs() as server:
    yield server, {'environment': server.environment}


def _place(name: str) -> str:
  return f'--model_dir=gs://bucket/{name}'


def saved(server, name: str) -> list[int]:
  """The steps of a run that count."""
  lock = server.objects().get(f'{name}/trainer.lock')
  return json.loads(lock.data)['steps'] or [] if lock else []


def _failure(harness: Harness, server, name: str, code: int) -> str | None:
  """What is wrong with a run that should have come to its end."""
  if code != 0:
    return f'exit code {code}: {harness.said(name)[-400:]}'
  if saved(server, name)[-1:] != [STEPS]:
    return f'{saved(server, name)} are saved'
  left = [one for one in server.objects() if re.match(rf'{name}/(set_aside|.*unfinished)', one)]
  return f'{left[0]} is left' if left else harness.difference(name)


def _nth(when, number: int):
  """A predicate that holds for request `number` among the requests of another predicate."""
  counter = itertools.count(1)
  return lambda call: when(call) and next(counter) == number


@fault('kill -9 in each phase of a save in a bucket', BITS, full=50, short=1, unit=REPEATED)
def kills(harness: Harness, times: int) -> Iterator[Trial]:
  chance = random.Random(harness.random.random())
  with service() as (server, options):
    from faults.fake_faults import on  # noqa: PLC0415

    chosen = itertools.islice(itertools.cycle(PHASES[:: max(1, len(PHASES) // times)]), times)
    for phase, method, target, path in chosen:
      name, which = harness.new(), chance.randint(2, 5)
      when = _nth(on(method, f'bucket/{name}{target}', path), which)
      held = server.hold(when, times=1)
      process = harness.start(name, _place(name), **options)
      came = wait_for(lambda held=held: held.wait(0.0), process)
      process.send_signal(KILL)
      process.wait()
      held.end()
      code = ended(harness.start(name, _place(name), **options))
      failure = _failure(harness, server, name, code) if came else 'it was never killed'
      yield Trial(f'{phase}, request {which}', failure, harness.repeated(name))
      harness.forget(name)


def _undisturbed(harness: Harness, server, options, name: str, *flags: str) -> str | None:
  process = harness.start(name, _place(name), *flags, **options)
  return _failure(harness, server, name, ended(process))


@fault('one in ten requests to a bucket fails with 429, 500 or 503', BITS, full=6)
def errors(harness: Harness, times: int) -> Iterator[Trial]:
  with service() as (server, options):
    for number in range(times):
      status, name = (503, 429, 500)[number % 3], harness.new()
      burst = server.fail(status, probability=0.1)
      yield Trial(f'status {status}', _undisturbed(harness, server, options, name, _QUICK))
      burst.end()
      harness.forget(name)


MARKS = ('/', '', '_$folder$')  # of Cloud Console and gcsfuse, of other programs, of Hadoop


@fault(
  'objects that mark the folders of a run in a bucket, and its steps, evaluation and others',
  'change nothing: the run continues, is evaluated and tidied, bit for bit',
  full=3,
)
def marks(harness: Harness, times: int) -> Iterator[Trial]:
  with service() as (server, options):
    for mark in MARKS[:times]:
      name = harness.new()

      def marked(name=name, mark=mark):
        paths = [pathlib.PurePosixPath(each) for each in server.objects()]
        folders = {str(folder) for path in paths for folder in path.parents} | {name}
        for folder in folders | {f'{name}/eval', f'{name}/checkpoints', f'{name}/checkpoints/4'}:
          if folder.startswith(name) and (mark or '/state' not in folder):
            server.put(f'{folder}{mark}', b'')

      marked()
      kill = ('--gin.Act.at=13', '--gin.Act.action="kill"')
      failure = harness.ending(name, harness.start(name, _place(name), *kill, **options), -KILL)
      marked()
      failure = failure or harness.outcome(name, harness.start(name, _place(name), **options))
      if saved(server, name)[-1:] != [STEPS] or f'{name}/set_aside' in '\n'.join(server.objects()):
        failure = failure or f'{saved(server, name)} are saved'
      marked()
      evaluation = harness.start(name, _place(name), '--run_mode=eval', **options)
      failure = failure or harness.ending(name, evaluation)
      yield Trial(f'FOLDER{mark}', failure)
      harness.forget(name)


@fault('slow and torn uploads to a bucket, and answers that get lost', BITS, full=6)
def connections(harness: Harness, times: int) -> Iterator[Trial]:
  with service() as (server, options):
    from faults.fake_faults import on  # noqa: PLC0415

    changes = on('POST|PUT|DELETE')
    for number in range(times):
      name, kind = harness.new(), ('lose', 'tear', 'delay')[number % 3]
      if kind == 'delay':
        trouble = server.delay(0.3, changes)
      else:
        trouble = getattr(server, kind)(changes, times=None, probability=0.1)
      yield Trial(kind, _undisturbed(harness, server, options, name, _QUICK))
      trouble.end()
      harness.forget(name)


@fault('a credential that expires while a run trains in a bucket', BITS, full=3)
def credentials(harness: Harness, times: int) -> Iterator[Trial]:
  with service() as (server, options):
    server.require_tokens()
    server.token_seconds = 3
    # An emulator, by its own variable, is asked without credentials.
    environment = {**options['environment'], **_with_credentials(server.url)}
    for _ in range(times):
      name = harness.new()
      process = harness.start(name, _place(name), '--gin.Pace.seconds=0.2', environment=environment)
      wait_for(lambda name=name: len(saved(server, name)) >= 2, process)
      server.expire_tokens()
      yield Trial('after two saves', _failure(harness, server, name, ended(process)))
      harness.forget(name)


@fault(
  'a second trainer in a bucket, of this machine or another',
  'is refused, and the first one goes on bit for bit',
  full=4,
)
def second_trainer(harness: Harness, times: int) -> Iterator[Trial]:
  with service() as (server, options):
    for number in range(times):
      name, other = harness.new(), harness.new()
      first = harness.start_and_hold(name, 6, _place(name), **options)
      wait_for(lambda name=name: len(saved(server, name)) >= 1, first)
      prefix = another_container() if number % 2 else ()
      code = ended(harness.start(other, _place(name), prefix=prefix, **options))
      failure = None if code == _REFUSED else f'exit code {code} of the second'
      harness.release(name)
      code = ended(first)
      failure = failure or _failure(harness, server, name, code)
      yield Trial('another container' if number % 2 else 'this container', failure)
      harness.forget(name)
      harness.forget(other)


@fault(
  'a trainer in a bucket that is paused for longer than its lease',
  'adds no step after another one has taken over, and ends with 74',
  full=3,
)
def paused(harness: Harness, times: int) -> Iterator[Trial]:
  with service() as (server, options):
    for _ in range(times):
      name, other = harness.new(), harness.new()
      first = harness.start(name, _place(name), '--gin.Pace.seconds=0.5', **options)
      wait_for(lambda name=name: len(saved(server, name)) >= 1, first)
      first.send_signal(signal.SIGSTOP)
      second = harness.start(other, _place(name), prefix=another_container(), **options)
      code = ended(second)
      first.send_signal(signal.SIGCONT)
      failure = _failure(harness, server, name, ended(first) - _REFUSED + code)
      if failure and failure.startswith('steps'):  # the other one has taken them
        failure = harness.difference(other, whole=False)
      yield Trial('after a save', failure)
      harness.forget(name)
      harness.forget(other)


def _with_credentials(url: str) -> dict[str, str]:
  """The variables by which clients use another address as they do the service."""
  return {
    'STORAGE_EMULATOR_HOST': '',
    'FSSPEC_GCS': json.dumps({'endpoint_url': url}),
  }
