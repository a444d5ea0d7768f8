"""A loss that stands out is refused, or leads back, however often the run is stopped."""

import contextlib
import json

import gin
import jax
import numpy as np
import pytest
import tiny_run

from valkyrie import main
from valkyrie.config.load import load_gin
from valkyrie.data import store_writer
from valkyrie.data.selection import Selection
from valkyrie.data.store_location import store_path
from valkyrie.errors import ConfigurationError, Preempted
from valkyrie.run import train
from valkyrie.training.spikes import LossSpikes, detect

WATCH = '''
"""Writes hashes of what a state holds, and asks for an end where it is told to."""

import hashlib
import json
import os
import signal

import gin
import jax
import numpy as np


@gin.configurable
class Watch:
  def __init__(self, path, stop_at=None):
    self.path, self.stop_at = path, stop_at

  def __call__(self, step, state, metrics):
    def digest(tree):
      leaves = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]
      return hashlib.sha256(b''.join(leaves)).hexdigest()

    learned = digest((state.params, state.optimizer_state))
    empty = not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(state.carry))
    with open(self.path, 'a') as file:
      print(json.dumps([step, learned, empty, digest(state)]), file=file)
    if step == self.stop_at:
      os.kill(os.getpid(), signal.SIGTERM)
'''

SPIKE = 9  # the step, counted from 1, that reads noise
TOKENS = 32  # of a row in a step


def reference(losses, window, deviations):
  """Which losses are spikes, from a list that grows."""
  seen, found = [], []
  for loss in losses:
    latest = np.array(seen[-window:], np.float32)
    full = len(latest) == window
    found.append(bool(full and loss > latest.mean() + deviations * latest.std()))
    seen += [loss] if np.isfinite(loss) else []
  return found


def test_a_spike_stands_out_among_the_latest_losses():
  random = np.random.default_rng(0)
  losses = random.normal(3.0, 0.1, 340).astype(np.float32)
  losses[[5, 70, 71, 170]] += 3  # the first comes before the window is full
  losses[[120, 169]] = np.inf, np.nan
  losses[240:] += 4  # a level that stays
  spikes = LossSpikes('skip', deviations=6.0, window=64)
  step = jax.jit(lambda recent, loss: detect(spikes, recent, loss))
  recent, found = spikes.initial(), []
  for loss in losses:
    spiked, recent = step(recent, loss)
    found.append(bool(spiked))
  expected = reference(losses, 64, 6.0)
  expected[120] = False  # an infinity is refused for what it is
  assert found == expected
  assert [n for n in range(240) if found[n]] == [70, 71, 170]
  assert 1 <= sum(found[240:]) <= 64 / 36 + 2


@pytest.mark.parametrize('options', [{'action': 'ignore'}, {'deviations': 0.0}, {'window': 1}])
def test_what_means_nothing_is_refused(options):
  with pytest.raises(ConfigurationError, match=r'LossSpikes\.'):
    LossSpikes(**options)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """Rows of two letters, among which one step reads noise."""
  path = tmp_path_factory.mktemp('spikes')
  tiny_run.write_stores(path / 'data', 'letters', 'ab')
  random = np.random.default_rng(0)

  def row():
    text = random.choice(list('ab'), 20 * TOKENS)
    text[(SPIKE - 1) * TOKENS : SPIKE * TOKENS] = random.choice(list('ghijklmnopqrstuvw'), TOKENS)
    return store_writer.Document(np.asarray(tiny_run.BYTES.encode(''.join(text))), len(text))

  selection = Selection('noise', 'train', tiny_run.BYTES)
  store = store_path(selection, str(path / 'data'))
  store_writer.StoreWriter(store, selection, {}, shards=1).write(
    lambda shard: [row() for _ in range(8)]
  )
  (path / 'watch.py').write_text(WATCH)
  more = """
import watch
train.hooks = (@Watch(),)
train/TaskFeed.task = 'noise'
LossSpikes.window = 5
LossSpikes.deviations = 4.0
RefusedSteps.allowed = 1
"""
  (path / 'run.gin').write_text(tiny_run.gin_text(path / 'data', more=more))
  return path


@pytest.fixture
def train_here(folder, tmp_path, monkeypatch):
  """Trains in this process; returns {step: what Watch saw}, and the lines of refused steps."""
  monkeypatch.syspath_prepend(folder)

  def run(name, *more):
    gin.clear_config(clear_constants=True)
    flags = [
      f"--gin.Watch.path='{tmp_path / name}.json'", '--gin.train_steps=12',
      '--gin.learning_rate=0.03', '--gin.eval_every=100', '--gin.checkpoint_every=3',
      '--gin.LanguageModel.layers=1', '--gin.Block.mixers=(@S5,)',
      '--gin.create_writers.tensorboard=False', *more,
    ]  # fmt: skip
    files = [str(folder / 'run.gin')]
    load_gin(files, flags, allowed_imports=['watch'], modules=main.CONFIGURABLE_MODULES)
    with contextlib.suppress(Preempted):
      train.train(model_dir=str(tmp_path / name))
    seen = [json.loads(line) for line in (tmp_path / f'{name}.json').read_text().splitlines()]
    log = (tmp_path / name / 'refused_steps.jsonl').read_text().splitlines()
    return {step: rest for step, *rest in seen}, [json.loads(line) for line in log]

  return run


def test_a_spike_that_is_skipped_changes_nothing_but_what_is_remembered(train_here, folder):
  seen, log = train_here('skip', "--gin.LossSpikes.action='skip'")
  learned = {step: hashes for step, (hashes, _, _) in seen.items()}
  assert learned[SPIKE] == learned[SPIKE - 1]
  assert len(set(learned.values())) == 11
  assert [step for step, (_, empty, _) in seen.items() if empty] == [SPIKE]
  (line,) = log
  assert (line['step'], line['why']) == (SPIKE, 'loss spike')
  assert line['loss'] > 5 and f'documents of {folder}/data/noise-train' in line['read']


def test_a_spike_leads_back_to_the_checkpoint_that_was_due_however_often_the_run_stops(train_here):
  rewind = "--gin.LossSpikes.action='rewind'"
  seen, log = train_here('whole', rewind)
  learned = {step: hashes for step, (hashes, _, _) in seen.items()}
  assert learned[SPIKE] == learned[6]
  assert len(set(learned.values())) == 11
  assert log[0] == {'step': SPIKE, 'rewound_to': 6}
  assert (log[1]['step'], log[1]['why'], len(log)) == (SPIKE, 'loss spike', 2)
  before, _ = train_here('stopped', rewind, '--gin.Watch.stop_at=7')
  assert max(before) in (7, 8)  # which is saved, and is nearer to the spike
  assert train_here('stopped', rewind) == (seen, log)
