"""Options of a run: early stopping, a profile, and the average of the parameters."""

import pathlib
import re
import shutil

import gin
import numpy as np
import pytest
import tiny_run

from valkyrie import main
from valkyrie.checkpoint.manager import open_to_read
from valkyrie.errors import ConfigurationError
from valkyrie.run.lengths import Lengths, Lowest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def start(tmp_path, capsys):
  """Starts a run in a process -> (exit code, what it said)."""
  tiny_run.write_stores(tmp_path / 'data', 'letters', 'abc')
  (tmp_path / 'run.gin').write_text(tiny_run.gin_text(tmp_path / 'data'))

  def run(*flags):
    gin.clear_config(clear_constants=True)
    capsys.readouterr()
    code = main.main(
      [f'--gin_file={tmp_path / "run.gin"}', f'--model_dir={tmp_path / "run"}', *flags]
    )
    said = capsys.readouterr()
    return code, said.out + said.err

  return run


# Public report huggingface/transformers#28544: patience that begins anew after a resume.
def test_a_run_ends_when_validation_no_longer_improves_and_stays_ended(start, tmp_path):
  # The learning rate is too small to change a loss.
  flags = ['--gin.learning_rate=1e-30', '--gin.train_steps=9', '--gin.eval_every=1']
  code, said = start(*flags, '--gin.train.patience=2')
  assert code == 0
  assert 'stopped early: 2 evaluations found no lower loss than ' in said
  assert sorted(tiny_run.metrics(tmp_path / 'run')) == [1, 2, 3]
  with open_to_read(tmp_path / 'run') as directory:
    assert directory.latest_step() == 3
    record = directory.latest_record()
  assert record['lowest'][0] == 1 and record['lowest'][2] == 2
  code, said = start(*flags, '--gin.train.patience=2')
  assert code == 0 and 'nothing to do: stopped early' in said
  # More patience: the run goes on, and counts the evaluations before.
  code, said = start(*flags, '--gin.train.patience=3')
  assert code == 0 and 'stopped early: 3 evaluations' in said
  assert sorted(tiny_run.metrics(tmp_path / 'run')) == [1, 2, 3, 4]
  # A follower ends with the run, though train_steps are never done.
  code, _ = start('--run_mode=eval', '--follow', *flags)
  assert code == 0 and 4 in tiny_run.metrics(tmp_path / 'run', 'eval_whole')


def test_patience_begins_anew_with_a_lower_loss():
  lowest = Lowest(3, 1.0, 4)

  def end(patience):
    return Lengths(9, 1, 1, patience).early_end(lowest)

  assert end(None) is None and end(5) is None
  assert 'after step 3' in end(4)


def test_chosen_steps_are_profiled(start, tmp_path):
  code, _ = start('--gin.train_steps=3', '--gin.train.profile_steps=(2, 3)')
  assert code == 0
  assert list((tmp_path / 'run' / 'profile').rglob('*.xplane.pb'))
  several = ['--gin.train.profile_steps=(2, 3)', '--gin.train.profile_every=4']
  code, _ = start('--gin.train_steps=8', *several)  # from step 4 on
  assert code == 0
  found = (tmp_path / 'run' / 'profile').glob('*/plugins/profile/*/*.xplane.pb')
  assert [path.parts[-5] for path in found] == ['6']
  code, said = start('--gin.train.profile_steps=(2, 3)', '--gin.train.profile_every=2')
  assert code == ConfigurationError.exit_code and 'train.profile_every=2 repeats' in said
  code, said = start('--gin.train.profile_steps=(3, 2)')
  assert code == ConfigurationError.exit_code and 'train.profile_steps=(3, 2)' in said


def test_evaluation_reads_the_average(start, tmp_path):
  flags = ['--gin.StepSettings.average_decay=0.9', '--gin.train_steps=4', '--gin.learning_rate=0.1',
           '--gin.eval_every=4']  # fmt: skip
  code, _ = start(*flags)
  assert code == 0
  with open_to_read(tmp_path / 'run') as directory:
    average = directory.restore_evaluated()
  (trained,) = tiny_run.metrics(tmp_path / 'run', 'eval').values()
  code, _ = start(*flags, '--run_mode=eval')
  assert code == 0
  (again,) = tiny_run.metrics(tmp_path / 'run', 'eval').values()  # the later one of two lines
  assert again['loss'] == pytest.approx(trained['loss'], rel=1e-5)
  assert np.isfinite(average['model']['embedding']).all()


def test_long_unrolls_change_the_gradient_and_resume_where_they_were(start, tmp_path):
  cut, rare = '--gin.backprop_chunks=1', '--gin.Phase.long_every=2'
  others = ['--gin.checkpoint_every=1', "--gin.Optimizer.schedule='constant'", cut]
  long = [*others, rare, '--gin.Phase.long_backprop_chunks=2']
  found = {}
  for name, flags in (
    ('whole', [*long, '--gin.train_steps=4']),
    ('short', [*others, '--gin.train_steps=4']),
  ):
    code, _ = start(*flags)
    assert code == 0
    found[name] = tiny_run.metrics(tmp_path / 'run')
    (tmp_path / 'run').rename(tmp_path / name)
  norms = {name: [found[name][step]['grad_norm'] for step in (1, 2)] for name in found}
  assert norms['whole'][0] == norms['short'][0] and norms['whole'][1] != norms['short'][1]
  code, _ = start(*long, '--gin.train_steps=3')
  code, said = start(*long, '--gin.train_steps=4')
  assert code == 0 and 'resuming after step 3' in said
  assert tiny_run.metrics(tmp_path / 'run')[4]['loss'] == found['whole'][4]['loss']


def test_a_run_goes_on_bit_for_bit_on_another_part_of_the_devices(start, tmp_path):
  layout = f'--gin_file={ROOT}/gin/partition/zero1.gin'
  flags = [layout, '--gin.train_steps=3', '--gin.checkpoint_every=2', '--gin.eval_every=9']
  code, said = start(*flags, '--gin.Partitioner.devices=(0, 1)')
  assert code == 0, said
  shutil.rmtree(tmp_path / 'run' / 'checkpoints' / '3')
  before = tiny_run.metrics(tmp_path / 'run')[3]
  code, said = start(*flags, '--gin.Partitioner.devices=(6, 7)')
  assert code == 0, said
  after = tiny_run.metrics(tmp_path / 'run')[3]
  assert after['step_seconds'] != before['step_seconds']  # it was taken again
  assert (after['loss'], after['grad_norm']) == (before['loss'], before['grad_norm'])
  code, said = start(*flags, '--gin.Partitioner.devices=(0, 8)')
  assert code == 78 and 'does not name devices of this run' in said


def test_a_schedule_that_more_steps_stretch_is_said_and_can_be_kept(start, tmp_path):
  assert start('--gin.train_steps=2')[0] == 0
  code, said = start('--gin.train_steps=4')
  rate, saved = re.findall(r'learning rate of step 3 is (\S+), where .* had (\S+)', said)[0]
  assert code == 0 and float(rate) > 2 * float(saved)
  assert float(rate) == pytest.approx(
    tiny_run.metrics(tmp_path / 'run')[3]['learning_rate'], rel=1e-3
  )
  assert 'ended at step 2, and now ends at step 4: step 3 has' in said
  code, said = start('--gin.train_steps=5', '--gin.Optimizer.train_steps=4')
  assert code == 0 and 'resuming after step 4' in said and 'learning rate of' not in said


def test_a_budget_of_refused_steps_that_never_ends_a_run_is_refused_before_compilation(
  start, tmp_path
):
  code, said = start('--gin.RefusedSteps.allowed=100')
  assert code == 78 and 'RefusedSteps.allowed=100 must be at least 0 and below' in said
  assert 'compiling' not in said and not (tmp_path / 'run' / 'config.json').exists()
