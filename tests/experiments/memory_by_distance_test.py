"""scripts/memory_by_distance: its losses, and what cuts cost, beside scores of the same texts."""

import math
import shutil

import gin
import numpy as np
import pytest
import scipy.stats

import valkyrie
from valkyrie.data.feed import TaskFeed

ROWS, TOKENS, CUT = 4, 32, 8


def test_losses_are_scores_of_the_first_documents_and_of_their_pieces(
  trained, tmp_path, monkeypatch, capsys
):
  import memory_by_distance  # noqa: PLC0415

  gin.clear_config(clear_constants=True)
  run = shutil.copytree(trained[1], tmp_path / 'run')
  flags = f'--sequences={ROWS} --tokens={TOKENS} --cuts {CUT} --chunk_size={CUT}'.split()
  memory_by_distance.main([str(run), *flags])
  lines = [line.strip('| ').split(' | ') for line in capsys.readouterr().out.splitlines()[-2:]]
  with gin.config_scope('validation'):
    feed = gin.get_configurable(TaskFeed)()
  batch, loaded = feed.read(0, TOKENS), valkyrie.load(run)

  def losses(tokens):  # of the targets at positions 1, 2, ...
    return -loaded.score([tokens])[0].log_probs[1:]

  whole, cut = np.full((2, 2, ROWS), np.nan)
  for row in range(ROWS):
    is_first = batch.positions[row] == np.arange(TOKENS)
    length = int(np.sum(batch.weights[row] * is_first))  # none of the last, the next one's start
    text = np.append(batch.inputs[row, :length], batch.targets[row, length - 1])
    # Without attention, a piece after a cut is a document of its own.
    pieces = [text[at : at + CUT + 1] for at in range(0, length, CUT)]
    for found, by_target in (whole, losses(text)), (cut, np.concatenate([*map(losses, pieces)])):
      assert len(by_target) == length
      for n, first in enumerate((8, 16)):
        found[n, row] = by_target[first - 1 : 2 * first - 1].mean() if length >= first else np.nan
  bits = feed.tokens_per_byte / math.log(2)
  for n, (position, sequences, mean, cost) in enumerate(lines):
    costs = (cut - whole)[n][np.isfinite(whole[n])] * bits
    assert (position, sequences) == (str(8 * 2**n), str(len(costs)))
    assert float(mean) == pytest.approx(np.nanmean(whole[n]) * bits, abs=6e-4)
    low, high = scipy.stats.t.interval(0.95, len(costs) - 1, costs.mean(), scipy.stats.sem(costs))
    found = [float(part) for part in cost.split(' ± ')]
    assert found == pytest.approx([costs.mean(), (high - low) / 2], abs=6e-5)
    assert abs(found[0]) > 1e-4
  assert (run / 'memory_by_distance.png').stat().st_size > 1000
