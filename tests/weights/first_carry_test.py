"""A first carry that is learned: alone, exported, and loaded beside the weights of another run."""

import functools
import json

import gin
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
import tiny
import tiny_run

import valkyrie
from valkyrie import main
from valkyrie.errors import ConfigurationError
from valkyrie.models.recurrence.gated_delta import GatedDeltaNet
from valkyrie.models.recurrence.mamba2 import Mamba2
from valkyrie.types import leaves_by_path

LEARNED = "\ninclude 'gin/optimizers/first_carry.gin'\nInitialWeights.any_loss = True\n"


def start(*flags):
  gin.clear_config(clear_constants=True)
  return main.main([*flags])


def with_first_carry(run, file):
  return valkyrie.load(run, bindings=[f"open_run.first_carry = '{file}'"])


def test_a_task_is_one_small_file_beside_the_weights(tmp_path, capsys):
  tiny_run.write_stores(tmp_path / 'data', 'letters', 'ab')
  base = tiny_run.train(tmp_path / 'base', tmp_path / 'data')
  more = f"train.initial_weights = '{base}'\nlearning_rate = 0.1\n{LEARNED}"
  task = tiny_run.train(tmp_path / 'task', tmp_path / 'data', data=more)
  folder = tmp_path / 'exported'
  form = "--gin.export.form='first_carry'"
  flags = ['--run_mode=export', f'--output={folder}', form]
  assert start(f'--model_dir={base}', *flags) == ConfigurationError.exit_code
  assert start(f'--model_dir={task}', *flags) == 0
  assert (folder / 'model.safetensors').stat().st_size < 8000
  plain, learned = valkyrie.load(base), valkyrie.load(task)
  for module, group in learned.params.items():
    for name, array in group.items():
      if name.startswith('first_carry'):
        assert np.linalg.norm(array) > 0.01
      else:
        np.testing.assert_array_equal(array, plain.params[module][name])
  scores = []
  for run in (learned, plain, *(with_first_carry(base, of) for of in (folder, task))):
    scores.append(run.score('abba' * 20)[0].log_prob)
  assert scores[0] != scores[1]
  assert scores[2:] == scores[:1] * 2
  # A carry that began with it is another one.
  begun = with_first_carry(base, folder)
  begun.save_carry(tmp_path / 'carry', begun.read('abba'))
  with_first_carry(base, task).load_carry(tmp_path / 'carry')
  with pytest.raises(ConfigurationError, match='other weights, tokenizer, first carry'):
    plain.load_carry(tmp_path / 'carry')
  tensors = load_file(folder / 'model.safetensors')
  tensors['final_norm.scale'] = 1.001 * tensors['final_norm.scale']
  save_file(tensors, tmp_path / 'other.safetensors')
  # The last norm of a run with adapters is that of the run that it began from.
  (tmp_path / 'base.gin').write_text(tiny_run.gin_text(tmp_path / 'data'))
  lora = (
    f"train.initial_weights = '{base}'\nlearning_rate = 0.1\ninclude 'gin/optimizers/lora.gin'\n"
  )
  lora += "Lora.pattern = 'mlp'\nLora.rank = 2\nInitialWeights.any_loss = True\n"
  adapted = tiny_run.train(tmp_path / 'adapted', tmp_path / 'data', data=lora)
  with pytest.raises(ConfigurationError, match='no first carry that was learned with the weights'):
    with_first_carry(adapted, folder)
  # It is not left out silently, and an export says that the model has it.
  flags = [f'--model_dir={tmp_path / "again"}', f'--gin_file={tmp_path / "base.gin"}']
  flags.append('--gin.InitialWeights.any_loss=True')
  begin = f'--gin.train.initial_weights="{task}"'
  assert start(*flags, begin) == ConfigurationError.exit_code
  assert 'begins with a first carry that it has learned' in capsys.readouterr().err
  assert start(*flags, begin, '--gin.InitialWeights.partial=True') == 0
  given = f'--gin.open_run.first_carry="{folder}"'
  both = tmp_path / 'both'
  assert start(f'--model_dir={base}', '--run_mode=export', f'--output={both}', given) == 0
  assert json.loads((both / 'config.json').read_text())['model']['LanguageModel.learned_carry']
  flags = ['--run_mode=export', f'--output={tmp_path / "theirs"}', given, form]
  assert start(f'--model_dir={base}', *flags) == ConfigurationError.exit_code
  # A run and an export are compared in all tensors.
  whole = tmp_path / 'whole'
  assert start(f'--model_dir={task}', '--run_mode=export', f'--output={whole}') == 0
  assert with_first_carry(base, whole).score('abba' * 20)[0].log_prob == scores[0]
  tensors = load_file(whole / 'model.safetensors')
  tensors['embedding'][0] *= 1.001
  save_file(tensors, tmp_path / 'altered.safetensors')
  for source in (base, tmp_path / 'other.safetensors', tmp_path / 'altered.safetensors'):
    with pytest.raises(
      ConfigurationError, match='no first carry that was learned with the weights'
    ):
      with_first_carry(base, source)


def test_a_first_carry_is_no_matrix():
  """Weight decay, and algorithms for matrices, are not for states, of whatever shape."""
  delta = functools.partial(
    GatedDeltaNet, heads=2, horizon=100.0, slice_size=8, key_width=4, value_width=8
  )
  mamba = functools.partial(
    Mamba2, heads=2, horizon=100.0, slice_size=8, head_width=4, state_size=8
  )
  model = tiny.model(mixers=(delta, mamba, tiny.s5), learned_carry=True)
  params, _ = model.init(jax.random.key(0), 1)
  kinds = leaves_by_path(model.kinds(params))
  first = {path: kind for path, kind in kinds.items() if '/first_carry' in path}
  assert len(first) >= 3
  assert not [path for path, kind in first.items() if kind.is_matrix]
  assert [path for path, kind in kinds.items() if kind.is_matrix]


def test_a_model_without_recurrences_has_none():
  with pytest.raises(ConfigurationError, match='learned_carry=True needs a recurrence'):
    tiny.model(mixers=(tiny.attention,), learned_carry=True).parameters()
