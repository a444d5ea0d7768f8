"""The gated short convolution against its equations in float64, and the rules of mixers."""

import functools

import jax
import numpy as np
import pytest
import tiny

from valkyrie.models.mixer_check import check_mixer
from valkyrie.models.recurrence import convolution
from valkyrie.models.recurrence.convolution import Tail
from valkyrie.models.recurrence.short_convolution import ShortConvolution

WIDTH, INNER, TAPS = 5, 6, 3


@pytest.fixture(params=['cpu', 'gpu'])
def form(request, monkeypatch):
  """Each platform's form of the convolution."""
  monkeypatch.setattr(convolution, 'platform', lambda: request.param)


@pytest.mark.usefixtures('form')
def test_values_are_those_of_the_equations():
  random = np.random.default_rng(0)
  x = random.normal(size=(2, 9, WIDTH))
  positions, segment_ids = tiny.documents(random, 2, 9)
  carry = Tail(random.normal(size=(2, TAPS - 1, INNER)))
  mixer = tiny.mixer(functools.partial(ShortConvolution, INNER))
  shapes = jax.eval_shape(mixer.init, jax.random.key(0), x, carry, positions, segment_ids)
  params = jax.tree.map(lambda p: random.normal(size=p.shape), shapes)
  with jax.enable_x64(True):
    found, after = mixer.apply(params, x, carry, positions, segment_ids)
  own = params['short_convolution']
  filters = params['short_convolution/~/causal_convolution']['filters']
  gated = np.concatenate([carry.inputs, (x @ own['input_gate']) * (x @ own['inner'])], axis=1)
  expected = np.zeros_like(x)
  for row, t in np.ndindex(2, 9):
    taps = min(TAPS, positions[row, t] + 1)
    convolved = sum(filters[lag] * gated[row, t + TAPS - 1 - lag] for lag in range(taps))
    expected[row, t] = (x[row, t] @ own['output_gate'] * convolved) @ own['out']
  np.testing.assert_allclose(found, expected, atol=1e-11)
  np.testing.assert_allclose(after.inputs, gated[:, -2:], atol=1e-12)


def test_the_forms_agree(monkeypatch):
  """In values and gradients, with a row that ends early; sums of small whole numbers are exact."""
  random = np.random.default_rng(0)

  def whole(*shape):
    return random.integers(-3, 4, shape).astype(np.float32)

  x = whole(2, 9, INNER)
  before = whole(2, TAPS - 1, INNER)
  weights = whole(TAPS, 2, 9, INNER)
  weights_after = whole(2, TAPS - 1, INNER)
  segment_ids = np.ones((2, 9), np.int32)
  segment_ids[1, 1:] = 0

  def read(x, before):
    shifted, tail = convolution.lagged(Tail(before), x, segment_ids)
    loss = sum((w * part).sum() for w, part in zip(weights, shifted, strict=True))
    return loss + (weights_after * tail.inputs).sum(), (shifted, tail)

  results = []
  for platform in ('cpu', 'tpu'):
    monkeypatch.setattr(convolution, 'platform', lambda platform=platform: platform)
    results.append(jax.value_and_grad(read, (0, 1), has_aux=True)(x, before))
  jax.tree.map(np.testing.assert_array_equal, *results)


@pytest.mark.usefixtures('form')
def test_it_keeps_the_rules_of_mixers():
  check_mixer(functools.partial(ShortConvolution, INNER), WIDTH)
