"""A run opens by its own configuration: from the command line and from Python, with its steps."""

import json
import shutil
import subprocess
import sys

import gin
from gin import config as gin_config
import jax
import numpy as np
import pytest
import tiny_run

import valkyrie
from valkyrie import main
from valkyrie.config import record
from valkyrie.errors import ConfigurationError


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """A narrow run of 4 steps, and a wide one with fewer states."""
  folder = tmp_path_factory.mktemp('runs')
  tiny_run.write_stores(folder / 'data', 'letters', 'abc')
  (folder / 'run.gin').write_text(tiny_run.gin_text(folder / 'data'))
  flags = ['--gin.checkpoint_every=1', '--gin.eval_every=2', '--gin.Checkpoints.keep=9']
  for name, more in (
    ('narrow', ['--gin.learning_rate=1.0', '--gin.train_steps=4']),
    ('wide', ['--gin.LanguageModel.d_model=32', '--gin.S5.state_size=4']),
  ):
    gin.clear_config(clear_constants=True)
    arguments = [f'--gin_file={folder / "run.gin"}', f'--model_dir={folder / name}']
    assert main.main([*arguments, *flags, *more]) == 0
  return folder


@pytest.fixture
def start(capsys):
  """Runs the command line -> (exit code, output, errors)."""

  def run(*arguments):
    gin.clear_config(clear_constants=True)
    capsys.readouterr()
    code = main.main([str(argument) for argument in arguments])
    return code, *capsys.readouterr()

  return run


def test_a_run_is_evaluated_and_continued_without_its_flags(folder, start):
  run = f'--model_dir={folder / "wide"}'
  code, out, _ = start(run, '--run_mode=eval')
  assert code == 0
  loss = tiny_run.metrics(folder / 'wide', 'eval')[2]['loss']
  assert out.startswith(f'step 2, validation: loss {loss:.4f}')
  code, out, _ = start(run, '--run_mode=infer', '--prompt=abc', '--gin.infer.max_tokens=3')
  assert code == 0 and out.startswith('abc')


def test_the_configuration_of_a_run_names_no_file_to_read_or_write(folder, start, tmp_path):
  run = shutil.copytree(folder / 'wide', tmp_path / 'run')
  (tmp_path / 'secret').write_text('cab')
  config = json.loads((run / 'config.json').read_text())
  config['statements'] |= {
    'infer.output': repr(str(tmp_path / 'planted')),
    'infer.prompts': repr(str(tmp_path / 'secret')),
  }
  (run / 'config.json').write_text(json.dumps(record.sealed(config)))
  code, out, _ = start(f'--model_dir={run}', '--run_mode=infer', '--prompt=abc')
  assert code == 0 and out.startswith('abc')
  assert not (tmp_path / 'planted').exists()


def test_steps_are_chosen(folder, start):
  run = f'--model_dir={folder / "narrow"}'
  losses = {
    step: line['loss'] for step, line in tiny_run.metrics(folder / 'narrow', 'eval').items()
  }
  for step, expected in ((1, 1), ('best', min(losses, key=losses.get)), ('latest', 4)):
    code, out, _ = start(run, '--run_mode=eval', f'--step={step}')
    assert code == 0 and out.startswith(f'step {expected}, validation')
  code, _, errors = start(run, '--run_mode=eval', '--step=7')
  assert code == 78 and 'has no step 7. It has 1, 2, 3, 4.' in errors
  code, _, errors = start(run, '--run_mode=infer', '--step=first', '--prompt=a')
  assert code == 78 and "The step is 'first'. Use a number, 'latest' or 'best'." in errors
  assert start(run, '--step=2')[0] == 2  # of training


def test_changed_bindings_have_a_name_of_their_own(folder, start):
  run = folder / 'narrow'
  arguments = (f'--model_dir={run}', '--run_mode=eval')
  own = (run / 'eval' / 'metrics.jsonl').read_text()
  trained = '--gin.LanguageModel.compute_dtype="bfloat16"'
  read = '--gin.validation/TaskFeed.reset_at="never"'
  for flag, line in (
    (trained, "LanguageModel.compute_dtype was not set, is 'bfloat16'"),
    (read, "validation/TaskFeed.reset_at was not set, is 'never'"),
  ):
    code, _, errors = start(*arguments, flag)
    assert code == 78 and line in errors and '--gin.evaluate.name=' in errors
  assert start(*arguments, '--follow', trained)[0] == 78
  assert not (run / 'eval_whole').exists()
  assert (run / 'eval' / 'metrics.jsonl').read_text() == own
  named = (*arguments, '--gin.evaluate.name="bf16"')
  code, _, errors = start(*named, trained)
  assert code == 0 and 'changed since the checkpoint: LanguageModel.compute_dtype was' in errors
  assert "is 'bfloat16'" in (run / 'eval_bf16' / 'changed.json').read_text()
  assert start(*named, trained)[0] == 0
  for flags in ([], [read], [trained, read]):  # would be mixed with those under bfloat16
    code, _, errors = start(*named, *flags)
    assert code == 78 and 'eval_bf16 has evaluations with other bindings' in errors
  code, _, _ = start(*arguments, trained, '--gin.evaluate.name="bf16"', '--step=2')
  assert code == 0
  # They change no number, or not this model.
  same = ['--gin.Evaluator.chunk_size=8', '--gin.learning_rate=1e-9', '--gin.train_steps=9']
  code, _, errors = start(*arguments, *same, '--gin.LanguageModel.remat_policy="products"')
  assert code == 0 and 'changed since' not in errors


def test_the_size_of_chunks_counts_where_the_carry_is_cut(folder, start, tmp_path):
  run = shutil.copytree(folder / 'narrow', tmp_path / 'run')
  arguments = (f'--model_dir={run}', '--run_mode=eval', '--gin.evaluate.cuts=("state",)')
  assert start(*arguments)[0] == 0
  lines = (run / 'eval_cut_state' / 'metrics.jsonl').read_text()
  smaller = '--gin.Evaluator.chunk_size=4'
  code, _, errors = start(*arguments, smaller)
  assert code == 78 and 'eval_cut_state has evaluations with other bindings' in errors
  assert (run / 'eval_cut_state' / 'metrics.jsonl').read_text() == lines
  code, _, errors = start(*arguments, smaller, '--gin.evaluate.name="short"')
  assert code == 0 and 'changed since the checkpoint: Evaluator.chunk_size was 16, is 4' in errors


@pytest.mark.parametrize('name', ['whole', 'cut_state', 'mine_cut_all'])
def test_a_name_of_evaluations_own_folders_is_refused(folder, start, name):
  run = folder / 'narrow'
  code, _, errors = start(f'--model_dir={run}', '--run_mode=eval', f'--gin.evaluate.name="{name}"')
  assert code == 78 and 'names a folder that evaluations make themselves' in errors
  assert not (run / f'eval_{name}').exists()


def test_a_carry_under_other_bindings_is_refused(folder, tmp_path):
  run = folder / 'narrow'
  loaded = valkyrie.load(run, 4)
  loaded.save_carry(tmp_path / 'carry', loaded.read('abc'))
  assert valkyrie.load(run, 4, bindings=['open_run.chunk_size = 4']).load_carry(tmp_path / 'carry')
  for step, bindings in ((4, ['LanguageModel.embedding_scale = 3.0']), (2, [])):
    other = valkyrie.load(run, step, bindings=bindings)
    with pytest.raises(ConfigurationError, match='other weights, tokenizer, first carry or bind'):
      other.load_carry(tmp_path / 'carry')


def test_several_steps_stand_for_their_mean(folder, start):
  run = folder / 'narrow'
  opened = {step: valkyrie.load(run, step) for step in ('2', '4', '2,4')}
  assert opened['2,4'].steps == (2, 4)

  def check(mean, *parts):
    np.testing.assert_allclose(mean, np.mean(parts, axis=0, dtype=float), rtol=1e-6, atol=1e-7)
    assert mean.dtype == parts[0].dtype

  jax.tree.map(check, opened['2,4'].params, opened['2'].params, opened['4'].params)
  scores = [one.score('a text')[0].log_prob for one in opened.values()]
  assert len({*scores}) == 3
  arguments = (f'--model_dir={run}', '--run_mode=eval', '--step=2,4')
  code, _, errors = start(*arguments)
  assert code == 78 and '--step=2,4 averages several checkpoints' in errors
  assert start(*arguments, '--gin.evaluate.name="mean"')[0] == 0
  assert tiny_run.metrics(run, 'eval_mean')[4]['loss'] > 0
  code, _, errors = start(*arguments[:2], '--step=2,2', '--gin.evaluate.name="twice"')
  assert code == 78 and 'The steps 2,2 name one twice' in errors


def test_a_follower_reads_every_step_until_the_last(folder, start):
  run = f'--model_dir={folder / "narrow"}'
  (folder / 'narrow' / 'eval_whole').mkdir()
  (folder / 'narrow' / 'eval_whole' / 'metrics.jsonl').write_text('{"step": 2, "loss": 1.0}\n')
  code, out, _ = start(run, '--run_mode=eval', '--follow')
  assert code == 0
  assert [line.split(',')[0] for line in out.splitlines()] == ['step 1', 'step 3', 'step 4']
  assert sorted(tiny_run.metrics(folder / 'narrow', 'eval_whole')) == [1, 2, 3, 4]
  assert start(run, '--run_mode=eval', '--follow', '--step=1')[0] == 2


def test_other_data_has_a_name_of_its_own(folder, start):
  run, other = f'--model_dir={folder / "narrow"}', '--gin.validation/TaskFeed.split="train"'
  own = (folder / 'narrow' / 'eval' / 'metrics.jsonl').read_text()
  picture = (folder / 'narrow' / 'loss_by_position.png').read_bytes()
  code, _, errors = start(run, '--run_mode=eval', other)
  assert code == 78 and 'eval has evaluations of other data' in errors
  code, _, _ = start(run, '--run_mode=eval', other, '--gin.evaluate.name="train"')
  assert code == 0
  assert (folder / 'narrow' / 'eval' / 'metrics.jsonl').read_text() == own
  assert (folder / 'narrow' / 'loss_by_position.png').read_bytes() == picture
  assert (folder / 'narrow' / 'loss_by_position_train.png').exists()
  found = tiny_run.metrics(folder / 'narrow', 'eval_train')[4]
  assert found['perplexity'] == pytest.approx(np.exp(found['loss']))
  code, _, errors = start(run, '--run_mode=eval', '--gin.evaluate.name="train"')
  assert code == 78 and 'eval_train has evaluations of other data' in errors
  code, _, errors = start(run, '--run_mode=eval', '--gin.evaluate.name="a/b"')
  assert code == 78 and "evaluate.name='a/b' is part of a file name" in errors


def test_a_run_goes_on_without_its_flags(folder, start):
  code, _, errors = start(f'--model_dir={folder / "wide"}', '--gin.train_steps=3')
  assert code == 0 and 'resuming after step 2' in errors
  assert 3 in tiny_run.metrics(folder / 'wide')


def test_the_configuration_of_a_run_begins_another_one(folder, tmp_path):
  copied = tmp_path / 'mine.gin'
  shutil.copy(folder / 'wide' / 'config.gin', copied)
  # In a new process, in which gin knows no names of optax yet.
  script = """
import sys, gin
from valkyrie import main
from valkyrie.config.load import load_gin
load_gin([sys.argv[1]], [], modules=main.CONFIGURABLE_MODULES)
print(gin.config_str(), end='')
"""
  command = [sys.executable, '-c', script, str(copied)]
  loaded = subprocess.run(command, check=False, capture_output=True, text=True)
  assert loaded.stdout and copied.read_text().endswith(loaded.stdout), loaded.stderr


def test_prompts_from_a_file_become_lines(folder, start, tmp_path):
  prompts, output = tmp_path / 'prompts.jsonl', tmp_path / 'out.jsonl'
  prompts.write_text('{"prompt": "ab"}\n\n{"prompt": "é\\n"}\n')
  flags = [f'--model_dir={folder / "narrow"}', '--run_mode=infer', f'--prompts={prompts}']
  flags += ['--gin.infer.samples=2', '--gin.infer.max_tokens=4', '--gin.infer.temperature=1.0']
  code, printed, _ = start(*flags)
  assert code == 0
  assert start(*flags, f'--output={output}')[0] == 0
  assert output.read_text() == printed
  lines = [json.loads(line) for line in printed.splitlines()]
  assert [(line['prompt'], line['sample']) for line in lines] == [
    (prompt, sample) for prompt in ('ab', 'é\n') for sample in (0, 1)
  ]
  assert all(line['tokens'] == 4 for line in lines if line['ended'] == 'length')
  code, _, errors = start(*flags, f'--output={output}')
  assert code == 74 and f'{output} is there already' in errors
  prompts.write_text('{"prompt": "ab"}\n{"text": "ab"}\n')
  code, _, errors = start(*flags)
  assert code == 65 and 'prompts.jsonl:2: a JSON object with the field "prompt"' in errors
  code, _, errors = start(*flags[:2], '--prompts=none.txt')
  assert code == 65 and 'none.txt cannot be read' in errors
  assert start(*flags, '--prompt=a')[0] == 2


def test_two_runs_are_open_at_once_and_gin_is_as_it_was(folder):
  gin.clear_config(clear_constants=True)
  gin.parse_config('LanguageModel.d_model = 7')
  before = gin.config_str()
  narrow, wide = valkyrie.load(folder / 'narrow'), valkyrie.load(folder / 'wide', step=2)
  assert (gin.config_str(), gin.config_is_locked()) == (before, False)
  for length in (3, 40):  # each length is traced after both were loaded
    text = 'abc' * length
    for run, width in ((narrow, 16), (wide, 32)):
      assert run.params['model']['embedding'].shape[1] == width
      (found,) = run.score(text)
      assert np.isfinite(found.log_prob) and len(found.tokens) == 3 * length
      assert run.generate(text, max_tokens=2)[0].ended
  assert (gin.config_str(), gin.config_is_locked()) == (before, False)
  assert not gin_config._OPERATIVE_CONFIG
  assert narrow.tokenizer.decode(narrow.tokenizer.encode('abc')) == 'abc'
  assert (narrow.steps, wide.steps) == ((4,), (2,))


@pytest.fixture
def rewritten(folder, tmp_path):
  """A directory with a changed record of the narrow run's configuration."""

  def rewrite(change):
    data = json.loads((folder / 'narrow' / 'config.json').read_text())
    change(data)
    (tmp_path / 'config.json').write_text(json.dumps(record.sealed(data)))
    return f'--model_dir={tmp_path}'

  return rewrite


def test_a_secret_is_asked_for_by_name(rewritten, start):
  def with_secret(data):
    data['statements']['TaskFeed.source'] = "'https://(redacted)@host/x'"

  flags = [rewritten(with_secret), '--run_mode=eval']
  code, _, errors = start(*flags)
  assert code == 78
  assert (
    'TaskFeed.source was not recorded, since it is a secret. Pass --gin.TaskFeed.source=VALUE.'
    in errors
  )
  code, _, errors = start(*flags, '--gin.TaskFeed.source=None')
  assert 'contains no checkpoint' in errors


@pytest.mark.parametrize(
  ('change', 'said'),
  [
    ({'imports': ['import os']}, 'a gin file may import valkyrie, not os'),
    ({'imports': ['x = 1']}, 'is another statement'),
    ({'statements': {'x': "1\nimport os"}}, 'is not the record of a configuration'),
    ({'statements': {'x': "1\ninclude 'a'"}}, 'is not the record of a configuration'),
    ({'statements': {'import os': ''}}, 'is not the record of a configuration'),
    ({'statements': {'S5.nothing': '1'}}, "S5 has no parameter 'nothing'"),
    ({'statements': {'x': 1}, 'written_by': 'me'}, "it was written by 'me'"),
    ({'statements': []}, 'is not the record of a configuration'),
    ({'model_type': 'qwen3_5_text'}, 'holds weights, and is not the directory of a run'),
    ({'format': 'valkyrie'}, 'holds weights, and is not the directory of a run'),
    ({'statements': {'train.train_steps': '__import__("os")'}}, 'is not the record'),
  ],
)  # fmt: skip
def test_a_record_that_was_changed_runs_no_code(rewritten, start, change, said):
  code, _, errors = start(rewritten(lambda data: data.update(change)), '--run_mode=eval')
  assert code == 78 and said in errors and 'Traceback' not in errors


@pytest.fixture
def changed(folder, tmp_path):
  """A copy of the narrow run in whose config.json one text was replaced: (its flag, its file)."""

  def change(before, after, digest=True):
    run = shutil.copytree(folder / 'narrow', tmp_path / 'run', dirs_exist_ok=True)
    text = (folder / 'narrow' / 'config.json').read_text()
    assert text.count(before) == 1
    data = json.loads(text.replace(before, after))
    if not digest:  # as versions before 0.3 wrote it
      del data['sha256']
    (run / 'config.json').write_text(json.dumps(data))
    return f'--model_dir={run}', run / 'config.json'

  return change


@pytest.mark.parametrize(
  ('mode', 'digest'),
  [('eval', True), ('eval', False), ('infer', True), ('export', True), ('train', True)],
)
def test_a_changed_value_of_the_configuration_is_named(changed, start, tmp_path, mode, digest):
  flag, file = changed('"LanguageModel.layers": "1"', '"LanguageModel.layers": "3"', digest)
  more = {'infer': ['--prompt=a'], 'export': [f'--output={tmp_path / "out"}']}
  code, _, errors = start(flag, f'--run_mode={mode}', *more.get(mode, []))
  assert code == 78
  assert f'{file} was changed since the run wrote it: LanguageModel.layers is 3 in its' in errors
  assert 'and 1 in its "bindings"' in errors
  with pytest.raises(ConfigurationError, match=r'LanguageModel.layers is 3'):
    valkyrie.load(file.parent)


def test_the_advice_about_a_changed_configuration_helps(changed, start):
  flag, file = changed('"LanguageModel.layers": "1"', '"LanguageModel.layers": "3"')
  code, _, errors = start(flag, '--run_mode=eval', '--gin.LanguageModel.layers=1')
  assert code == 0, errors
  assert valkyrie.load(file.parent, bindings=['LanguageModel.layers=1']).steps == (4,)
  flag, file = changed('"version": "', '"version": "9.')  # what is in no binding
  code, _, errors = start(flag, '--run_mode=eval')
  assert code == 78 and f'{file} was changed since the run wrote it' in errors
  data = json.loads(file.read_text())
  del data['sha256']
  file.write_text(json.dumps(data))
  assert start(flag, '--run_mode=eval')[0] == 0


def test_a_directory_without_a_run(start, tmp_path):
  code, _, errors = start(f'--model_dir={tmp_path}', '--run_mode=eval')
  assert code == 78 and f'{tmp_path} is not the directory of a run' in errors
  (tmp_path / 'config.json').write_text('{')
  code, _, errors = start(f'--model_dir={tmp_path}', '--run_mode=eval')
  assert code == 78 and 'config.json cannot be read' in errors
