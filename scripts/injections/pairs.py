"""Two processes that train as one: what happens to one of them, and what both come to."""

from collections.abc import Iterator, Sequence
import functools
import time

from injections.commits import MOMENTS
from injections.data import alter, copied
from injections.laboratory import INT, STEPS, TERM, Laboratory, ended, heartbeats, wait_for
from injections.numbers import BAD, REFUSED, learnt, refused_log, spiky, wrong_at
from injections.pair import BOTH, DEADLINE, NOTHING, Pair, expected
from injections.table import Trial, fault
from injections.world import compared, hashing, stopping

BAD_DATA, BUG, PREEMPTED, DIVERGED = 65, 70, 75, 76


def _to_one(process: int, at: int, what: str) -> list[Sequence[str]]:
  """Flags for each: one of them acts, and the other in no step."""
  return [
    (f'--gin.Act.at={at if one == process else 0}', f'--gin.Act.what="{what}"') for one in BOTH
  ]


def _supervised(lab: Laboratory, times: int, what: str, *flags: str) -> Iterator[Trial]:
  expected(lab)
  for number in range(times):
    pair, process, at = Pair(lab), number % 2, lab.random.randint(2, 20)
    processes = pair.start(*flags, alone=_to_one(process, at, what), supervised=True)
    acted = lab.folder / f'{pair.of(process)}.acted'
    wait_for(acted.exists, processes[0])
    began = time.monotonic()

    def gone(name=pair.name):
      return {end['process'] for end in lab.endings(name)} == {*BOTH}

    wait_for(gone, processes[0])
    seconds = time.monotonic() - began
    codes = [ended(one) for one in processes]
    found = pair.difference()
    if any(codes):
      found = f'exit codes {codes}'
    elif seconds > DEADLINE + 10:
      found = f'both gone after {seconds:.1f} s'
    told = ', '.join(f'{end["process"]}: {end["code"]}' for end in lab.endings(pair.name))
    yield Trial(f'{what} of process {process} at step {at} ({told})', found, seconds)
    pair.forget()


_GONE = f's until both are gone, of {DEADLINE} + 10'


@fault('two processes: kill -9 of one', 'both are started again, bit for bit', full=10, unit=_GONE)
def killed(lab: Laboratory, times: int) -> Iterator[Trial]:
  yield from _supervised(lab, times, 'die')


@fault('two processes: SIGSTOP of one', 'both are started again, bit for bit', full=4, unit=_GONE)
def stopped(lab: Laboratory, times: int) -> Iterator[Trial]:
  yield from _supervised(lab, times, 'stop')


@fault(
  'two processes: a deadlock in one', 'both are started again, bit for bit', full=4, unit=_GONE
)
def deadlocked(lab: Laboratory, times: int) -> Iterator[Trial]:
  yield from _supervised(lab, times, 'deadlock')


@fault(
  'two processes: a loader that stalls in one',
  'both are started again, bit for bit',
  full=4,
  unit=_GONE,
)
def stalled(lab: Laboratory, times: int) -> Iterator[Trial]:
  feed = ('--gin.train.feed=@train/FaultyFeed', '--gin.FaultyFeed.what="stall"')
  yield from _supervised(lab, times, 'stall', *feed)


@fault(
  'two processes: kill -9 of the first in each phase of a commit and of its manifest',
  'both are started again, bit for bit',
  full=7,
)
def killed_in_a_commit(lab: Laboratory, times: int) -> Iterator[Trial]:
  for moment in list(MOMENTS)[:times]:
    pair = Pair(lab)
    once = [lab.folder / f'{pair.of(process)}.died' for process in BOTH]
    flags = (f'--gin.DieIn.moment="{moment}"', '--gin.train.hooks=(@DieIn(), @HashState(), @Act())')
    alone = [(f'--gin.DieIn.once="{path}"',) for path in once]  # the second never commits
    codes = [ended(one) for one in pair.start(*flags, alone=alone, supervised=True)]
    found = pair.difference()
    if any(codes):
      found = f'exit codes {codes}'
    elif 'exit code 137' not in pair.said(0):
      found = 'it was never killed'
    yield Trial(moment, found)
    pair.forget()


@fault(
  'two processes: an exception in one',
  'both end with 70, saved is what was saved before',
  full=4,
)
def raised(lab: Laboratory, times: int) -> Iterator[Trial]:
  for number in range(times):
    pair, process, at = Pair(lab), number % 2, lab.random.randint(2, 23)
    alone = _to_one(process, at, 'fail')
    codes = [ended(one) for one in pair.start(alone=alone, supervised=True)]
    found = None if codes == [BUG, BUG] else f'exit codes {codes}'
    if 'an injected bug' not in pair.said(process):
      found = 'the exception was not shown'
    pair.run(alone=alone)
    yield Trial(f'in process {process} at step {at}', found or pair.difference())
    pair.forget()


@fault(
  'two processes: SIGTERM or SIGINT to either, once or twice, in any phase',
  'both save the same step, end with 75, go on bit for bit',
  full=20,
  unit='s to the end of both',
)
def asked(lab: Laboratory, times: int) -> Iterator[Trial]:
  expected(lab)
  phases = ['step', 'save', 'start_up', 'step', 'compile']
  pair = Pair(lab)
  for number in range(times):
    process, phase = number % 2, phases[number % len(phases)]
    signals = [(TERM,), (INT, TERM), (INT,), (TERM, TERM)][number // 2 % 4]
    with heartbeats() as (told, ours):
      processes = pair.start('--gin.Pace.seconds=0.05', '--gin.eval_every=5', each=[told, {}])
      beats = lab.random.randint(1, 8) if phase == 'step' else 1
      wait_for(functools.partial(ours.reached, phase, beats), processes[0])
      time.sleep(lab.random.uniform(0, 0.1))
      began = time.monotonic()
      for one in signals:
        processes[process].send_signal(one)
        time.sleep(0.05)
      codes = [ended(one) for one in processes]
    what = f'{len(signals)} to process {process} in {phase}'
    found = pair.difference(whole=codes == [0, 0])
    if codes == [0, 0]:  # it was done before the signal came
      pair.forget()
      pair = Pair(lab)
      yield Trial(f'{what}, at the end', found)
      continue
    yield Trial(what, found or _not_together(pair, codes), time.monotonic() - began)
  pair.run()
  if found := pair.difference():
    yield Trial('the end of it', found)
  pair.forget()


def _not_together(pair: Pair, codes: Sequence[int]) -> str | None:
  """What is wrong with how both stopped; None where both have saved the same step."""
  saved = max(pair.lab.saved(pair.name), default=0)
  done = [max(dict(pair.lab.hashes(pair.of(n))), default=0) for n in BOTH]
  if codes != [PREEMPTED, PREEMPTED]:
    return f'exit codes {codes}: {pair.said()[-400:]}'
  return None if done == [saved, saved] else f'steps {done} were done, and {saved} is saved'


@fault(
  'two processes: SIGTERM in an evaluation',
  'both save the same step, end with 75, go on bit for bit',
  full=4,
)
def asked_in_an_evaluation(lab: Laboratory, times: int) -> Iterator[Trial]:
  expected(lab)
  for number in range(times):
    pair, process, every = Pair(lab), number % 2, lab.random.choice((3, 5, 7, 9))
    alone = [NOTHING[0], NOTHING[0]]
    alone[process] = ('--gin.train.evaluator=@InterruptedEvaluator',)
    processes = pair.start(f'--gin.eval_every={every}', alone=alone)
    found = _not_together(pair, [ended(one) for one in processes])
    if f'stopped after step {every} ' not in pair.said(1 - process):
      found = 'it did not stop there'
    pair.run()
    yield Trial(f'in process {process}, after step {every}', found or pair.difference())
    pair.forget()


@fault("two processes: NaN and infinity in one's data", REFUSED, full=16)
def not_finite(lab: Laboratory, times: int) -> Iterator[Trial]:
  for number in range(times // len(BAD)):
    pair, process, what = Pair(lab), number % 2, ('nan', 'inf')[number // 2 % 2]
    paths = [lab.folder / f'{pair.of(n)}.learnt' for n in BOTH]
    pair.run(
      '--gin.train.feed=@train/FaultyFeed',
      f'--gin.FaultyFeed.what="{what}"',
      f'--gin.FaultyFeed.steps={list(BAD)}',
      f'--gin.FaultyFeed.process={process}',
      '--gin.train.hooks=(@HashLearnt(), @HashState(), @Act())',
      alone=[(f'--gin.HashLearnt.path="{path}"',) for path in paths],
    )
    refused = [line['step'] for line in refused_log(lab, pair.name)]
    for step in BAD:
      ways = [wrong_at(step, learnt(path), refused) for path in paths]
      yield Trial(f'{what} of process {process} in step {step}', ways[0] or ways[1])
    pair.forget()


@fault('two processes: numbers of one that stay infinite', 'both end with 76', full=2)
def stays_infinite(lab: Laboratory, times: int) -> Iterator[Trial]:
  for number in range(times):
    pair, what = Pair(lab), ('nan', 'inf')[number % 2]
    processes = pair.start(
      '--gin.train.feed=@train/FaultyFeed',
      f'--gin.FaultyFeed.what="{what}"',
      f'--gin.FaultyFeed.steps={list(range(4, STEPS))}',
      f'--gin.FaultyFeed.process={number % 2}',
      '--gin.RefusedSteps.allowed=3',
    )
    codes = [ended(one) for one in processes]
    found = None if codes == [DIVERGED, DIVERGED] else f'exit codes {codes}'
    if 'these documents of' not in pair.said():
      found = 'no document was named'
    yield Trial(f'{what} of process {number % 2}', found)
    pair.forget()


@fault(
  'two processes: a damaged document',
  'is passed over as by one process, or both end with 65',
  full=2,
  unit='relative difference of the loss',
)
def damaged_document(lab: Laboratory, times: int) -> Iterator[Trial]:
  for number in range(times):
    whole, pair, refused = lab.new(), Pair(lab), Pair(lab)
    data, store = copied(lab, whole)
    alter(store / f'shard-0000{number % 2}-of-00002', 5, 999)

    def read(name, budget, data=data):
      return [
        *hashing(lab, name),
        f'--gin.TaskFeed.data_dir="{data}"',
        f'--gin.TaskFeed.bad_documents={budget}',
      ]

    lab.run(whole, *read(whole, 1), partition='zero1', devices=2)
    pair.run(*read(pair.name, 1))
    found, difference = compared(lab, whole, pair.name)
    codes = [ended(one) for one in refused.start(*read(refused.name, 0))]
    if codes != [BAD_DATA, BAD_DATA]:
      found = f'exit codes {codes}'
    yield Trial(f'in shard {number % 2}', found, difference)
    for name in (whole, pair.name, refused.name):
      lab.forget(name)


@fault(
  'two processes: a loss spike, back to the last checkpoint, and kill -9 of one', 'the same', full=4
)
def spikes_back(lab: Laboratory, times: int) -> Iterator[Trial]:
  spikes, flags = spiky(lab, times, 'rewind')
  whole, killed = Pair(lab), Pair(lab)
  whole.run(*flags)
  killed.run(*flags, alone=_to_one(1, spikes[0] + 3, 'die'), supervised=True)
  refused = [line['step'] for line in refused_log(lab, whole.name) if 'why' in line]
  hashes = [[dict(lab.hashes(pair.of(n))) for n in BOTH] for pair in (whole, killed)]
  for step in spikes:
    found = None if step in refused else 'was trained on'
    same = hashes[0] == hashes[1]
    yield Trial(f'step {step}', found if same else 'the pair that was killed decided otherwise')
  whole.forget()
  killed.forget()


@fault(
  'one process, then two, then one',
  'the same batches, the loss within 1e-4',
  full=2,
  unit='relative difference of the loss',
)
def one_two_one(lab: Laboratory, times: int) -> Iterator[Trial]:
  def read(name):
    return [*hashing(lab, name), '--gin.checkpoint_every=1']

  whole = lab.new()
  lab.run(whole, *read(whole), partition='zero1', devices=2)
  for number in range(times):
    pair, (first, second) = Pair(lab), ((8, 16), (5, 20))[number % 2]
    stops = [stopping(lab, pair.name, at) for at in (first, second)]
    alone = {'partition': 'zero1', 'devices': 2}
    lab.run(pair.name, *read(pair.name), *stops[0], **alone, code=PREEMPTED)
    codes = [ended(one) for one in pair.start(*read(pair.name), alone=[NOTHING[0], stops[1]])]
    lab.run(pair.name, *read(pair.name), **alone)
    found, difference = compared(lab, whole, pair.name)
    if codes != [PREEMPTED, PREEMPTED]:
      found = f'exit codes {codes}'
    yield Trial(f'two from step {first} to {second}', found, difference)
    pair.forget()
  lab.forget(whole)
