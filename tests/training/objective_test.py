"""Terms of the objective: what they compute from a chunk, and how they fit together."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from valkyrie.errors import ConfigurationError
from valkyrie.models.features import Features
from valkyrie.models.layers import RMSNorm
from valkyrie.models.model import created
from valkyrie.training.objective import Chunk, Part, Prediction, Term, read, terms_of

BATCH = tiny.batch([4, 3])
TOTAL = 20.0


@pytest.fixture(scope='module')
def model():
  return tiny.model(mixers=(tiny.s5,), layers=1, remat_policy=None)


@pytest.fixture(scope='module')
def chunk(model):
  random = np.random.default_rng(0)
  hidden, table = random.normal(size=(2, 7, 8)), random.normal(size=(128, 8))
  features = Features(*(jnp.asarray(x, jnp.float32) for x in (hidden, table)))
  return Chunk(model, {}, features, BATCH, {}, None, TOTAL, False)


class Constant(Term):
  """The same value for each target."""

  def values(self, chunk):
    return {'constant': jnp.full(chunk.batch.weights.shape, 3.0)}


@pytest.mark.parametrize(('weight', 'z_loss'), [(1.0, 0.0), (0.5, 0.1)])
def test_a_prediction_is_the_cross_entropy_and_the_squared_normalizers(chunk, weight, z_loss):
  logits = np.asarray(chunk.features.hidden, float) @ chunk.features.unembedding[:50].T
  normalizers = np.log(np.sum(np.exp(logits), axis=-1))
  loss = normalizers - np.take_along_axis(logits, BATCH.targets[..., None], axis=-1)[..., 0]
  found = Prediction(z_loss, weight)(chunk)
  expected = np.sum(BATCH.weights * (loss + z_loss * normalizers**2))
  np.testing.assert_allclose(found.loss, weight * expected / TOTAL, rtol=1e-5)
  np.testing.assert_allclose(found.sums['loss'], np.sum(BATCH.weights * loss), rtol=1e-5)
  assert ('z_loss' in found.sums) == bool(z_loss)


def test_values_are_added_by_their_weights(chunk):
  found = Constant()(chunk)
  np.testing.assert_allclose(found.sums['constant'], 3 * BATCH.weights.sum())
  np.testing.assert_allclose(found.loss, 3 * BATCH.weights.sum() / TOTAL)


def test_terms_add_up_and_the_loss_is_of_the_next_tokens_if_they_are_predicted(model):
  params, carry = tiny.init(model, 2)

  def of(*terms):
    return read(terms, model, params, carry, BATCH, total=TOTAL)

  (one, (_, predicted)), (both, (_, sums)) = of(Prediction()), of(Prediction(), Constant())
  np.testing.assert_allclose(both - one, 3 * BATCH.weights.sum() / TOTAL, rtol=1e-5)
  assert sums.loss == predicted.loss and {*sums.terms} == {'constant'}
  value, (_, alone) = of(Constant())
  np.testing.assert_allclose(alone.objective, value * TOTAL)

  class Same(Constant):
    name = 'another'

  with pytest.raises(ConfigurationError, match='share a name: constant, constant'):
    of(Constant(), Same())


def test_a_term_has_parameters_and_a_carry_of_its_own(model):
  def head():
    return RMSNorm(name='head')(jnp.ones((1, 1, model.about.width)))

  class Headed(Term):
    def extended(self, model):
      return model.extended(self.name, *created(head), lambda rows: jnp.zeros((rows,)))

    def __call__(self, chunk):
      seen = chunk.before[self.name] + jnp.sum(chunk.batch.weights, axis=1)
      return Part(jnp.sum(chunk.params['head']['scale']), {'seen': jnp.sum(seen)}, seen)

  (term,) = terms_of(Headed)
  extended = term.extended(model)
  params, carry = tiny.init(extended, 2)
  assert {*params} - {*model.parameters()} == {'head'} and {*carry} == {'model', 'Headed'}
  assert {*model.own(params)} == {*model.parameters()}
  for times in (1, 2):
    loss, (carry, sums) = read((term,), extended, params, carry, BATCH)
    np.testing.assert_allclose(carry['Headed'], times * BATCH.weights.sum(axis=1))
    assert loss == model.about.width and sums.terms['seen'] == carry['Headed'].sum()
  with pytest.raises(
    ConfigurationError, match=r'Headed adds modules .* whose names are taken: head'
  ):
    term.extended(extended)


def test_modules_of_the_language_model_are_taken(model):
  init, parameters = created(lambda: RMSNorm(name='model')(jnp.ones((1, 1, 4))))
  with pytest.raises(ConfigurationError, match=r"taken: model. .* not begin with 'model/'"):
    model.extended('x', init, parameters)


class Scalar(Term):
  def values(self, chunk):
    return {'right': chunk.batch.weights, 'wrong': jnp.zeros(())}


class NamedLoss(Term):
  def values(self, chunk):
    return {'loss': chunk.batch.weights}


@pytest.mark.parametrize(
  ('term', 'message'),
  [
    (Scalar, r"Scalar.values returned .*'wrong': \(\)"),
    (type('Empty', (Term,), {}), 'Empty comp'),
    (NamedLoss, "NamedLoss.values has the name 'loss', which is the cross-entropy"),
  ],
)
def test_a_term_without_values_of_its_own_is_named(chunk, term, message):
  with pytest.raises(ConfigurationError, match=message):
    term()(chunk)


class Own(Term):
  """A term that returns what it is told."""

  def __init__(self, part):
    self.part = part

  def __call__(self, chunk):
    return self.part


@pytest.mark.parametrize(
  ('part', 'message'),
  [
    (Part(jnp.ones(7), {}, jnp.ones(2)), r'Own returned a loss of shape \(7,\).* of shape \(\)'),
    (Part(jnp.ones(()), {}, jnp.ones(3)), r'carry float32\[3\], but took float32\[2\]'),
    (Part(jnp.ones(()), {}, jnp.ones(2, int)), r'carry int32\[2\], but took float32\[2\]'),
    (Part(jnp.ones(()), {}), r'carry None, but took float32\[2\].* the same shapes and dtypes'),
  ],
)
def test_what_a_term_returns_in_another_form_is_named(model, part, message):
  params, carry = tiny.init(model, 2)
  carry = {**carry, 'Own': jnp.ones(2)}
  with pytest.raises(ConfigurationError, match=message):
    read((Own(part),), model, params, carry, BATCH)


@dataclasses.dataclass(frozen=True)
class Other(Term):
  name = 'Prediction'


@pytest.mark.parametrize(
  ('objective', 'message'),
  [
    ((), 'has the terms none. Name at least one term'),
    ((Prediction, Prediction), 'has the terms Prediction, Prediction.*each only once'),
    ((Prediction, Other), 'each only once'),
    (type('Model', (Term,), {'name': 'model'}), "cannot have the name 'model'"),
    (Prediction(), 'has Prediction.*not a class of a Term'),
    ((Prediction, dict), "has <class 'dict'>, which is not a class of a Term"),
    ('Prediction', "has 'P', which is not a class"),
  ],
)
def test_what_is_no_objective_is_named(objective, message):
  with pytest.raises(ConfigurationError, match=message):
    terms_of(objective)


def test_the_default_name_is_that_of_the_class():
  assert [term.name for term in terms_of([Prediction, Constant])] == ['Prediction', 'Constant']
