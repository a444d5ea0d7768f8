"""What an evaluation measures, and what it measures when the carry is cut."""

import functools
import math

import jax
import numpy as np
from PIL import Image, ImageColor
import pytest
import tiny
import tiny_run

from valkyrie.checkpoint.steps import steps_of
from valkyrie.data.feed import TaskFeed
from valkyrie.errors import ConfigurationError, StorageError
from valkyrie.models.carry_cuts import CUTS
from valkyrie.models.recurrence.gated import GatedRecurrence
from valkyrie.monitoring import pictures
from valkyrie.monitoring.metrics import BY_POSITION, TARGETS_BY_POSITION, position_metrics
from valkyrie.run import evaluate
from valkyrie.run.evaluator import Evaluator, chunk_scores
from valkyrie.sharding.partitioner import Partitioner
from valkyrie.training.losses import logits
from valkyrie.training.objective import Term

ROWS, CHUNK = 2, 8
KINDS = BY_POSITION, TARGETS_BY_POSITION
gated_s5 = functools.partial(GatedRecurrence, tiny.s5, width=12)


@functools.partial(jax.jit, static_argnums=0)
def read(model, params, carry, batch):
  """(logits [B, T, V], the carry after), of the tokens that exist."""
  features, carry = model.apply(params, carry, batch.inputs, batch.positions, batch.segment_ids)
  return logits(features, model.about.vocabulary_size)[..., : model.about.vocabulary_size], carry


def reference(scores, batch):
  """The loss and weight by position, and how many are right, target by target in float64."""
  scores = np.asarray(scores, np.float64)
  log_p = scores - np.log(np.exp(scores).sum(axis=-1, keepdims=True))
  loss, weight, right = np.zeros(31), np.zeros(31), 0
  for row, time in np.argwhere(batch.weights):
    position, target = int(batch.positions[row, time]) + 1, batch.targets[row, time]
    loss[int(math.log2(position))] -= log_p[row, time, target]
    weight[int(math.log2(position))] += 1
    right += log_p[row, time].argmax() == target
  return loss, weight, right


@functools.cache
def built():
  """(model, params, carry)."""
  model = tiny.model()
  return model, *tiny.init(model, ROWS)


def test_scores_are_sums_over_the_targets_by_their_position():
  model, params, carry = built()
  batch = tiny.batch((9, 1, 21), padding=3)
  found, _ = jax.jit(lambda c: chunk_scores(model, params, c, batch))(carry)
  loss, weight, right = reference(read(model, params, carry, batch)[0], batch)
  assert weight.tolist()[:6] == [4, 8, 16, 18, 10, 0]  # 8 and 20 targets in each of two rows
  np.testing.assert_allclose(found.loss, loss, rtol=1e-5)
  np.testing.assert_array_equal(found.weight, weight)
  assert found.right == right


def late(scores, chunk):
  """The loss of the targets from position 8 on."""
  return scores.loss, chunk.weights * (chunk.positions >= 7)


def test_a_metric_without_weights_is_refused():
  model, params, carry = built()

  def confident(scores, chunk):
    return scores.loss < 1

  with pytest.raises(ConfigurationError, match=r'confident, which returned \(2, .* pair'):
    chunk_scores(model, params, carry, tiny.batch((9, 1, 21)), metrics=(confident,))


def test_positions_without_targets_have_no_metric():
  found = position_metrics([6.0, 0.0, 3.0], [2.0, 0.0, 4.0])
  assert found == {
    'loss_by_position/1': 3.0,
    'targets_by_position/1': 2.0,
    'loss_by_position/4': 0.75,
    'targets_by_position/4': 4.0,
  }


@pytest.fixture(scope='module')
def feed(tmp_path_factory):
  path = tmp_path_factory.mktemp('data')
  tiny_run.write_stores(path, 'letters', '$%&*')  # bytes within the tiny model's vocabulary

  def make():
    tokens = TaskFeed('letters', 'validation', ROWS, 0, shuffle=False, epochs=1, data_dir=str(path))
    tokens.vocabulary_size = tiny.VOCABULARY
    return tokens

  return make


@pytest.fixture(scope='module')
def evaluated(feed):
  """The metrics of each cut, the model and its parameters."""
  model = tiny.model(mixers=(tiny.attention, gated_s5))
  params, _ = tiny.init(model, ROWS)
  evaluator = Evaluator(
    model, Partitioner((('data', 1),), (), ()), feed, ROWS, CHUNK, metrics=(late,)
  )
  found = {cut: evaluator(params, whole=True, cut=cut) for cut in (None, *CUTS)}
  return found, model, params


def test_rows_that_do_not_divide_over_devices_are_named_as_of_the_evaluation(feed):
  """Not as the rows of training, which have the same name in a run's file."""
  every = Partitioner((('data', 8),), (('batch', 'data'),))
  message = r'Evaluator\.batch_size=2 .* Use 8, also for validation/TaskFeed\.batch_size'
  with pytest.raises(ConfigurationError, match=message):
    Evaluator(tiny.model(), every, feed, ROWS, CHUNK)


@pytest.mark.parametrize('cut', [None, *CUTS])
def test_what_is_cut_starts_anew_in_each_chunk(evaluated, feed, cut):
  found, model, params = evaluated
  initial = carry = model.initial_carry(ROWS)
  parts = []
  for position in range(0, feed().row_tokens, CHUNK):
    chunk = feed().read(position, CHUNK)
    if cut == 'all':
      carry = initial
    if cut == 'state':  # neither the keys of attention nor the tail of the convolution
      ((attends, gated),), ((_, fresh),) = (c['model']['carry'] for c in (carry, initial))
      carry = {'model': {'carry': ((attends, gated._replace(state=fresh.state)),)}}
    scores, carry = read(model, params, carry, chunk)
    parts.append(reference(scores, chunk))
  loss, weight, right = (sum(column) for column in zip(*parts, strict=True))
  metrics = found[cut]
  assert metrics['loss'] == pytest.approx(loss.sum() / weight.sum(), rel=1e-5)
  assert metrics['accuracy'] == right / weight.sum()
  assert metrics['metrics/late'] == pytest.approx(loss[3:].sum() / weight[3:].sum(), rel=1e-5)
  by_position = {name: value for name, value in metrics.items() if '_by_position/' in name}
  assert by_position == pytest.approx(position_metrics(loss, weight), rel=1e-5)
  # Weighted by how many targets each stands for, they are the mean loss.
  losses, shares = ([v for n, v in by_position.items() if n.startswith(kind)] for kind in KINDS)
  assert np.average(losses, weights=shares) == pytest.approx(metrics['loss'], rel=1e-5)


def test_each_cut_makes_a_difference(evaluated):
  found, _, _ = evaluated
  assert len({metrics['loss'] for metrics in found.values()}) == 1 + len(CUTS)


@pytest.mark.invariant(6)
def test_rows_and_time_split_over_devices_change_nothing(evaluated, feed):
  found, model, params = evaluated
  rules = (('batch', 'data'), ('time', 'time'))
  layout = Partitioner((('data', 2), ('time', 4)), rules)
  metrics = Evaluator(model, layout, feed, ROWS, CHUNK, metrics=(late,))(params, whole=True)
  assert metrics == pytest.approx(found[None], rel=1e-5)


def test_a_whole_evaluation_has_the_loss_of_its_quick_part(evaluated, feed):
  _, model, params = evaluated
  quick = Evaluator(model, Partitioner((('data', 1),), (), ()), feed, ROWS, CHUNK, 3)
  found, whole = quick(params, whole=False), quick(params, whole=True)
  for name in ('loss', 'bits_per_byte'):
    assert whole[f'quick_{name}'] == pytest.approx(found[name], rel=1e-6)
    assert whole[name] != pytest.approx(found[name], rel=1e-6)
  assert found['targets'] < whole['targets']
  for metrics in (found, whole):
    assert metrics['bits_per_byte'] == metrics['bits_per_token'] * feed().tokens_per_byte


def test_a_number_of_a_term_has_a_name_of_its_own(evaluated, feed):
  """A term that reports a loss of its own would otherwise decide which step is the best one."""
  _, model, params = evaluated

  class Other(Term):
    def values(self, chunk):
      return {'x': 0 * chunk.batch.weights}

    def metrics(self, model, sums):
      return {'loss': 0.0}

  layout = Partitioner((('data', 1),), (), ())
  evaluator = Evaluator(model, layout, feed, ROWS, CHUNK, terms=(Other(),))
  with pytest.raises(ConfigurationError, match=r"Other.metrics returned 'loss', .* 'Other/loss'"):
    evaluator(params, whole=False)


def test_metrics_of_one_name_are_refused(feed):
  other = functools.wraps(late)(lambda scores, chunk: (scores.right, chunk.weights))
  layout = Partitioner((('data', 1),), (), ())
  with pytest.raises(ConfigurationError, match=r"2 functions with the name 'late', and a log"):
    Evaluator(tiny.model(), layout, feed, ROWS, CHUNK, metrics=(late, other))


def test_the_axis_of_the_plot_shows_a_difference_of_a_twentieth(tmp_path):
  losses = {'a': 2.0, 'b': 1.95, 'c': 1.5}
  curves = {
    name: {'loss_by_position/1': 9.0, 'loss_by_position/16': loss} for name, loss in losses.items()
  }
  pictures.write_loss_by_position(tmp_path, curves, 'mine')
  image = np.asarray(Image.open(tmp_path / 'loss_by_position_mine.png').convert('RGB'))

  def height(color):
    return (image == ImageColor.getrgb(color)).all(-1)[:, 520:].nonzero()[0].max()

  first, second, third = map(height, pictures.COLORS[:3])
  assert second - first > 20 and third - second > 200


@pytest.mark.parametrize(
  'losses', [(2.0, 2.25, 1.9, 1.3), (0.2, 2.0, 0.3, 2.0), (9.0, 1.0, 2.0, 1.9)]
)
def test_no_curve_of_the_plot_leaves_it(losses, tmp_path):
  curves = {'a': {f'loss_by_position/{4**n}': loss for n, loss in enumerate(losses)}}
  image = pictures.write_loss_by_position(tmp_path, curves)
  drawn = (image == ImageColor.getrgb(pictures.COLORS[0])).all(-1)
  frame = (image == 0).all(-1).sum(axis=1).argsort()[-2:]  # the rows of its upper and lower edge
  rows = drawn.any(axis=1).nonzero()[0]
  assert min(frame) + 10 < rows[0] < rows[-1] < max(frame) - 10


def test_the_plot_shows_every_curve(tmp_path):
  curves = {
    'validation': {'loss': 1.0, 'loss_by_position/1': 2.0, 'loss_by_position/4': 1.0},
    'cut': {'loss': 1.0, 'loss_by_position/2': 12.0, 'loss_by_position/8': math.nan},
  }
  pictures.write_loss_by_position(tmp_path, curves)
  image = Image.open(tmp_path / 'loss_by_position.png').convert('RGB')
  colors = {color for _, color in image.getcolors(2**24) or ()}
  assert {ImageColor.getrgb(color) for color in pictures.COLORS[:2]} <= colors
  pictures.write_loss_by_position(tmp_path, {'validation': {'loss': math.nan}})  # nothing to show
  with pytest.raises(StorageError, match=r'loss_by_position\.png cannot be written'):
    pictures.write_loss_by_position(tmp_path / 'loss_by_position.png', curves)


def test_nobody_waits_for_the_checkpoints_of_a_run_that_is_gone(tmp_path):
  steps = steps_of(tmp_path / 'run')
  with pytest.raises(StorageError, match='run is no longer there'):
    next(evaluate._committed(str(tmp_path / 'run'), steps, set(), 2))
