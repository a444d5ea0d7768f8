"""NaN, infinities and spikes: in the loss, the gradient, the carry and the data."""

from collections.abc import Iterator
import json
import pathlib
import shutil

from injections.laboratory import ROWS, STEPS, TOKENS, Laboratory, write_store
from injections.table import Trial, fault

REFUSED = 'the step is refused, its rows remember nothing, the run goes on'
BAD = (5, 11, 12, 20)  # steps


def refused_log(lab: Laboratory, name: str) -> list[dict]:
  """The lines of refused_steps.jsonl."""
  lines = (lab.folder / name / 'refused_steps.jsonl').read_text().splitlines()
  return [json.loads(line) for line in lines]


@fault('NaN and infinity in loss, gradient, carry and data', REFUSED, full=32, short=4)
def not_finite(lab: Laboratory, times: int) -> Iterator[Trial]:
  ways = [
    (place, what) for place in ('data', 'carry', 'loss', 'gradient') for what in ('nan', 'inf')
  ]
  per_run = len(BAD)
  for place, what in ways[:: max(1, len(ways) * per_run // times)][: max(1, times // per_run)]:
    name = lab.new()
    steps = f'{list(BAD)}'
    if place == 'data':
      flags = ['--gin.train.feed=@train/FaultyFeed', f'--gin.FaultyFeed.what="{what}"']
      flags += [f'--gin.FaultyFeed.steps={steps}']
    else:
      flags = ['--gin.Block.mixers=(@S5, @Spoiler)']
      flags += [f'--gin.Spoiler.place="{place}"', f'--gin.Spoiler.value="{what}"']
      flags += ['--gin.train.feed=@train/FaultyFeed', '--gin.FaultyFeed.what="mark"']
      flags += [f'--gin.FaultyFeed.steps={steps}']
    path = lab.folder / f'{name}.learnt'
    flags += [f'--gin.HashLearnt.path="{path}"', '--gin.train.hooks=(@HashLearnt(),)']
    lab.run(name, *flags)
    refused = [line['step'] for line in refused_log(lab, name)]
    for step in BAD:
      found = wrong_at(step, learnt(path), refused)
      yield Trial(f'{what} in the {place} of step {step}', found)
    lab.forget(name)


def learnt(path: pathlib.Path) -> dict[int, list]:
  """What HashLearnt wrote, by steps."""
  return {step: rest for step, *rest in map(json.loads, path.read_text().splitlines())}


def wrong_at(step: int, seen: dict[int, list], refused: list[int]) -> str | None:
  """What a step did that should have done nothing; None where all is as promised."""
  if refused != list(BAD):
    return f'the steps {refused} were refused'
  if seen[step][0] != seen[step - 1][0]:
    return 'parameters or optimizer have changed'
  if not seen[step][1]:
    return 'a row remembers something'
  if step + 1 not in BAD and seen[step + 1][0] == seen[step][0]:
    return 'the next step changed nothing'
  return None


@fault('numbers that stay infinite', 'ends with 76, names the documents', full=2)
def stays_infinite(lab: Laboratory, times: int) -> Iterator[Trial]:
  for number in range(times):
    name = lab.new()
    flags = [f'--gin.FaultyFeed.what="{("nan", "inf")[number % 2]}"']
    flags += [
      '--gin.FaultyFeed.steps=' + str(list(range(4, STEPS))),
      '--gin.RefusedSteps.allowed=3',
    ]
    lab.run(name, '--gin.train.feed=@train/FaultyFeed', *flags, code=76)
    found = None if 'these documents of' in lab.said(name) else 'no document was named'
    yield Trial('from step 4 on', found)
    lab.forget(name)


@fault('a loss spike', 'is skipped, as it is by a run that is killed in between', full=100)
def spikes(lab: Laboratory, times: int) -> Iterator[Trial]:
  yield from _spikes(lab, times, 'skip')


@fault('a loss spike, and back to the last checkpoint', 'the same', full=30)
def spikes_back(lab: Laboratory, times: int) -> Iterator[Trial]:
  yield from _spikes(lab, times, 'rewind')


def _spikes(lab: Laboratory, times: int, action: str) -> Iterator[Trial]:
  expected, flags = spiky(lab, times, action)
  whole, killed = lab.new(), lab.new()
  lab.run(whole, *flags)
  lab.run(killed, *flags, f'--gin.Act.at={expected[0] + 3}', '--gin.Act.what="die"', code=-9)
  lab.run(killed, *flags)
  refused = [line['step'] for line in refused_log(lab, whole) if 'why' in line]
  same = dict(lab.hashes(whole)) == dict(lab.hashes(killed))
  for step in expected:
    found = None if step in refused else 'was trained on'
    yield Trial(f'step {step}', found if same else 'the run that was killed decided otherwise')
  lab.forget(whole)
  lab.forget(killed)


def spiky(lab: Laboratory, times: int, action: str) -> tuple[list[int], list[str]]:
  """(the steps whose loss stands out, the flags of a run that meets them)."""
  every, first = 8, 24
  expected = list(range(first, first + every * times, every))
  steps = expected[-1] + 2
  _noisy_store(lab, expected, steps)
  return expected, [
    f'--gin.train_steps={steps}', '--gin.train/TaskFeed.task="noise"', '--gin.learning_rate=0.03',
    f'--gin.LossSpikes.action="{action}"', '--gin.LossSpikes.window=6',
    '--gin.LossSpikes.deviations=8.0', '--gin.RefusedSteps.allowed=90', '--gin.checkpoint_every=6',
  ]  # fmt: skip


def _noisy_store(lab: Laboratory, noisy: list[int], steps: int) -> None:
  """Each row a long text of two letters, in which these steps read others."""
  letters = []
  for _ in range(ROWS):
    text = lab.random.choices('ab', k=(steps + 1) * TOKENS)
    for step in noisy:
      first = (step - 1) * TOKENS + 1  # the step before predicts its first token
      text[first : first + TOKENS - 1] = lab.random.choices('ghijklmnopqrstuvw', k=TOKENS - 1)
    letters.append(''.join(text))
  for path in (lab.folder / 'data').glob('noise-*'):
    shutil.rmtree(path)
  write_store(lab.folder / 'data', 'noise', 'train', letters)
