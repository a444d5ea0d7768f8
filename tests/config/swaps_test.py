"""Every part is exchanged by editing bindings only, and what does not fit together is refused."""

import functools
import json
import math
import re
import shutil
import types

import gin
import planner  # noqa: F401  (a configurable)
import pytest
import tiny_run

from valkyrie import main
from valkyrie.config.load import load_gin
from valkyrie.data.feed import TaskFeed
from valkyrie.errors import ConfigurationError, DataError, Diverged, StorageError
from valkyrie.inference import infer
from valkyrie.run import evaluate

ATTENTION = '(@LongformerAttention,)'
FULL_MIXERS = '(@FullAttention, @S5)'
FULL = """
FullAttention.heads = 2
FullAttention.head_width = 8
FullAttention.max_context = {}
"""
PLANNER = """
LanguageModel.insert = @Planner
StepSettings.objective = (@Prediction, @DraftLoss)
Planner.plan_interval = {}
Planner.plan_tokens = 2
Planner.mlp_width = 24
Planner.head_width = 8
Planner.cycles = 1
Planner.steps = 1
Planner.segments = 1
"""

# A mixer as a user would write it, in a package of their own.
SMEAR = '''
import gin
import haiku as hk
import jax.numpy as jnp


@gin.configurable
class Smear(hk.Module):
  """Mixes a token with the one before it: y[t] = w * x[t - 1]."""

  causal = True
  dropout = 0.0

  def __init__(self, scale=1.0, name=None):
    super().__init__(name)
    self.scale = scale

  def initial_carry(self, batch_size, dtype):
    return jnp.zeros((batch_size, 1, 16), dtype)

  def forward_flops(self, width):
    return 2 * width

  def __call__(self, x, carry, *, positions, segment_ids):
    weight = hk.get_parameter('weight', (x.shape[-1],), init=hk.initializers.Constant(self.scale))
    before = jnp.concatenate([carry, x[:, :-1]], axis=1)
    before = jnp.where((positions > 0)[..., None], before, 0)
    length = jnp.sum(segment_ids > 0, axis=1)[:, None, None]
    after = jnp.take_along_axis(jnp.concatenate([carry, x], axis=1), length, axis=1)
    return before * weight[None, None], after
'''


@pytest.fixture
def data_dir(trained):
  return trained[0]


@pytest.fixture
def base(trained):
  """A run with nothing exchanged."""
  return trained[1]


@pytest.fixture
def train_run(data_dir):
  """Trains by a gin text."""
  return lambda model_dir, *flags, **options: tiny_run.train(model_dir, data_dir, *flags, **options)


def parameters(model_dir):
  """The paths in model_info.txt."""
  _, table, *_ = (model_dir / 'model_info.txt').read_text().split('\n\n')
  return {line.split()[0] for line in table.splitlines()[1:]}


def assert_trained(model_dir):
  """Two steps with finite losses near ln 259, as of equally likely bytes, and both endings."""
  lines = tiny_run.metrics(model_dir)
  assert list(lines) == [1, 2]
  assert all(abs(line['loss'] - math.log(259)) < 1 for line in lines.values())
  assert all(line['grad_norm'] > 0 and line['skipped'] == 0 for line in lines.values())
  assert math.isfinite(tiny_run.metrics(model_dir, 'eval')[2]['loss'])
  assert (model_dir / 'checkpoints' / '2').is_dir()


def contents(folder):
  return {file: file.read_bytes() for file in folder.rglob('*') if file.is_file()}


def test_mixers(base, train_run, tmp_path):
  """One for the other; pulse_test.py has both."""
  attention = train_run(tmp_path / 'attention', mixers=ATTENTION)
  found = {}
  for run in (base, attention):
    assert_trained(run)
    found[run] = {
      'S5': any('/s5/lambda_re' in name for name in parameters(run)),
      'attention': any('/longformer_attention/register_keys' in name for name in parameters(run)),
    }
  assert found[base] == {'S5': True, 'attention': False}
  assert found[attention] == {'S5': False, 'attention': True}


def test_full_attention(train_run, tmp_path):
  run = train_run(tmp_path / 'run', mixers=FULL_MIXERS, more=FULL.format(tiny_run.LONGEST))
  assert_trained(run)
  names = ' '.join(parameters(run))
  assert 'full_attention/query' in names and '/s5/' in names
  assert 'longformer' not in names and 'register' not in names


def test_full_attention_refuses_a_longer_document(train_run, tmp_path):
  longest = tiny_run.LONGEST
  message = f'longest document has {longest} tokens.*at most {longest - 1} .*max_context'
  with pytest.raises(DataError, match=message) as caught:
    train_run(tmp_path / 'run', mixers=FULL_MIXERS, more=FULL.format(longest - 1))
  assert caught.value.exit_code == 65
  assert not (tmp_path / 'run' / 'metrics.jsonl').exists()


def test_full_attention_that_slides_reads_a_longer_document(train_run, tmp_path):
  more = FULL.format(tiny_run.LONGEST - 1) + 'FullAttention.slides = True\n'
  train = functools.partial(train_run, mixers=FULL_MIXERS, more=more)
  run = train(tmp_path / 'run')
  assert_trained(run)
  train(run, '--gin.train_steps=3')  # goes on with the keys that the checkpoint has
  assert 3 in tiny_run.metrics(run)


def test_full_attention_without_a_carry(train_run, tmp_path):
  more = FULL.format(16) + 'FullAttention.carried = False\n'
  train_alone = functools.partial(train_run, mixers='(@FullAttention,)', more=more)
  run = train_alone(tmp_path / 'run')
  assert_trained(run)  # also documents longer than a chunk, 16 tokens
  train_alone(run, '--gin.train_steps=3')
  assert 3 in tiny_run.metrics(run)
  with pytest.raises(ConfigurationError, match='carried is False'):
    infer.infer(str(run), 'abc')


@pytest.mark.parametrize(
  'more', ['Optimizer.algorithm = @optax.adabelief', "include 'gin/optimizers/muon.gin'"]
)
def test_optimizer(base, train_run, tmp_path, more):
  run = train_run(tmp_path / 'run', partition='zero1', more=more)
  assert_trained(run)
  # The first loss is measured before the first update, the second shows the optimizer. The layouts
  # differ, and with them the order of sums.
  mine, theirs = tiny_run.metrics(run), tiny_run.metrics(base)
  assert mine[1]['loss'] == pytest.approx(theirs[1]['loss'], rel=1e-6)
  assert mine[2]['loss'] != theirs[2]['loss']


def test_curriculum(base, train_run, tmp_path):
  run = train_run(tmp_path / 'run', curriculum='short_then_long')
  assert_trained(run)
  assert [line['phase'] for line in tiny_run.metrics(run).values()] == [0, 1]
  assert [line['phase'] for line in tiny_run.metrics(base).values()] == [0, 0]


def test_planner(base, train_run, tmp_path):
  """In the second phase only."""
  more = PLANNER.format(8) + 'short/Phase.insert = False'
  run = train_run(tmp_path / 'run', curriculum='short_then_long', layers=2, more=more)
  assert_trained(run)
  assert any('/planner/' in name for name in parameters(run))
  assert not any('planner' in name or 'upper' in name for name in parameters(base))
  lines = tiny_run.metrics(run)
  assert lines[1]['terms/draft_loss'] == 0 < lines[2]['terms/draft_loss']
  assert 'terms/draft_loss' not in tiny_run.metrics(base)[1]


SPLIT = "Partitioner.manual = True\nPartitioner.axis_rules = (('time', 'data'),)"


@pytest.mark.parametrize(
  ('mixers', 'more', 'named'),
  [
    ('(@S5,)', PLANNER.format(8), 'Planner'),
    (FULL_MIXERS, PLANNER.format(8) + FULL.format(12), 'Planner'),
  ],
)
def test_a_layout_that_splits_time_refuses_what_needs_all_of_it(
  train_run, tmp_path, mixers, more, named
):
  with pytest.raises(
    ConfigurationError, match=rf"'time' over \('data',\), but {named} must"
  ) as caught:
    train_run(tmp_path / 'run', layers=2, mixers=mixers, more=more + SPLIT)
  assert caught.value.exit_code == 78


def test_partitioner(base, train_run, tmp_path):
  run = train_run(tmp_path / 'run', partition='data')
  assert_trained(run)
  assert 'data=1' in (base / 'model_info.txt').read_text()
  assert 'data=8' in (run / 'model_info.txt').read_text()
  for mine, theirs in zip(*(tiny_run.metrics(r).values() for r in (run, base)), strict=True):
    assert mine['loss'] == pytest.approx(theirs['loss'], rel=1e-5)


def test_the_hunt_for_a_nan_names_a_module(train_run, tmp_path):
  with pytest.raises(Diverged, match=r'Step 2 has .* The first: the output of \w+'):
    flags = ('--gin.StepSettings.hunt_nan=True', '--gin.learning_rate=1e30')
    train_run(tmp_path / 'run', *flags, mixers=ATTENTION)


def test_task(base, data_dir, train_run, tmp_path):
  run = train_run(tmp_path / 'run', "--gin.task='digits'")
  assert_trained(run)
  for model_dir, task in ((run, 'digits'), (base, 'letters')):
    record = json.loads((model_dir / 'checkpoints' / '2' / 'record.json').read_text())
    feed = TaskFeed(task, 'train', 8, 0, data_dir=str(data_dir))
    assert record['store'] == feed.fingerprint


MIXTURE = """
include 'gin/data/mixture.gin'
sources = {'words': {'task': 'letters'}, 'numbers': {'task': 'digits'}}
weights = {'words': 3, 'numbers': 1}
Optimizer.schedule = 'constant'  # another number of steps is the same program
"""


def test_a_mixture(train_run, data_dir, tmp_path, capsys):
  train_mixture = functools.partial(train_run, data=MIXTURE)
  run = train_mixture(tmp_path / 'run')
  assert_trained(run)
  assert re.search(r'[\d.]+ epochs of words, [\d.]+ epochs of numbers', capsys.readouterr().err)
  (_, last), found = tiny_run.metrics(run).values(), tiny_run.metrics(run, 'eval')[2]
  assert last['tokens/words'] + last['tokens/numbers'] == last['tokens'] == 8 * 64
  losses = [found['loss/words'], found['loss/numbers']]
  assert found['loss'] == pytest.approx(0.75 * losses[0] + 0.25 * losses[1])
  # Each is the loss of the source alone.
  gin.clear_config(clear_constants=True)
  (tmp_path / 'alone.gin').write_text(tiny_run.gin_text(data_dir))
  load_gin(
    [str(tmp_path / 'alone.gin')], ["--gin.task='digits'"], modules=main.CONFIGURABLE_MODULES
  )
  shutil.copytree(run / 'checkpoints', tmp_path / 'alone' / 'checkpoints')
  evaluate.evaluate(model_dir=str(tmp_path / 'alone'))
  assert tiny_run.metrics(tmp_path / 'alone', 'eval')[2]['loss'] == losses[1]

  with pytest.raises(ConfigurationError, match=r'Mixture\.weights was .*numbers.* is '):
    train_mixture(run, '--gin.train_steps=3', "--gin.weights={'words': 1, 'numbers': 1}")
  train_mixture(run, '--gin.train_steps=3', '--gin.validation/TaskFeed.shuffle=True')
  whole = train_mixture(tmp_path / 'whole', '--gin.train_steps=3')
  assert tiny_run.metrics(whole)[3]['loss'] == tiny_run.metrics(run)[3]['loss']


def test_a_mixer_of_ones_own(train_run, tmp_path, monkeypatch, capsys):
  package = tmp_path / 'their_mixers'
  package.mkdir()
  (package / '__init__.py').write_text('')
  (package / 'smear.py').write_text(SMEAR)
  monkeypatch.syspath_prepend(tmp_path)
  more = """
import their_mixers.smear
Smear.scale = 0.5
"""
  train_theirs = functools.partial(train_run, allowed_imports=['their_mixers'])
  run = train_theirs(
    tmp_path / 'run', mixers='(@LongformerAttention, @Smear)', more=more, partition='zero1'
  )
  assert_trained(run)
  said = capsys.readouterr().err
  assert re.search(r'params/model/.*/smear/weight is replicated .* declares no axes', said)
  assert said.count('is replicated') == 1
  assert {name.split('/')[-2] for name in parameters(run) if name.endswith('weight')} == {'smear'}

  (package / 'wrong.py').write_text(
    SMEAR.replace('class Smear', 'class Unbound').replace('scale=1.0', 'scale')
    + SMEAR.replace('class Smear', 'class Lacking').replace('  dropout = 0.0\n', '')
  )
  for mixer, message in (
    ('Unbound', r'@Unbound cannot be built, since Unbound\.scale has no value'),
    ('Lacking', 'The mixer Lacking has no attribute dropout'),
  ):
    with pytest.raises(ConfigurationError, match=message):
      train_theirs(tmp_path / 'wrong', mixers=f'(@{mixer},)', more='import their_mixers.wrong')


def test_a_vocabulary_larger_than_the_models(train_run, tmp_path):
  with pytest.raises(ConfigurationError, match=r'259 tokens.*only 200.*vocabulary_size = 259'):
    train_run(tmp_path / 'run', '--gin.LanguageModel.vocabulary_size=200')


@pytest.mark.parametrize('feed', ['train', 'validation'])
@pytest.mark.parametrize('rows', [6, 9])
def test_all_rows_of_a_feed_are_read(train_run, tmp_path, feed, rows):
  with pytest.raises(
    ConfigurationError, match=rf'has {rows} rows, but 8 are .*{feed}/TaskFeed and'
  ):
    train_run(tmp_path / 'run', f'--gin.{feed}/TaskFeed.batch_size={rows}')


def test_a_feed_that_ends_before_the_last_step(train_run, tmp_path, capsys):
  more = 'train/TaskFeed.epochs = 1'
  steps = [*range(1, 4)]  # of 32 tokens, in rows of at most 97
  run = train_run(tmp_path / 'run', '--gin.train_steps=3', more=more)
  assert list(tiny_run.metrics(run)) == steps
  assert '3 steps read 96 tokens of each row' in capsys.readouterr().err
  with pytest.raises(ConfigurationError, match=r'longest row, in step 4.*Set train_steps=4, or'):
    train_run(run, '--gin.train_steps=5', more=more)


def test_the_size_of_a_tokenizer(train_run, tmp_path):
  folder, tokenizer, stores = tmp_path / 'text', tmp_path / 'tokenizer.json', tmp_path / 'stores'
  folder.mkdir()
  for number in range(40):
    (folder / f'{number}.txt').write_text(f'{number} {tiny_run.TEXT}')
  tiny_run.write_tokenizer(tokenizer)
  data = f"""
include 'gin/data/text.gin'
text = '{folder}'
held_out = 0.5
vocabulary = '{tokenizer}'
"""
  flags = (f"--gin.TaskFeed.data_dir='{stores}'",)
  with pytest.raises(
    ConfigurationError, match=r'271 tokens, but .*only 270.*vocabulary_size = 271'
  ):
    train_run(tmp_path / 'run', '--gin.LanguageModel.vocabulary_size=270', *flags, data=data)
  assert not stores.exists()

  run = train_run(tmp_path / 'run', *flags, data=data)
  assert_trained(run)
  for mode, given in ((evaluate.evaluate, {}), (infer.infer, {'prompt': 'deep'})):
    gin.clear_config(clear_constants=True)
    files = [str(tmp_path / name) for name in ('run.gin', 'run.data.gin')]
    other = (*flags, "--gin.vocabulary='bytes'")
    load_gin(files, other, modules=main.CONFIGURABLE_MODULES)
    with pytest.raises(
      ConfigurationError, match=r'trained with the vocabulary huggingface-.*bytes'
    ):
      mode(model_dir=str(run), **given)

  # The run goes on by its copy of the tokenizer, also where the file has gone.
  tokenizer.unlink()
  gin.clear_config(clear_constants=True)
  assert main.main([f'--model_dir={run}', '--gin.train_steps=3']) == 0
  assert list(tiny_run.metrics(run)) == [1, 2, 3]


def test_a_model_dir_that_is_a_file(train_run, tmp_path):
  (tmp_path / 'run').write_text('kept')
  with pytest.raises(StorageError, match=r'run.*Move away what is there') as caught:
    train_run(tmp_path / 'run')
  assert caught.value.exit_code == 74
  assert (tmp_path / 'run').read_text() == 'kept'


@pytest.mark.invariant(15)
def test_a_checkpoint_of_another_model(base, train_run):
  before = contents(base / 'checkpoints')
  with pytest.raises(ConfigurationError, match=r'LanguageModel\.d_model was 16, is 32') as refusal:
    train_run(base, '--gin.LanguageModel.d_model=32')
  assert 'It cannot continue: the state of this run has other arrays' in str(refusal.value)
  assert 'allow_changed' not in str(refusal.value), 'it would end with the same exit code'
  with pytest.raises(ConfigurationError, match=r'another model.*\n.*found .*expected '):
    train_run(base, '--gin.LanguageModel.d_model=32', allow_changed=('configuration',))
  assert contents(base / 'checkpoints') == before


@pytest.mark.parametrize(
  'changes, named',
  [
    (['seed=1'], ['configuration: StepSettings.seed was 0, is 1', '--allow_changed=configuration']),
    (['chunks=4'], ['Phase.chunks was 2, is 4', '--allow_changed=configuration.']),
    (['batch_size=4'], ['rows: was 8, is 4', '--allow_changed=rows.']),
    (
      ['Partitioner.mesh=(("data", 8),)', 'Partitioner.manual=False'],
      ["mesh: axes was {'data': 1}, is {'data': 8}"],
    ),
    (["task='digits'"], ['store: was ']),
    (['TaskFeed.reset_at="never"'], ["TaskFeed.reset_at was 'document', is 'never'"]),
  ],
)
def test_a_resume_that_would_not_go_on(base, train_run, changes, named):
  before = contents(base / 'checkpoints')
  with pytest.raises(ConfigurationError) as refusal:
    train_run(base, *(f'--gin.{change}' for change in changes))
  for words in named:
    assert words in str(refusal.value)
  assert contents(base / 'checkpoints') == before


def test_a_resume_with_more_steps_and_what_is_allowed_to_change(base, train_run, tmp_path, capsys):
  run = shutil.copytree(base, tmp_path / 'run')
  more = ('--gin.train_steps=3', '--gin.eval_every=3', '--gin.learning_rate=1e-3')
  train_run(run, *more, allow_changed=('configuration',))
  said = capsys.readouterr().err
  assert 'changed since the checkpoint: configuration: Optimizer.learning_rate was 0.003' in said
  assert 'eval_every' not in said and 'train_steps was' not in said
  assert '--gin.Optimizer.train_steps=2' in said  # which would keep the schedule
  assert list(tiny_run.metrics(run)) == [1, 2, 3]


@pytest.mark.invariant(10)
def test_a_resume_with_other_rows_and_then_with_other_chunks(base, train_run, tmp_path, capsys):
  run = shutil.copytree(base, tmp_path / 'run')
  tokens = tiny_run.metrics(run)[2]['tokens']
  more = ('--gin.batch_size=4', '--gin.checkpoint_every=1', '--gin.train_steps=4')
  train_run(run, *more, allow_changed=('rows',))
  said = capsys.readouterr().err
  assert 'changed since the checkpoint: rows: was 8, is 4' in said
  assert 'now dealt over 4 rows instead of 8, and carries begin empty: ' in said
  whole = tiny_run.metrics(run)
  assert [whole[step]['tokens'] for step in (3, 4)] == [tokens * 5 // 4, tokens * 6 // 4]

  # The last step again, from the checkpoint before it: the same step, and not another deal.
  shutil.rmtree(run / 'checkpoints' / '4')
  train_run(run, *more)
  said = capsys.readouterr().err
  assert 'resuming after step 3' in said and 'dealt' not in said
  again = tiny_run.metrics(run)
  for name in ('loss', 'grad_norm', 'tokens', 'epochs'):
    assert again[4][name] == whole[4][name]

  more = ('--gin.batch_size=4', '--gin.chunk_size=32', '--gin.train_steps=5')
  train_run(run, *more, allow_changed=('configuration',))
  assert 'each row is read on from its token 128' in capsys.readouterr().err
  assert tiny_run.metrics(run)[5]['tokens'] == tokens * 8 // 4


def test_a_store_of_another_tokenizer(train_run, tmp_path):
  other = types.SimpleNamespace(size=259, eos_id=1, bos=(), fingerprint='another')
  tiny_run.write_stores(tmp_path, 'letters', 'abc', other)
  with pytest.raises(ConfigurationError, match='another'):
    train_run(tmp_path / 'run', f"--gin.TaskFeed.data_dir='{tmp_path}'")
