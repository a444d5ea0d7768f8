"""Runs that begin with the weights of another run."""

import pathlib
import shutil

import gin
import numpy as np
import pytest
import tiny_run

from valkyrie import main
from valkyrie.checkpoint.manager import open_to_read
from valkyrie.errors import ConfigurationError
from valkyrie.weights.initial import open_source


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  """(gin file, run): one that knows its letters."""
  place = tmp_path_factory.mktemp('trained')
  tiny_run.write_stores(place / 'data', 'letters', 'ab')
  file = place / 'run.gin'
  file.write_text(tiny_run.gin_text(place / 'data'))
  flags = [f'--gin.{name}=40' for name in ('train_steps', 'eval_every', 'checkpoint_every')]
  assert start(file, place / 'run', *flags, '--gin.learning_rate=0.02') == 0
  return file, place / 'run'


def start(file, model_dir, *flags):
  gin.clear_config(clear_constants=True)
  return main.main([f'--gin_file={file}', f'--model_dir={model_dir}', *flags])


def tensors(run):
  return {name: tensor.read(tuple(map(slice, tensor.shape)))
          for name, tensor in open_source(str(run)).tensors.items()}  # fmt: skip


def test_weights_that_cannot_be_read_are_refused_before_a_text_is_tokenized(tmp_path):
  """The task does not exist, either: whatever opens it first ends with another message."""
  weights = f"train.initial_weights = '{tmp_path}/weights'"
  with pytest.raises(ConfigurationError, match='weights are not there'):
    tiny_run.train(tmp_path / 'run', tmp_path / 'nothing', data=weights)


def test_a_run_begins_where_another_ended_and_resumes_from_its_own(trained, tmp_path, capsys):
  file, original = trained
  source = tmp_path / 'source'
  shutil.copytree(original, source)
  flags = [f"--gin.train.initial_weights='{source}'", '--gin.train_steps=1',
           '--gin.checkpoint_every=1', '--gin.learning_rate=1e-9']  # fmt: skip
  capsys.readouterr()
  assert start(file, tmp_path / 'next', *flags) == 0
  said = capsys.readouterr()
  said = said.out + said.err
  count = len(tensors(source))
  assert f'loaded {count} of the {count} tensors of the model from {source}' in said
  assert 'the validation loss of the loaded weights is ' in said
  before, after = tensors(source), tensors(tmp_path / 'next')
  for name, value in before.items():
    np.testing.assert_allclose(after[name], value, atol=1e-7, err_msg=name)
  with open_to_read(tmp_path / 'next') as directory:
    assert directory.latest_step() == 1
  shutil.rmtree(source)  # a resumed run no longer needs it
  assert start(file, tmp_path / 'next', *flags, '--gin.train_steps=2') == 0
  said = capsys.readouterr()
  assert 'resuming after step 1' in said.out + said.err
  assert 'loaded' not in said.out + said.err


def test_a_run_without_steps_keeps_its_first_weights_for_other_run_modes(trained, tmp_path, capsys):
  file, source = trained
  weights = f"--gin.train.initial_weights='{source}'"
  at_once = '--gin.train_steps=0'
  capsys.readouterr()
  assert start(file, tmp_path / 'kept', weights, at_once) == 0
  said = capsys.readouterr().err
  assert 'saved step 0' in said and 'compiling a step' not in said
  before, after = tensors(source), tensors(tmp_path / 'kept')
  for name, value in before.items():
    np.testing.assert_array_equal(after[name], value, err_msg=name)
  assert start(file, tmp_path / 'kept', weights, at_once) == 0
  assert 'nothing to do: train_steps=0 are done' in capsys.readouterr().err
  assert start(file, tmp_path / 'kept', at_once, '--run_mode=eval', '--follow') == 0
  (evaluated,) = tiny_run.metrics(tmp_path / 'kept', 'eval_whole').values()
  assert evaluated['step'] == 0 and evaluated['loss'] < 1.0
  # It trains later, as a run does that takes its steps at once.
  assert start(file, tmp_path / 'kept', weights, '--gin.train_steps=2') == 0
  assert start(file, tmp_path / 'whole', weights, '--gin.train_steps=2') == 0
  losses = [
    [line['loss'] for line in tiny_run.metrics(tmp_path / name).values()]
    for name in ('kept', 'whole')
  ]
  assert losses[0] == losses[1] and len(losses[0]) == 2


def test_weights_no_better_than_a_guess_are_refused(trained, tmp_path, capsys):
  _, source = trained
  tiny_run.write_stores(tmp_path / 'data', 'letters', 'xy')  # which it has never seen
  (tmp_path / 'run.gin').write_text(tiny_run.gin_text(tmp_path / 'data'))
  flag = f"--gin.train.initial_weights='{source}'"
  assert start(tmp_path / 'run.gin', tmp_path / 'next', flag) == ConfigurationError.exit_code
  assert 'not clearly below the 5.5568 of a guess' in capsys.readouterr().err
  found = {path.name for path in (tmp_path / 'next').iterdir()}
  assert 'model_info.txt' in found and 'config.json' not in found  # the table is there before
  accepted = '--gin.InitialWeights.any_loss=True'
  assert start(tmp_path / 'run.gin', tmp_path / 'next', flag, accepted) == 0
  said = capsys.readouterr()
  assert 'warning: the validation loss of the loaded weights is' in said.out + said.err


def test_weights_of_another_tokenizer_are_refused_unless_embeddings_are_new(
  trained, tmp_path, capsys
):
  tokenizer = tmp_path / 'tokenizer.json'
  tiny_run.write_tokenizer(tokenizer)
  _, source = trained
  text = pathlib.Path(tmp_path / 'text')
  text.mkdir()
  for number in range(20):
    (text / f'{number}.txt').write_text(tiny_run.TEXT[: 100 + number])
  flags = [
    '--gin_file=gin/data/text.gin',
    f"--gin.text='{text}'",
    '--gin.held_out=0.5',
    f"--gin.vocabulary='{tokenizer}'",
    f"--gin.train.initial_weights='{source}'",
    '--gin.train_steps=1',
  ]
  file, _ = trained
  assert start(file, tmp_path / 'next', *flags) == ConfigurationError.exit_code
  said = capsys.readouterr().err
  assert 'was trained with the vocabulary bytes' in said
  fresh = "--gin.InitialWeights.rules=(('embedding$', 'fresh'),)"
  assert start(file, tmp_path / 'next', *flags, fresh) == 0
  said = capsys.readouterr()
  assert 'new, initialized: embedding' in said.out + said.err
