"""Trackers: what they receive, and what their failures do."""

import sys
import types

import gin
import pytest
import tiny_run

from valkyrie import main
from valkyrie.errors import ConfigurationError
from valkyrie.monitoring.trackers import Run, Tracking, Trackio, WeightsAndBiases


class Recorder:
  """A tracker that keeps all calls; `fails` names the method that raises."""

  def __init__(self, fails=None):
    self.calls, self.fails = [], fails

  def _note(self, *call):
    self.calls.append(call)
    if call[0] == self.fails:
      raise RuntimeError('no network')

  def start(self, run):
    self._note('start', run)

  def write(self, stream, step, numbers):
    self._note('write', stream, step, numbers)

  def end(self):
    self._note('end')


def track(tmp_path, *trackers, step=0):
  said = []
  tracking = Tracking(trackers, str(tmp_path), step, said.append)
  tracking.stream('train')(1, {'loss': 2.0})
  tracking.stream('eval')(1, {'loss': 3.0})
  tracking.close()
  return said


def test_a_tracker_gets_the_run_the_numbers_and_the_end(tmp_path):
  first, again = Recorder(), Recorder()
  assert track(tmp_path, first) == []
  track(tmp_path, again, step=7)
  (_, run), *written, end = first.calls
  assert (run.model_dir, run.step) == (str(tmp_path), 0) and run.configuration == {}
  assert written == [('write', 'train', 1, {'loss': 2.0}), ('write', 'eval', 1, {'loss': 3.0})]
  assert end == ('end',)
  resumed = again.calls[0][1]
  assert (resumed.step, resumed.id) == (7, run.id)  # a resumed run keeps its name


@pytest.mark.parametrize('method', ['start', 'write', 'end'])
def test_a_tracker_that_fails_is_reported_once_and_left_out(tmp_path, method):
  broken, sound = Recorder(fails=method), Recorder()
  (line,) = track(tmp_path, broken, sound)
  assert f'the tracker Recorder failed in {method}' in line and 'no network' in line
  assert [call[0] for call in broken.calls].count(method) == 1
  assert [call[0] for call in sound.calls] == ['start', 'write', 'write', 'end']


def library(name, monkeypatch):
  """A package whose `init` and run record their calls."""
  calls = []

  def record(method):
    return lambda *arguments, **options: calls.append((method, arguments, options))

  methods = {m: record(m) for m in ('log', 'finish', 'define_metric')}

  def init(**options):
    calls.append(('init', (), options))
    return types.SimpleNamespace(**methods)

  module = types.ModuleType(name)
  module.init = init
  monkeypatch.setitem(sys.modules, name, module)
  return calls


RUN = Run('runs/mine', 'abc', 5, {'S5.state_size': 8})


def test_weights_and_biases(monkeypatch):
  calls = library('wandb', monkeypatch)
  tracker = WeightsAndBiases('long', mode='offline')
  tracker.start(RUN)
  tracker.write('train', 6, {'loss': 1.5})
  tracker.end()
  assert calls[0][2] == {
    'project': 'long', 'entity': None, 'mode': 'offline', 'name': 'mine', 'id': 'abc',
    'resume': 'allow', 'dir': 'runs/mine', 'config': {'S5.state_size': 8},
  }  # fmt: skip
  assert ('log', ({'step': 6, 'train/loss': 1.5},), {}) in calls
  assert calls[-1][0] == 'finish'


def test_trackio(monkeypatch):
  calls = library('trackio', monkeypatch)
  tracker = Trackio('long', name='second')
  tracker.start(RUN)
  tracker.write('eval', 6, {'loss': 1.5})
  tracker.end()
  assert calls[0][2]['name'] == 'second' and calls[0][2]['resume'] == 'allow'
  assert ('log', ({'eval/loss': 1.5},), {'step': 6}) in calls
  assert calls[-1][0] == 'finish'


def test_a_missing_package_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, 'wandb', None)
  with pytest.raises(ConfigurationError, match='pip install wandb'):
    WeightsAndBiases('long')


def test_a_run_writes_to_its_trackers(tmp_path, monkeypatch, capsys):
  calls = library('wandb', monkeypatch)
  tiny_run.write_stores(tmp_path / 'data', 'letters', 'abc')
  more = 'trackers = (@WeightsAndBiases(),)\nWeightsAndBiases.project = "long"\n'
  more += 'train.trackers = %trackers\nevaluate.trackers = %trackers\n'
  (tmp_path / 'run.gin').write_text(tiny_run.gin_text(tmp_path / 'data', more=more))
  gin.clear_config(clear_constants=True)
  assert main.main([f'--gin_file={tmp_path / "run.gin"}', f'--model_dir={tmp_path / "run"}']) == 0
  assert calls[0][2]['config']['WeightsAndBiases.project'] == 'long'
  logged = [arguments[0] for method, arguments, _ in calls if method == 'log']
  assert {'train/loss', 'eval/loss', 'train/tokens_per_second'} <= {
    n for log in logged for n in log
  }
  assert calls[-1][0] == 'finish'

  identity = calls[0][2]['id']
  calls.clear()
  gin.clear_config(clear_constants=True)
  assert main.main([f'--model_dir={tmp_path / "run"}', '--run_mode=eval', '--follow']) == 0
  of_follower = calls[0][2]  # a run of its own: its steps come after later ones of the trainer
  assert (of_follower['id'], of_follower['name']) == (f'{identity}-eval_whole', 'run eval_whole')
  (((log,), _),) = [call[1:] for call in calls if call[0] == 'log']
  assert log['step'] == 2 and log['eval_whole/loss'] > 0
  assert ('define_metric', ('*',), {'step_metric': 'step'}) in calls
  assert calls[-1][0] == 'finish'
  capsys.readouterr()
