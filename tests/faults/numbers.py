"""NaN, infinities and loss spikes, in the loss, the gradient, the carry and the data."""

from collections.abc import Iterator
import json
import pathlib
import shutil

from faults.harness import ROWS, STEPS, TOKENS, Harness, write_store
from faults.table import Trial, fault

REFUSED = 'refuses the step, clears its carry, continues'
BAD = (5, 11, 12, 20)  # steps


def refused_log(harness: Harness, name: str) -> list[dict]:
  """The lines of refused_steps.jsonl."""
  lines = (harness.folder / name / 'refused_steps.jsonl').read_text().splitlines()
  return [json.loads(line) for line in lines]


@fault('NaN and infinity in loss, gradient, carry and data', REFUSED, full=32, short=4)
def not_finite(harness: Harness, times: int) -> Iterator[Trial]:
  ways = [
    (place, value) for place in ('data', 'carry', 'loss', 'gradient') for value in ('nan', 'inf')
  ]
  per_run = len(BAD)
  for place, value in ways[:: max(1, len(ways) * per_run // times)][: max(1, times // per_run)]:
    name = harness.new()
    steps = f'{list(BAD)}'
    if place == 'data':
      flags = ['--gin.train.feed=@train/FaultyFeed', f'--gin.FaultyFeed.fault="{value}"']
      flags += [f'--gin.FaultyFeed.steps={steps}']
    else:
      flags = ['--gin.Block.mixers=(@S5, @NonFinite)']
      flags += [f'--gin.NonFinite.place="{place}"', f'--gin.NonFinite.value="{value}"']
      flags += ['--gin.train.feed=@train/FaultyFeed', '--gin.FaultyFeed.fault="mark"']
      flags += [f'--gin.FaultyFeed.steps={steps}']
    path = harness.folder / f'{name}.parameters'
    flags += [f'--gin.HashParameters.path="{path}"', '--gin.train.hooks=(@HashParameters(),)']
    harness.run(name, *flags)
    refused = [line['step'] for line in refused_log(harness, name)]
    for step in BAD:
      failure = failure_at(step, parameter_hashes(path), refused)
      yield Trial(f'{value} in the {place} of step {step}', failure)
    harness.forget(name)


def parameter_hashes(path: pathlib.Path) -> dict[int, list]:
  """The lines of HashParameters, by step."""
  return {step: rest for step, *rest in map(json.loads, path.read_text().splitlines())}


def failure_at(step: int, seen: dict[int, list], refused: list[int]) -> str | None:
  """The unexpected change of a refused step; None if it has changed nothing."""
  if refused != list(BAD):
    return f'steps {refused} were refused'
  if seen[step][0] != seen[step - 1][0]:
    return 'parameters or optimizer state have changed'
  if not seen[step][1]:
    return 'a carry was not cleared'
  if step + 1 not in BAD and seen[step + 1][0] == seen[step][0]:
    return 'the next step changed nothing'
  return None


@fault('values that stay NaN or infinite', 'ends with 76, names the documents', full=2)
def stays_infinite(harness: Harness, times: int) -> Iterator[Trial]:
  for number in range(times):
    name = harness.new()
    flags = [f'--gin.FaultyFeed.fault="{("nan", "inf")[number % 2]}"']
    flags += [
      '--gin.FaultyFeed.steps=' + str(list(range(4, STEPS))),
      '--gin.RefusedSteps.allowed=3',
    ]
    harness.run(name, '--gin.train.feed=@train/FaultyFeed', *flags, code=76)
    failure = None if 'these documents of' in harness.said(name) else 'no document was named'
    yield Trial('from step 4 on', failure)
    harness.forget(name)


@fault('a loss spike', 'is skipped, also by a run that is killed in between', full=100)
def spikes(harness: Harness, times: int) -> Iterator[Trial]:
  yield from _spikes(harness, times, 'skip')


@fault(
  'a loss spike, with a rewind to the last checkpoint',
  'is skipped, also by a run that is killed in between',
  full=30,
)
def rewound_spikes(harness: Harness, times: int) -> Iterator[Trial]:
  yield from _spikes(harness, times, 'rewind')


def _spikes(harness: Harness, times: int, action: str) -> Iterator[Trial]:
  expected, flags = spiky(harness, times, action)
  whole, killed = harness.new(), harness.new()
  harness.run(whole, *flags)
  harness.run(killed, *flags, f'--gin.Act.at={expected[0] + 3}', '--gin.Act.action="kill"', code=-9)
  harness.run(killed, *flags)
  refused = [line['step'] for line in refused_log(harness, whole) if 'why' in line]
  same = dict(harness.hashes(whole)) == dict(harness.hashes(killed))
  for step in expected:
    failure = None if step in refused else 'was trained on'
    yield Trial(f'step {step}', failure if same else 'the killed run has other states')
  harness.forget(whole)
  harness.forget(killed)


def spiky(harness: Harness, times: int, action: str) -> tuple[list[int], list[str]]:
  """(the steps with a loss spike, the flags of their run)."""
  every, first = 8, 24
  expected = list(range(first, first + every * times, every))
  steps = expected[-1] + 2
  _noisy_store(harness, expected, steps)
  return expected, [
    f'--gin.train_steps={steps}', '--gin.train/TaskFeed.task="noise"', '--gin.learning_rate=0.03',
    f'--gin.LossSpikes.action="{action}"', '--gin.LossSpikes.window=6',
    '--gin.LossSpikes.deviations=8.0', '--gin.RefusedSteps.allowed=90', '--gin.checkpoint_every=6',
  ]  # fmt: skip


def _noisy_store(harness: Harness, noisy: list[int], steps: int) -> None:
  """Writes a store: each row is a long text of two letters, except in the noisy steps."""
  letters = []
  for _ in range(ROWS):
    text = harness.random.choices('ab', k=(steps + 1) * TOKENS)
    for step in noisy:
      first = (step - 1) * TOKENS + 1  # the step before predicts its first token
      text[first : first + TOKENS - 1] = harness.random.choices('ghijklmnopqrstuvw', k=TOKENS - 1)
    letters.append(''.join(text))
  for path in (harness.folder / 'data').glob('noise-*'):
    shutil.rmtree(path)
  write_store(harness.folder / 'data', 'noise', 'train', letters)
