"""Each number of a run says the same thing wherever it is printed, logged or drawn."""

import contextlib
import json
import math
import re
import time
import types
from typing import Any

import gin
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import startup_bench
import tiny_run

from valkyrie.data import store_writer, vocabularies
from valkyrie.data.selection import Selection
from valkyrie.data.store_location import store_path
from valkyrie.monitoring import html_report, recorded_run, training_log
from valkyrie.monitoring.progress import describe
from valkyrie.monitoring.training_log import TrainingLog
from valkyrie.monitoring.writers import create_writers
from valkyrie.run import evaluate
from valkyrie.training.curriculum import Curriculum, Phase
from valkyrie.training.objective import Sums
from valkyrie.training.reading import Reading
from valkyrie.training.train_step import StepMetrics

UNUSED: Any = None
# Normalized to fewer bytes: spaces are joined, and wide and joined letters become plain ones.
WORDS = [
  'the',
  'sea',
  '',
  '',
  'is',
  'wide,',
  '\uff21\uff22',
  'deep',
  '\ufb01ne',
  '\u2460',
  '\u338f',
]


paused = [0.0]  # seconds that `Pausing` has taken


@gin.configurable
class Pausing:
  """A hook whose calls after even steps take 1,000 seconds by the clock."""

  def pauses(self, step):
    return step % 2 == 0

  def __call__(self, step, state, metrics):
    if self.pauses(step):
      paused[0] += 1000
      return {'paused_after': step}


def texts(seed):
  random = np.random.default_rng(seed)
  return [' '.join(random.choice(WORDS, random.integers(20, 60))) for _ in range(24)]


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """(the folder of a run with a padded vocabulary that normalizes, its vocabulary)."""
  import sentencepiece  # noqa: PLC0415

  folder = tmp_path_factory.mktemp('numbers')
  (folder / 'text.txt').write_text('\n'.join(texts(0)))
  sentencepiece.SentencePieceTrainer.train(
    input=str(folder / 'text.txt'), model_prefix=str(folder / 'mine'), vocab_size=90,
    byte_fallback=False, hard_vocab_limit=False, minloglevel=2,
  )  # fmt: skip
  vocabulary = vocabularies.load(str(folder / 'mine.model'))
  for number, split in enumerate(('train', 'validation')):
    selection = Selection('letters', split, vocabulary)
    writer = store_writer.StoreWriter(store_path(selection, str(folder / 'data')), selection, {}, 1)
    writer.write(
      lambda shard, number=number: [
        store_writer.Document(vocabulary.ids(text), len(text.encode())) for text in texts(number)
      ]
    )
  data = (
    f"vocabulary = '{folder / 'mine.model'}'\nLanguageModel.vocabulary_size = {vocabulary.size}"
  )
  flags = ['--gin.train_steps=6', '--gin.log_every=2', '--gin.eval_every=3']
  flags += ['--gin.Evaluator.chunks=2', '--gin.checkpoint_every=6']
  flags += ['--gin.train.hooks=(@Pausing(),)']
  clock = time.perf_counter
  with pytest.MonkeyPatch.context() as patched:
    patched.setattr(training_log.time, 'perf_counter', lambda: clock() + paused[0])
    model_dir = tiny_run.train(folder / 'run', folder / 'data', *flags, data=data)
  evaluate.evaluate(model_dir=str(model_dir))
  return model_dir, vocabulary


def all_lines(run):
  return [
    (stream, line)
    for stream in ('', 'eval')
    for line in map(json.loads, (run / stream / 'metrics.jsonl').read_text().splitlines())
  ]


def test_bytes_are_those_of_the_source_everywhere(run):
  model_dir, vocabulary = run
  ratios = [
    sum(len(vocabulary.ids(text)) + 1 for text in split) / sum(len(t.encode()) for t in split)
    for split in (texts(0), texts(1))
  ]
  decoded = sum(len(vocabulary.decode(vocabulary.ids(text)).encode()) for text in texts(1))
  assert decoded < 0.9 * sum(len(text.encode()) for text in texts(1))  # or it would show nothing
  lines = all_lines(model_dir)
  assert [line['step'] for _, line in lines] == [2, 4, 6, 3, 6, 6]
  for stream, line in lines:
    ratio = ratios[stream == 'eval']
    for quick in ('', 'quick_') if 'quick_loss' in line else ('',):
      bits = line[f'{quick}loss'] / math.log(2)
      assert line[f'{quick}bits_per_byte'] == pytest.approx(ratio * bits, rel=1e-6)
    assert line['perplexity'] == pytest.approx(math.exp(line['loss']), rel=1e-6)
    assert line['bits_per_token'] == pytest.approx(line['loss'] / math.log(2), rel=1e-6)
  whole, again = lines[-2][1], lines[-1][1]
  assert whole == pytest.approx(again, rel=1e-5)
  # Every token of a document but its first is a target of the whole split.
  assert whole['targets'] == sum(len(vocabulary.ids(text)) for text in texts(1))


def test_padding_is_no_parameter_anywhere(run):
  model_dir, vocabulary = run
  head, table, modules, _ = (model_dir / 'model_info.txt').read_text().split('\n\n')
  _, *rows = table.splitlines()
  count = padding = 0
  for row in rows:
    _, shape, _, axes, *_ = row.split()
    sizes = [int(size) for size in shape.strip('()').split(',')]
    count += math.prod(sizes)
    if 'vocabulary' in axes:
      assert sizes[0] == 128 > vocabulary.size
      padding += (128 - vocabulary.size) * sizes[1]
  said = f'{count - padding:,} parameters'
  assert modules.splitlines()[1].split()[:2] == ['model', f'{count - padding:,}']
  assert head.startswith(f'{said} in {len(rows)} arrays and {padding:,} of padding, ')
  log = (model_dir / 'log.txt').read_text()
  assert f' {said} (' in log
  parts = re.search(r' parameters \((.*?)\) in float32', log)[1]
  assert sum(int(n.replace(',', '')) for n in re.findall(r' ([\d,]*\d)', parts)) == count - padding
  assert recorded_run.read_run(model_dir).about == said


def test_a_run_says_what_the_bench_of_starts_waits_for(run):
  model_dir, _ = run
  said = iter((model_dir / 'log.txt').read_text().splitlines())
  marks = [re.sub(r'\d+', r'\\d+', mark) for mark in startup_bench.PARTS.values()]
  times = r'\d{4}-\d\d-\d\d \d\d:\d\d:\d\d '
  for mark in marks:
    assert any(re.match(times + mark, line) for line in said), f'{mark} does not follow'
  assert startup_bench.TRACED.search((model_dir / 'log.txt').read_text())


def test_console_tensorboard_and_report_have_the_numbers_of_the_lines(run):
  from tensorboard.backend.event_processing import event_accumulator  # noqa: PLC0415
  from tensorboard.util import tensor_util  # noqa: PLC0415

  model_dir, _ = run
  log = (model_dir / 'log.txt').read_text()
  events = {}
  for stream in ('train', 'eval'):
    for file in (model_dir / stream).glob('events*'):
      found = event_accumulator.EventAccumulator(str(file))
      found.Reload()
      for tag in found.Tags()['tensors']:
        for e in found.Tensors(tag):
          name = tag if tag.startswith('hooks/') else tag.partition('/')[2]
          events[stream, name, e.step] = tensor_util.make_ndarray(e.tensor_proto)
  lines = all_lines(model_dir)
  last = lines[-1][1]  # of the run mode `eval`, on the standard output
  for stream, line in lines:
    step = line['step']
    ours = {name: n for name, n in line.items() if name != 'step' and n is not None}
    for name, number in ours.items():
      assert events[stream or 'train', name, step] == pytest.approx(number, rel=1e-5)
    if stream == '':
      assert f'step {step}/6 ({step / 6:.0%}): ' + ', '.join(describe(line)) in log
    else:
      split = 'the whole validation split' if 'quick_loss' in line else 'validation'
      assert (f'step {step}, {split}: ' + ', '.join(describe(line)) in log) or line is last
  page = html_report._results([recorded_run.read_run(model_dir)])
  for title, name in html_report._OF_VALIDATION:
    assert f'<td>{title}</td><td class="number">{last[name]:,.4g}</td>' in page
  for said in (
    'no checkpoint found in ',
    'float32, remat_policy None, learning rate x 1',
    'memory of this process before the state: ',
    'memory of this process with the state: ',
    'memory of this process after the first step: ',
    'memory of this process at the end: ',
  ):
    assert log.count(said) == 1
  for stream, line in lines:
    if not stream:  # one of the eight devices has the model
      assert line['tokens_per_second_per_device'] == line['tokens_per_second']
      assert line['hooks/paused_after'] == line['step'] and line['step_seconds'] < 500
  assert all(0 < line['goodput'] < 1 for stream, line in lines if not stream)


class Device:
  """A clock, and a device that takes steps one after the other while the host goes on."""

  def __init__(self):
    self.now = self.idle_at = 0.0

  def step(self, seconds):
    """The metrics of a step that was dispatched now."""
    self.idle_at = max(self.now, self.idle_at) + seconds
    one = Number(self, self.idle_at)
    return StepMetrics(Sums(one, one, one, {}), one, {}, one, one, one)


class Number:
  """A scalar on the device, which the host waits for."""

  shape, dtype = (), np.dtype(np.float32)

  def __init__(self, device, done_at):
    self.device, self.done_at = device, done_at

  def block_until_ready(self):
    self.device.now = max(self.device.now, self.done_at)
    return self

  def __array__(self, *_, **__):
    self.block_until_ready()
    return np.array(1.0, np.float32)


@pytest.mark.parametrize('waits', ['always', 'never', 'every other step'])
def test_a_dispatch_that_waits_gives_its_time_to_its_step(waits, tmp_path, monkeypatch):
  """As on CPUs: when the log reads a step, the next one may have ended, too."""
  device = Device()
  monkeypatch.setattr(training_log.time, 'perf_counter', lambda: device.now)
  feed: Any = types.SimpleNamespace(tokens_per_byte=None, progress=lambda position: {})
  about = types.SimpleNamespace(train_flops_per_token=None)
  layout = types.SimpleNamespace(mesh=types.SimpleNamespace(size=1))
  setup: Any = types.SimpleNamespace(model=types.SimpleNamespace(about=about), partitioner=layout)
  reading = Reading(Curriculum([Phase(8, 1, 1)]), feed, rows=2)
  with create_writers(tmp_path, tensorboard=False) as writer:
    log = TrainingLog(writer, setup, reading, every=1, total_steps=6, began=0.0)
    log.clock(runs=True)
    for step in range(1, 7):
      metrics = device.step(2.0)
      if waits == 'always' or (waits == 'every other step' and step % 2 == 0):
        device.now = max(device.now, device.idle_at)
        metrics = jax.block_until_ready(jax.tree.map(lambda one: jnp.float32(1), metrics))
      log(step, metrics)
    with log.untimed():
      log.flush()
  seconds = [line['step_seconds'] for line in tiny_run.metrics(tmp_path).values()]
  assert seconds == pytest.approx(6 * [2.0])


@pytest.mark.parametrize('seed', range(30))
def test_speeds_are_of_steps_alone(seed, tmp_path, monkeypatch):
  random, device = np.random.default_rng(seed), Device()
  monkeypatch.setattr(training_log.time, 'perf_counter', lambda: device.now)
  total, every = 40, int(random.integers(1, 9))
  feed: Any = types.SimpleNamespace(tokens_per_byte=None, progress=lambda position: {})
  about = types.SimpleNamespace(train_flops_per_token=None)
  phases = [Phase(8, 1, 1, steps=15), Phase(32, 1, 1)]
  first = int(random.integers(1, total))
  profiled = range(first, first + int(random.integers(0, 12)))
  seconds = random.uniform(0.1, 5, total + 1)
  pauses = random.random(total + 1) < 0.3
  device.now = 7.0  # the time of the start, which counts for the goodput
  with create_writers(tmp_path, tensorboard=False) as writer:
    layout = types.SimpleNamespace(mesh=types.SimpleNamespace(size=4))
    setup: Any = types.SimpleNamespace(model=types.SimpleNamespace(about=about), partitioner=layout)
    reading = Reading(Curriculum(phases), feed, rows=2)
    log = TrainingLog(writer, setup, reading, every=every, total_steps=total, began=0.0)
    log.clock(runs=True)
    profile = contextlib.ExitStack()
    for step in range(1, total + 1):
      if step == profiled.start and profiled:
        profile.enter_context(log.untimed())
        device.now += 100  # a profiler starts
      log(step, device.step(seconds[step]))
      if profiled and step == profiled[-1]:
        device.now = device.idle_at + 1000  # it writes its file
        profile.close()
      if pauses[step]:
        with log.untimed():  # an evaluation, a save, samples
          if random.random() < 0.5:
            log.flush()
          device.now = max(device.now, device.idle_at) + random.uniform(0, 50)
    log.flush()
    profile.close()
  lines, timed_until_now = tiny_run.metrics(tmp_path), 0.0
  assert list(lines) == sorted({*range(every, total + 1, every), total})
  last = 0
  for number, line in lines.items():
    timed = [step for step in range(last + 1, number + 1) if step not in profiled]
    took = sum(seconds[step] for step in timed)
    timed_until_now += took
    if timed:
      tokens = sum(16 if step <= 15 else 64 for step in timed)
      assert line['tokens_per_second'] == pytest.approx(tokens / took)
      assert line['tokens_per_second_per_device'] == pytest.approx(tokens / took / 4)
      assert line['step_seconds'] == pytest.approx(took / len(timed))
    else:
      assert 'tokens_per_second' not in line  # nothing is known
    if len(timed) > 1:
      each = seconds[timed]
      assert line['step_seconds_deviation'] == pytest.approx(np.std(each))
      assert line['step_seconds_slowest'] == pytest.approx(max(each))
      assert line['slowest_step'] == timed[np.argmax(each)]
    else:
      assert 'slowest_step' not in line
    assert line['goodput'] < timed_until_now / (7 + timed_until_now) + 1e-9
    last = number
