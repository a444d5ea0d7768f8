"""Another clock, time zone, locale, hash seed or mesh on resume."""

from collections.abc import Iterator
import json

from faults.harness import STEPS, Harness
from faults.table import Trial, fault

# Executed at the start of Python. Native code keeps the real clock.
CLOCK = """
import os, time
_offset, _time, _time_ns = int(os.environ.get('CLOCK_OFFSET', '0')), time.time, time.time_ns
time.time = lambda: _time() + _offset
time.time_ns = lambda: _time_ns() + _offset * 10**9
"""
DAY = 86400
WORLDS = (
  {'CLOCK_OFFSET': str(DAY)}, {'CLOCK_OFFSET': str(-DAY)},
  {'TZ': 'Pacific/Kiritimati', 'LC_ALL': 'C'}, {'PYTHONHASHSEED': '1', 'LANG': 'tr_TR.UTF-8'},
  {'TZ': 'America/St_Johns', 'PYTHONHASHSEED': '2'}, {'LC_ALL': 'POSIX', 'PYTHONUTF8': '0'},
)  # fmt: skip


@fault(
  'the clock a day ahead or behind, another TZ, locale or PYTHONHASHSEED',
  'continues bit for bit',
  full=6,
)
def another_world(harness: Harness, times: int) -> Iterator[Trial]:
  clock = harness.customized('clock', CLOCK)
  worlds = [{**world, **clock} for world in WORLDS]
  pairs = list(zip(worlds, [*worlds[1:], worlds[0]], strict=True))
  for first, second in pairs[:: max(1, len(pairs) // times)][:times]:
    name = harness.new()
    harness.run(name, '--gin.Act.at=13', '--gin.Act.action="kill"', code=-9, environment=first)
    harness.run(name, environment=second)
    names = [', '.join(f'{k}={v}' for k, v in w.items() if k not in clock) for w in (first, second)]
    yield Trial(' then '.join(names), harness.difference(name))
    harness.forget(name)


@fault(
  'another mesh: 1x2, then 2x1, then one device',
  'the same batches, the loss within 1e-4',
  full=2,
  unit='relative difference of the loss',
)
def another_mesh(harness: Harness, times: int) -> Iterator[Trial]:
  rules = (
    '--gin.Partitioner.axis_rules=(("batch", "data"), ("embed", "model"))',
    '--gin.Partitioner.manual=False',
  )
  meshes = [f'--gin.Partitioner.mesh=(("data", {n}), ("model", {2 // n}))' for n in (1, 2)]
  allowed = '--allow_changed=mesh,configuration'
  every = '--gin.checkpoint_every=1'
  whole = harness.new()
  harness.run(whole, *hashing(harness, whole), every)
  for number in range(times):
    name = harness.new()
    feed = (*hashing(harness, name), every)
    for step, mesh in zip((8, 16), meshes[:: -1 if number % 2 else 1], strict=True):
      stop = stopping(harness, name, step)
      harness.run(name, *feed, *stop, mesh, *rules, allowed, devices=2, code=75)
    harness.run(name, *feed, allowed)
    failure, difference = compared(harness, whole, name)
    yield Trial(f'{"2x1, 1x2" if number % 2 else "1x2, 2x1"}, 1', failure, difference)
    harness.forget(name)
  harness.forget(whole)


def hashing(harness: Harness, name: str) -> list[str]:
  """The flags of a run that hashes its batches, for `compared`."""
  path = harness.folder / f'{name}.batches'
  return ['--gin.train.feed=@train/HashingFeed', f'--gin.HashingFeed.path="{path}"']


def stopping(harness: Harness, name: str, step: int) -> list[str]:
  """The flags of a run that sends SIGTERM to itself once, at a step."""
  once = harness.folder / f'{name}.{step}'
  return [f'--gin.Act.at={step}', '--gin.Act.action="terminate"', f'--gin.Act.once="{once}"']


def compared(harness: Harness, whole: str, name: str) -> tuple[str | None, float]:
  """Compares two runs up to rounding: (a failure or None, the relative difference of the loss)."""
  losses = [_losses(harness, run) for run in (whole, name)]
  difference = max(abs(losses[1][step] / losses[0][step] - 1) for step in range(1, STEPS + 1))
  batches = [_batches(harness, run) for run in (whole, name)]
  failure = None if batches[0] == batches[1] else 'it read other batches'
  if difference > 1e-4:
    failure = f'the loss differs by {difference:.2g}'
  return failure, difference


def _losses(harness: Harness, name: str) -> dict[int, float]:
  lines = (harness.folder / name / 'metrics.jsonl').read_text().splitlines()
  return {line['step']: line['loss'] for line in map(json.loads, lines)}


def _batches(harness: Harness, name: str) -> set[str]:
  return set((harness.folder / f'{name}.batches').read_text().splitlines())
