"""Another clock, time zone, locale or hash seed, and another mesh, than where the run began."""

from collections.abc import Iterator
import json
import os

from injections.laboratory import STEPS, Laboratory
from injections.table import Trial, fault

# Python imports it at its start. What is not Python keeps the machine's clock.
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
  'the clock a day on or back, TZ, locale, PYTHONHASHSEED', 'goes on bit for bit', full=6, short=1
)
def another_world(lab: Laboratory, times: int) -> Iterator[Trial]:
  clock = lab.folder / 'clock'
  clock.mkdir()
  (clock / 'sitecustomize.py').write_text(CLOCK)
  path = f'{clock}{os.pathsep}{lab.environment()["PYTHONPATH"]}'
  worlds = [{**world, 'PYTHONPATH': path} for world in WORLDS]
  pairs = list(zip(worlds, [*worlds[1:], worlds[0]], strict=True))
  for first, second in pairs[:: max(1, len(pairs) // times)][:times]:
    name = lab.new()
    lab.run(name, '--gin.Act.at=13', '--gin.Act.what="die"', code=-9, environment=first)
    lab.run(name, environment=second)
    names = [', '.join(f'{k}={v}' for k, v in w.items() if v != path) for w in (first, second)]
    yield Trial(' then '.join(names), lab.difference(name))
    lab.forget(name)


@fault(
  'another mesh: 1x2, then 2x1, then one device',
  'the same batches, the loss within 1e-4',
  full=2,
  unit='relative difference of the loss',
)
def another_mesh(lab: Laboratory, times: int) -> Iterator[Trial]:
  rules = (
    '--gin.Partitioner.axis_rules=(("batch", "data"), ("embed", "model"))',
    '--gin.Partitioner.local=False',
  )
  meshes = [f'--gin.Partitioner.mesh=(("data", {n}), ("model", {2 // n}))' for n in (1, 2)]
  allowed = '--allow_changed=mesh,configuration'
  every = '--gin.checkpoint_every=1'
  whole = lab.new()
  lab.run(whole, *hashing(lab, whole), every)
  for number in range(times):
    name = lab.new()
    feed = (*hashing(lab, name), every)
    for step, mesh in zip((8, 16), meshes[:: -1 if number % 2 else 1], strict=True):
      stop = stopping(lab, name, step)
      lab.run(name, *feed, *stop, mesh, *rules, allowed, devices=2, code=75)
    lab.run(name, *feed, allowed)
    found, difference = compared(lab, whole, name)
    yield Trial(f'{"2x1, 1x2" if number % 2 else "1x2, 2x1"}, 1', found, difference)
    lab.forget(name)
  lab.forget(whole)


def hashing(lab: Laboratory, name: str) -> list[str]:
  """Flags of a run that keeps the hashes of what it reads, for `compared`."""
  path = lab.folder / f'{name}.batches'
  return ['--gin.train.feed=@train/HashingFeed', f'--gin.HashingFeed.path="{path}"']


def stopping(lab: Laboratory, name: str, step: int) -> list[str]:
  """Flags of a run that asks itself to stop at a step, once; it may stop at others as well."""
  once = lab.folder / f'{name}.{step}'
  return [f'--gin.Act.at={step}', '--gin.Act.what="ask"', f'--gin.Act.once="{once}"']


def compared(lab: Laboratory, whole: str, name: str) -> tuple[str | None, float]:
  """What is wrong with a run that others should equal but for rounding; the loss's difference."""
  losses = [_losses(lab, run) for run in (whole, name)]
  difference = max(abs(losses[1][step] / losses[0][step] - 1) for step in range(1, STEPS + 1))
  batches = [_batches(lab, run) for run in (whole, name)]
  found = None if batches[0] == batches[1] else 'it read other batches'
  if difference > 1e-4:
    found = f'the loss differs by {difference:.2g}'
  return found, difference


def _losses(lab: Laboratory, name: str) -> dict[int, float]:
  lines = (lab.folder / name / 'metrics.jsonl').read_text().splitlines()
  return {line['step']: line['loss'] for line in map(json.loads, lines)}


def _batches(lab: Laboratory, name: str) -> set[str]:
  return set((lab.folder / f'{name}.batches').read_text().splitlines())
