"""scripts/learn: fair, resumable, and its tables add up. What models learn is not tested."""

import argparse
import json
import math
import pathlib
import sys

import jax
import numpy as np
import pytest
import tiny_run

from valkyrie import main
from valkyrie.config.load import load_gin
from valkyrie.data import store_writer
from valkyrie.data.store_location import store_path
from valkyrie.data.token_store import Selection, TokenStore
from valkyrie.models import language_model
from valkyrie.models.language_model import LanguageModel

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / 'scripts'))
import learn
import learn_ours
import learn_tables
import learn_trial
import learn_validation
import learn_variants

pytestmark = pytest.mark.usefixtures('quick_compiler')
LENGTHS = (900, 300, 513, 1600, 512, 1024)  # bytes of the documents of a store


def write_store(data_dir: pathlib.Path, split: str) -> TokenStore:
  selection = Selection('letters', split, tiny_run.BYTES)
  path = store_path(selection, str(data_dir))
  random = np.random.default_rng(0)
  store_writer.StoreWriter(path, selection, {}, shards=1).write(
    lambda shard: [store_writer.Document(random.integers(3, 259, n), n) for n in LENGTHS]
  )
  return TokenStore.open(path, tiny_run.BYTES)


def test_ours_and_the_peers_score_the_same_bytes(tmp_path):
  documents = learn_validation.sample(write_store(tmp_path, 'validation'), 1000)
  assert [len(document) for document in documents] == [900, 513, 512 + 611]  # 388 + 1 + 611
  random = np.random.default_rng(0)
  documents += [random.integers(3, 259, n) for n in (600, 1024, 1025, 1536, 1537, 4000)]
  for document in documents:
    scored = []
    for begin, first, end in learn_validation.windows(len(document)):
      assert begin + (512 if begin else 1) <= first < end <= begin + 1024
      scored += range(first, end)
    assert scored == list(range(1, len(document)))  # the targets of ours, each once

  nats = learn_validation.read_windows(
    documents, 4, lambda tokens: 1000.0 * tokens[:, :-1] + tokens[:, 1:]
  )
  for document, of_document in zip(documents, nats, strict=True):
    np.testing.assert_array_equal(of_document, 1000.0 * document[:-1] + document[1:])


def test_ours_read_documents_with_their_carry():
  load_gin(['gin/models/toy.gin', 'gin/partition/single.gin'], modules=main.CONFIGURABLE_MODULES)
  model = language_model.transform(LanguageModel)
  params, _ = model.init(jax.random.key(0), 1)
  random = np.random.default_rng(0)
  documents = [random.integers(3, 259, n).astype(np.int32) for n in (20, 75, 64)]
  in_chunks = learn_ours.read(model, params, documents, rows=2, chunk_size=16)
  at_once = learn_ours.read(model, params, documents, rows=3, chunk_size=75)
  for document, ours, expected in zip(documents, in_chunks, at_once, strict=True):
    assert ours.shape == (len(document) - 1,)
    np.testing.assert_allclose(ours, expected, rtol=1e-4)


def test_a_summary_counts_the_bytes_with_context():
  bits = 3 * math.log(2)
  nats = [np.where(np.arange(1, n) < 512, 100.0, bits) for n in (700, 513, 16384)]
  summary = learn_validation.summary(nats)
  assert summary['scored'] == 188 + 1 + 15872
  assert summary['bits_per_byte'] == pytest.approx(3)
  first, second, last = summary['documents']
  assert (first['bytes'], second['bytes'], last['bytes']) == (700, 513, 16384)
  early = [100.0 * 2**k for k in range(9)]
  assert first['by_position'] == pytest.approx([*early, 188 * bits])
  assert second['by_position'] == pytest.approx([*early, bits])
  assert last['by_position'] == pytest.approx([*early, *(2**k * bits for k in range(9, 14))])


def settings(results, **changed):
  """The flags of a comparison."""
  common = {
    'results': results,
    'budgets': ('seconds', 'tokens'),
    'seeds': (0, 1),
    'seconds': 1.0,
    'tokens': 64,
    'batch': 64,
    'scored': 9,
  }
  return argparse.Namespace(**{**common, **changed})


def test_a_trial_of_ours_writes_its_file_and_is_not_run_again(tmp_path):
  for split in ('train', 'validation'):
    write_store(tmp_path, split)
  toy = tmp_path / 'toy.gin'
  toy.write_text(tiny_run.gin_text(tmp_path, curriculum='short_then_long'))
  flags = settings(tmp_path, rates=(3e-3,), seeds=(7,), seconds=2.0, tokens=256, scored=1000)
  started = []

  def start(trial, file):
    started.append((trial.budget, trial.rate, trial.seed, trial.steps))
    if trial.budget == 'tokens':
      return learn_trial.run(trial, learn_ours.measure, learn_ours.train, file)
    return made_up(tmp_path, trial.model, trial.budget, trial.rate, trial.seed, 2.0)

  models = {'toy': learn_trial.Variant((f'--gin_file={toy}',))}
  comparison = learn.Comparison(flags, models, start)
  comparison.run()
  assert started == [('speed', 3e-3, 7, 1000), ('seconds', 3e-3, 7, 4), ('tokens', 3e-3, 7, 4)]
  result = json.loads((tmp_path / 'tokens/toy_rate0.003_seed7.json').read_text())
  assert len(result['losses']) == 4
  assert result['skipped_steps'] == 0
  assert result['scored'] == 1000
  assert 6 < result['bits_per_byte'] < 9  # random bytes have 8
  assert [document['bytes'] for document in result['documents']] == [900, 513, 512 + 611]
  tables = comparison.tables()
  assert tables.strip() == (tmp_path / 'tables.md').read_text().strip()

  def never(trial, file):
    raise AssertionError(f'{trial} runs again, though {file} exists')

  again = learn.Comparison(flags, models, never)
  again.run()
  assert again.tables() == tables


def made_up(results, model, budget, rate, seed, bits):
  """Writes the result of a trial that never ran."""
  trial = learn_trial.Trial(model, budget, rate, seed, 100, 4096, 1000)
  nats = [np.full(n - 1, bits * math.log(2)) for n in (700, 16384, 16384)]
  result = {
    **learn_trial.dataclasses.asdict(trial),
    'parameters': 2_000_000,
    'seconds': 150.0,
    'step_seconds': 0.5,
    'reading': 'whole documents',
    **learn_validation.summary(nats),
    'bits_per_byte': bits,
  }
  file = trial.file(results)
  learn_trial.write(file, json.dumps(result))
  return result


def test_tables_have_the_mean_and_range_at_the_best_of_three_rates(tmp_path):
  bits = {
    'good': {(1e-3, 0): 2.5, (3e-3, 0): 2.3, (9e-3, 0): math.nan, (3e-3, 1): 2.4, (3e-3, 2): 2.2},
    'bad': {(1e-3, 0): 3.0, (3e-3, 0): 3.5, (9e-3, 0): 3.4, (1e-3, 1): 3.0, (1e-3, 2): 3.1},
    'unfinished': {(1e-3, 0): 1.0, (3e-3, 0): 1.5, (9e-3, 0): 1.5, (1e-3, 1): 1.0},
  }
  results = [
    made_up(tmp_path, model, 'seconds', rate, seed, value)
    for model, trials in bits.items()
    for (rate, seed), value in trials.items()
  ]
  results += [made_up(tmp_path, 'good', 'tokens', 3e-3, seed, 2.6) for seed in (0, 1, 2)]
  results += [made_up(tmp_path, 'bad', 'tokens', 1e-3, seed, 2.0) for seed in (0, 1)]
  lines = learn_tables.tables(
    results, ('seconds', 'tokens'), rates=(1e-3, 3e-3, 9e-3), seeds=(0, 1, 2)
  ).splitlines()
  good = '| good | 2.00 M | 0.003 | 0.41 M | 2,731 | 150 | 2.300 | 2.200 to 2.400 |'
  bad = '| bad | 2.00 M | 0.001 * | 0.41 M | 2,731 | 150 | 3.033 | 3.000 to 3.100 |'
  assert lines.index(bad) == lines.index(good) + 1
  assert not any('unfinished' in line for line in lines)
  by_position = ' | '.join(['2.300'] * 5)
  assert f'| good | whole documents | {by_position} |' in lines
  at_equal_tokens = lines[lines.index('## The same tokens') :]
  (good,) = [line for line in at_equal_tokens if line.startswith('| good')]
  assert good.split(' | ')[6] == '2.600'
  assert not any('bad' in line for line in at_equal_tokens)


def test_trials_of_other_settings_are_refused(tmp_path, capsys):
  arguments = [f'--results={tmp_path}', '--only=hybrid', '--threads=1']
  learn_trial.write(
    tmp_path / 'settings.json',
    json.dumps(
      {
        'screen': False,
        'budgets': ['tokens'],
        'seconds': 5.0,
        'tokens': 250_000,
        'batch': 1024,
        'scored': 9,
        'threads': 1,
      }
    ),
  )
  assert learn.main(arguments) == 2
  assert 'trials with --budgets=tokens --seconds=5.0 --scored=9.' in capsys.readouterr().err
  with pytest.raises(SystemExit):
    learn.main(['--budgets=minutes'])
  assert 'minutes. Use seconds, tokens.' in capsys.readouterr().err
  assert learn.main(['--only=nothing']) == 2
  assert 'hybrid, attention, s5' in capsys.readouterr().err


def test_a_model_whose_trial_fails_is_left_out(tmp_path, capsys):
  flags = settings(tmp_path, rates=(1e-3, 2e-3))

  def start(trial, file):
    if trial.model == 'broken':
      raise RuntimeError('exit code 1')
    made_up(tmp_path, trial.model, trial.budget, trial.rate, trial.seed, 2.0 - trial.rate)

  comparison = learn.Comparison(
    flags, dict.fromkeys(('broken', 'sound'), learn_trial.Variant()), start
  )
  comparison.run()
  assert comparison.failed == ['broken']
  assert len(comparison.results) == 1 + 3 + 2
  assert capsys.readouterr().err.count('broken failed') == 1


def test_a_comparison_by_tokens_tries_every_rate_with_the_tokens(tmp_path):
  flags = settings(tmp_path, rates=(1e-3, 2e-3), budgets=('tokens',))
  started = []

  def start(trial, file):
    started.append((trial.budget, trial.rate, trial.seed, trial.output_scale))
    made_up(tmp_path, trial.model, trial.budget, trial.rate, trial.seed, 2.0 + trial.rate)

  comparison = learn.Comparison(flags, {'a/b': learn_trial.Variant((), 0.5)}, start)
  comparison.run()
  assert started == [
    ('tokens', 1e-3, 0, 0.5),
    ('tokens', 2e-3, 0, 0.5),
    ('tokens', 1e-3, 1, 0.5),
  ]
  assert '| a/b | 2.00 M | 0.001 * |' in comparison.tables()


@pytest.mark.parametrize('name', learn_variants.VARIANTS)
def test_every_variant_reads_the_tokens_of_a_step(name):
  assert ',' not in name  # which separates the names of --only
  trial = learn_trial.Trial(name, 'tokens', 3e-3, 0, 2, 1024, 9, *learn_variants.VARIANTS[name])
  settings = learn_ours.settings_of(trial)
  model = language_model.transform(settings.model)
  (phase,) = settings.curriculum().phases
  assert settings.batch_size * phase.tokens_per_row == 1024
  assert model.about.forward_flops > 0


def test_the_output_scale_changes_only_what_writes_to_the_stream():
  params = {'block/mlp': {'out': np.ones(2), 'gate': np.ones(2)}, 'norm': {'scale': np.ones(2)}}
  scaled = learn_ours.with_outputs_scaled(params, 0.5)
  expected = {'block/mlp': {'out': 0.5, 'gate': 1.0}, 'norm': {'scale': 1.0}}
  assert jax.tree.map(lambda leaf: float(leaf[0]), scaled) == expected
