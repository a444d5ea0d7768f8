"""Models after the same operations, and what rows that overlap have seen."""

import math
import pathlib

import gin
import numpy as np
import pytest
import scipy.stats
import tiny_run

import valkyrie
from valkyrie.data.feed import TaskFeed

ROWS, TOKENS, SIZE = 4, 32, 16
S5 = 'Block.mixers = (@S5,)\n'
FULL = f"""
Block.mixers = (@FullAttention,)
FullAttention.heads = 1
FullAttention.head_width = 8
FullAttention.max_context = {SIZE}
FullAttention.carried = False
chunks = 1
backprop_chunks = 1
"""


@pytest.fixture
def script():
  import memory_beside_attention  # noqa: PLC0415

  return memory_beside_attention


def test_a_window_takes_the_operations_of_the_shipped_hybrid(script):
  flags = script._flags(['--budget=1e6', '--vocabulary=bytes'])
  models = {name: script._model(flags, name) for name in script.MODELS}
  files = pathlib.Path(script.FOLDER).glob('*.gin')
  assert {file.stem for file in files} == {*models}
  operations = {name: model.about.forward_flops for name, model in models.items()}
  assert operations['window'] == pytest.approx(operations['gated_delta'], rel=1e-3)
  assert {model.step_tokens for model in models.values()} == {8192}
  assert [models[name].seen for name in ('window', 's5', 'full_2048')] == [
    '1,101',
    'all',
    '1,024 to 2,048',
  ]


@pytest.fixture
def arguments(script, tmp_path, monkeypatch):
  """Of a comparison of S5 with attention in rows."""
  stores = tmp_path / 'stores'
  tiny_run.write_stores(stores, 'letters', 'abcd')
  run, models = tmp_path / 'run.gin', tmp_path / 'models'
  run.write_text(tiny_run.gin_text(stores, more='Evaluator.chunks = 1\n'))
  models.mkdir()
  for name, text in (('s5', S5), ('rows', FULL)):
    (models / f'{name}.gin').write_text(text)
  for name, value in (('RUN', str(run)), ('FOLDER', models), ('MODELS', ('s5', 'rows'))):
    monkeypatch.setattr(script, name, value)
  monkeypatch.setattr(script, 'CONTEXT', SIZE // 2)
  return [
    *('--budget=512', '--vocabulary=bytes', '--rates', '1e-3', '3e-3'),
    f'--results={tmp_path / "results"}',
    *(f'--sequences={ROWS}', f'--tokens={TOKENS}'),
  ]


def test_models_train_for_the_same_operations_and_are_scored_by_position(
  script, arguments, tmp_path, capsys
):
  script.main(arguments)
  printed = capsys.readouterr()
  facts, scores = [rows_of(table) for table in printed.out.split('\n\n')]
  assert [row[0] for row in facts] == ['s5', 'rows']
  assert [row[-1] for row in facts] == ['all', f'{SIZE // 2} to {SIZE}']
  assert (tmp_path / 'results' / 'memory_beside_attention.png').stat().st_size > 0
  folders = []
  for name, *_, rate, _ in facts:
    tried = {folder: loss_of(folder) for folder in (tmp_path / 'results' / name).glob('steps=*/')}
    folders.append(min(tried, key=lambda folder: tried[folder]))
    assert len(tried) == 2 and f',learning_rate={rate},' in folders[-1].name
  assert folders[0].name.startswith('steps=2,')  # 8 rows of 32 tokens each
  operations = []
  for folder in folders:
    line = tiny_run.metrics(folder).popitem()[1]
    of_token = line['tflops_per_second_per_device'] / line['tokens_per_second_per_device']
    operations.append(line['tokens'] * of_token)
  step = 8 * SIZE / line['tokens'] * operations[1]
  assert abs(operations[1] - operations[0]) <= step / 2
  # The last evaluation is of one chunk, too.
  targets = [tiny_run.metrics(folder, 'eval').popitem()[1]['targets'] for folder in folders]
  assert max(targets) <= 8 * SIZE

  whole, rows = scores_of(folders[0], overlap=False), scores_of(folders[1], overlap=True)
  for n, (position, sequences, mean, cost) in enumerate(scores):
    costs = (rows - whole)[n][np.isfinite(whole[n])]
    assert (position, sequences) == (str(8 * 2**n), str(len(costs)))
    assert float(mean) == pytest.approx(np.nanmean(whole[n]), abs=6e-4)
    low, high = scipy.stats.t.interval(0.95, len(costs) - 1, costs.mean(), scipy.stats.sem(costs))
    found = [float(part) for part in cost.split(' ± ')]
    assert found == pytest.approx([costs.mean(), (high - low) / 2], abs=6e-5)

  script.main(arguments)  # which trains and reads nothing
  again = capsys.readouterr()
  assert again.out == printed.out
  for done in (' steps', ' reads '):
    assert done in printed.err and done not in again.err


def loss_of(folder):
  """The nats of a run's last evaluation from position 8 on, where scores begin."""
  line = tiny_run.metrics(folder, 'eval').popitem()[1]
  counted = [at for at in (8, 16, 32) if f'targets_by_position/{at}' in line]
  losses = [line[f'loss_by_position/{at}'] for at in counted]
  return np.average(losses, weights=[line[f'targets_by_position/{at}'] for at in counted])


def rows_of(table):
  return [line.strip('| ').split(' | ') for line in table.splitlines()[2:]]


def scores_of(folder, overlap):
  """Bits per byte at the positions 8 to 15 and 16 to 31 of the first documents, [2, ROWS]."""
  carried = [f'FullAttention.{of}' for of in ('carried=True', 'max_context=32')]
  loaded = valkyrie.load(folder, bindings=carried if overlap else (), allow_import=['scripts'])
  with gin.config_scope('validation'):
    feed = gin.get_configurable(TaskFeed)(batch_size=ROWS)
  batch = feed.read(0, TOKENS)
  found = np.full((2, ROWS), np.nan)
  for row in range(ROWS):
    length = int(np.sum(batch.weights[row] * (batch.positions[row] == np.arange(TOKENS))))
    text = np.append(batch.inputs[row, :length], batch.targets[row, length - 1])
    losses = np.zeros(length)
    # A piece begins half of its length after the one before, and its second half counts.
    for start in range(0, length, SIZE // 2) if overlap else [0]:
      end = min(start + SIZE, length) if overlap else length
      first = SIZE // 2 if start else 0
      of_piece = -loaded.score([text[start : end + 1]])[0].log_probs[1:]
      losses[start + first : end] = of_piece[first:]
    for n, at in enumerate((8, 16)):
      if length >= at:
        found[n, row] = losses[at - 1 : 2 * at - 1].mean()
  return found * feed.tokens_per_byte / math.log(2)
