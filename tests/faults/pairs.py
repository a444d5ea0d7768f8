"""Faults in one of two processes of a run."""

from collections.abc import Iterator, Sequence
import functools
import time

from faults.commits import MOMENTS
from faults.data import alter, copied
from faults.harness import INT, STEPS, TERM, Harness, ended, heartbeats, wait_for
from faults.numbers import BAD, REFUSED, failure_at, parameter_hashes, refused_log, spiky
from faults.pair import BOTH, DEADLINE, NO_FLAGS, Pair, expected
from faults.table import Trial
from faults.table import fault as any_fault
from faults.world import compared, hashing, stopping

fault = functools.partial(any_fault, cores=2)  # one for each process

BAD_DATA, BUG, PREEMPTED, DIVERGED = 65, 70, 75, 76


def _in_one(process: int, at: int, action: str) -> list[Sequence[str]]:
  """The flags of each process: one performs the action, the other does nothing."""
  return [
    (f'--gin.Act.at={at if one == process else 0}', f'--gin.Act.action="{action}"') for one in BOTH
  ]


def _supervised(harness: Harness, times: int, action: str, *flags: str) -> Iterator[Trial]:
  expected(harness)
  for number in range(times):
    pair, process, at = Pair(harness), number % 2, harness.random.randint(2, 20)
    processes = pair.start(*flags, alone=_in_one(process, at, action), supervised=True)
    acted = harness.folder / f'{pair.of(process)}.acted'
    wait_for(acted.exists, processes[0])
    began = time.monotonic()

    def both_ended(name=pair.name):
      return {end['process'] for end in harness.endings(name)} == {*BOTH}

    wait_for(both_ended, processes[0])
    seconds = time.monotonic() - began
    codes = [ended(one) for one in processes]
    failure = pair.difference()
    if any(codes):
      failure = f'exit codes {codes}'
    elif seconds > DEADLINE + 10:
      failure = f'both ended after {seconds:.1f} s'
    codes_of = ', '.join(f'{end["process"]}: {end["code"]}' for end in harness.endings(pair.name))
    yield Trial(f'{action} in process {process} at step {at} ({codes_of})', failure, seconds)
    pair.forget()


_ENDED = f's until both ended, limit {DEADLINE} + 10'
_RESTARTED = 'both are restarted, continue bit for bit'


@fault('two processes: kill -9 of one', _RESTARTED, full=10, unit=_ENDED)
def killed(harness: Harness, times: int) -> Iterator[Trial]:
  yield from _supervised(harness, times, 'kill')


@fault('two processes: SIGSTOP of one', _RESTARTED, full=4, unit=_ENDED)
def stopped(harness: Harness, times: int) -> Iterator[Trial]:
  yield from _supervised(harness, times, 'stop')


@fault('two processes: a deadlock in one', _RESTARTED, full=4, unit=_ENDED)
def deadlocked(harness: Harness, times: int) -> Iterator[Trial]:
  yield from _supervised(harness, times, 'deadlock')


@fault(
  'two processes: a loader that stalls in one',
  _RESTARTED,
  full=4,
  unit=_ENDED,
)
def stalled(harness: Harness, times: int) -> Iterator[Trial]:
  feed = ('--gin.train.feed=@train/FaultyFeed', '--gin.FaultyFeed.fault="stall"')
  yield from _supervised(harness, times, 'stall', *feed)


@fault(
  'two processes: kill -9 of process 0 at each point of a commit and of its manifest',
  _RESTARTED,
  full=7,
)
def killed_in_a_commit(harness: Harness, times: int) -> Iterator[Trial]:
  for moment in list(MOMENTS)[:times]:
    pair = Pair(harness)
    once = [harness.folder / f'{pair.of(process)}.killed' for process in BOTH]
    flags = (
      f'--gin.KillIn.moment="{moment}"',
      '--gin.train.hooks=(@KillIn(), @HashState(), @Act())',
    )
    alone = [(f'--gin.KillIn.once="{path}"',) for path in once]  # process 1 never commits
    codes = [ended(one) for one in pair.start(*flags, alone=alone, supervised=True)]
    failure = pair.difference()
    if any(codes):
      failure = f'exit codes {codes}'
    elif 'exit code 137' not in pair.said(0):
      failure = 'it was never killed'
    yield Trial(moment, failure)
    pair.forget()


@fault(
  'two processes: an exception in one',
  'both end with 70, nothing more is saved',
  full=4,
)
def raised(harness: Harness, times: int) -> Iterator[Trial]:
  for number in range(times):
    pair, process, at = Pair(harness), number % 2, harness.random.randint(2, 23)
    alone = _in_one(process, at, 'fail')
    codes = [ended(one) for one in pair.start(alone=alone, supervised=True)]
    failure = None if codes == [BUG, BUG] else f'exit codes {codes}'
    if 'an injected bug' not in pair.said(process):
      failure = 'the exception was not shown'
    pair.run(alone=alone)
    yield Trial(f'in process {process} at step {at}', failure or pair.difference())
    pair.forget()


@fault(
  'two processes: SIGTERM or SIGINT to either, once or twice, in any stage',
  'both save the same step, end with 75, continue bit for bit',
  full=20,
  unit='s until both ended',
)
def terminated(harness: Harness, times: int) -> Iterator[Trial]:
  expected(harness)
  stages = ['step', 'save', 'start_up', 'step', 'compile']
  pair = Pair(harness)
  for number in range(times):
    process, stage = number % 2, stages[number % len(stages)]
    signals = [(TERM,), (INT, TERM), (INT,), (TERM, TERM)][number // 2 % 4]
    with heartbeats() as (options, beats):
      processes = pair.start('--gin.Pace.seconds=0.05', '--gin.eval_every=5', each=[options, {}])
      count = harness.random.randint(1, 8) if stage == 'step' else 1
      wait_for(functools.partial(beats.reached, stage, count), processes[0])
      time.sleep(harness.random.uniform(0, 0.1))
      began = time.monotonic()
      for one in signals:
        processes[process].send_signal(one)
        time.sleep(0.05)
      codes = [ended(one) for one in processes]
    what = f'{len(signals)} to process {process} in {stage}'
    failure = pair.difference(whole=codes == [0, 0])
    if codes == [0, 0]:  # the run ended before the signal
      pair.forget()
      pair = Pair(harness)
      yield Trial(f'{what}, at the end', failure)
      continue
    yield Trial(what, failure or _not_together(pair, codes), time.monotonic() - began)
  pair.run()
  if failure := pair.difference():
    yield Trial('at the end', failure)
  pair.forget()


def _not_together(pair: Pair, codes: Sequence[int]) -> str | None:
  """The failure of a common stop; None if both have saved the same step."""
  saved = max(pair.harness.saved(pair.name), default=0)
  done = [max(dict(pair.harness.hashes(pair.of(n))), default=0) for n in BOTH]
  if codes != [PREEMPTED, PREEMPTED]:
    return f'exit codes {codes}: {pair.said()[-400:]}'
  return None if done == [saved, saved] else f'steps {done} were executed, but {saved} is saved'


@fault(
  'two processes: SIGTERM in an evaluation',
  'both save the same step, end with 75, continue bit for bit',
  full=4,
)
def terminated_in_an_evaluation(harness: Harness, times: int) -> Iterator[Trial]:
  expected(harness)
  for number in range(times):
    pair, process, every = Pair(harness), number % 2, harness.random.choice((3, 5, 7, 9))
    alone = [NO_FLAGS[0], NO_FLAGS[0]]
    alone[process] = ('--gin.train.evaluator=@InterruptedEvaluator',)
    processes = pair.start(f'--gin.eval_every={every}', alone=alone)
    failure = _not_together(pair, [ended(one) for one in processes])
    if f'stopped after step {every} ' not in pair.said(1 - process):
      failure = 'it did not stop after this step'
    pair.run()
    yield Trial(f'in process {process}, after step {every}', failure or pair.difference())
    pair.forget()


@fault('two processes: NaN and infinity in the data of one', REFUSED, full=16)
def not_finite(harness: Harness, times: int) -> Iterator[Trial]:
  for number in range(times // len(BAD)):
    pair, process, value = Pair(harness), number % 2, ('nan', 'inf')[number // 2 % 2]
    paths = [harness.folder / f'{pair.of(n)}.parameters' for n in BOTH]
    pair.run(
      '--gin.train.feed=@train/FaultyFeed',
      f'--gin.FaultyFeed.fault="{value}"',
      f'--gin.FaultyFeed.steps={list(BAD)}',
      f'--gin.FaultyFeed.process={process}',
      '--gin.train.hooks=(@HashParameters(), @HashState(), @Act())',
      alone=[(f'--gin.HashParameters.path="{path}"',) for path in paths],
    )
    refused = [line['step'] for line in refused_log(harness, pair.name)]
    for step in BAD:
      failures = [failure_at(step, parameter_hashes(path), refused) for path in paths]
      yield Trial(f'{value} in process {process} in step {step}', failures[0] or failures[1])
    pair.forget()


@fault('two processes: values of one that stay NaN or infinite', 'both end with 76', full=2)
def stays_infinite(harness: Harness, times: int) -> Iterator[Trial]:
  for number in range(times):
    pair, value = Pair(harness), ('nan', 'inf')[number % 2]
    processes = pair.start(
      '--gin.train.feed=@train/FaultyFeed',
      f'--gin.FaultyFeed.fault="{value}"',
      f'--gin.FaultyFeed.steps={list(range(4, STEPS))}',
      f'--gin.FaultyFeed.process={number % 2}',
      '--gin.RefusedSteps.allowed=3',
    )
    codes = [ended(one) for one in processes]
    failure = None if codes == [DIVERGED, DIVERGED] else f'exit codes {codes}'
    if 'these documents of' not in pair.said():
      failure = 'no document was named'
    yield Trial(f'{value} in process {number % 2}', failure)
    pair.forget()


@fault(
  'two processes: a damaged document',
  'is skipped as by one process, or both end with 65',
  full=2,
  unit='relative difference of the loss',
)
def damaged_document(harness: Harness, times: int) -> Iterator[Trial]:
  for number in range(times):
    whole, pair, refused = harness.new(), Pair(harness), Pair(harness)
    data, store = copied(harness, whole)
    alter(store / f'shard-0000{number % 2}-of-00002', 5, 999)

    def read(name, budget, data=data):
      return [
        *hashing(harness, name),
        f'--gin.TaskFeed.data_dir="{data}"',
        f'--gin.TaskFeed.bad_documents={budget}',
      ]

    harness.run(whole, *read(whole, 1), partition='zero1', devices=2)
    pair.run(*read(pair.name, 1))
    failure, difference = compared(harness, whole, pair.name)
    codes = [ended(one) for one in refused.start(*read(refused.name, 0))]
    if codes != [BAD_DATA, BAD_DATA]:
      failure = f'exit codes {codes}'
    yield Trial(f'in shard {number % 2}', failure, difference)
    for name in (whole, pair.name, refused.name):
      harness.forget(name)


@fault(
  'two processes: a loss spike, with a rewind to the last checkpoint, and kill -9 of one',
  'is skipped, also by a pair that is killed in between',
  full=4,
)
def rewound_spikes(harness: Harness, times: int) -> Iterator[Trial]:
  spikes, flags = spiky(harness, times, 'rewind')
  whole, killed = Pair(harness), Pair(harness)
  whole.run(*flags)
  killed.run(*flags, alone=_in_one(1, spikes[0] + 3, 'kill'), supervised=True)
  refused = [line['step'] for line in refused_log(harness, whole.name) if 'why' in line]
  hashes = [[dict(harness.hashes(pair.of(n))) for n in BOTH] for pair in (whole, killed)]
  for step in spikes:
    failure = None if step in refused else 'was trained on'
    same = hashes[0] == hashes[1]
    yield Trial(f'step {step}', failure if same else 'the killed pair has other states')
  whole.forget()
  killed.forget()


@fault(
  'one process, then two, then one',
  'the same batches, the loss within 1e-4',
  full=2,
  unit='relative difference of the loss',
)
def one_two_one(harness: Harness, times: int) -> Iterator[Trial]:
  def read(name):
    return [*hashing(harness, name), '--gin.checkpoint_every=1']

  whole = harness.new()
  harness.run(whole, *read(whole), partition='zero1', devices=2)
  for number in range(times):
    pair, (first, second) = Pair(harness), ((8, 16), (5, 20))[number % 2]
    stops = [stopping(harness, pair.name, at) for at in (first, second)]
    alone = {'partition': 'zero1', 'devices': 2}
    harness.run(pair.name, *read(pair.name), *stops[0], **alone, code=PREEMPTED)
    codes = [ended(one) for one in pair.start(*read(pair.name), alone=[NO_FLAGS[0], stops[1]])]
    harness.run(pair.name, *read(pair.name), **alone)
    failure, difference = compared(harness, whole, pair.name)
    if codes != [PREEMPTED, PREEMPTED]:
      failure = f'exit codes {codes}'
    yield Trial(f'two from step {first} to {second}', failure, difference)
    pair.forget()
  harness.forget(whole)


@fault(
  'two processes: a third one with the number of one that lives',
  'is refused with 75, the others are not disturbed',
  full=2,
)
def a_number_twice(harness: Harness, times: int) -> Iterator[Trial]:
  expected(harness)
  for number in range(times):
    pair, process = Pair(harness), 1 - number % 2
    both = pair.start(alone=_in_one(0, 3, 'wait'))
    wait_for((harness.folder / f'{pair.of(0)}.acted').exists, both[0])
    of_third = harness.new()
    third = harness.start(
      of_third,
      f'--model_dir={harness.folder / pair.name}',
      *(flag for flag in both[process].args if flag.startswith(('--coordinator=', '--process'))),
      partition='zero1',
    )
    failure = None if ended(third) == PREEMPTED else f'it ended with {third.returncode}'
    named = f'process {both[process].pid} on' in harness.said(of_third)
    if failure is None and not named:
      failure = f'the holder was not named: {harness.said(of_third)[-300:]}'
    harness.release(pair.of(0))
    if any(codes := [ended(one) for one in both]):
      failure = failure or f'the others ended with {codes}'
    yield Trial(f'that of process {process}', failure or pair.difference())
    harness.forget(of_third)
    pair.forget()
