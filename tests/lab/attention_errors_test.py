"""The errors of attention patterns that an evaluation reports, against numpy."""

import functools

import jax
import numpy as np
import pytest
import tiny

from valkyrie.lab.decomposition.evaluation import MASKINGS, ComponentScores
from valkyrie.lab.decomposition.importance import PerComponent
from valkyrie.models.attention.patterns import Patterns
from valkyrie.models.sites import Sites, sites_of

ROWS, C, CHUNK = 2, 3, 8
BATCH = tiny.batch((9, 6), padding=1)
MODULE = 'model/layers/block_0/~/longformer_attention'


def target():
  """A model whose queries are made by a site, and whose window is shorter than a chunk."""
  sites = functools.partial(Sites, components=(('attention/query', C),))
  return tiny.model((tiny.s5, tiny.attention), sites=sites)


def evaluated(term):
  """(the metrics of an evaluation of BATCH in two chunks, the model, its parameters)."""
  model = term.extended(target())
  params, carry = tiny.init(model, ROWS)
  louder = jax.tree.map(lambda leaf: 4 * leaf, params[MODULE])  # patterns that are not even
  params = params | {MODULE: louder}
  sums = tiny.term_sums(term, model, params, carry, BATCH, CHUNK)
  return term.metrics(model, sums), model, params


def weights(model, params, kinds):
  """The weights [L, queries, H, N] of all chunks, without padding."""
  carry = target().initial_carry(ROWS)
  apply = jax.jit(model.read, static_argnames='activations')
  found = []
  for begin in (0, CHUNK):
    chunk = tiny.cut(BATCH, begin, begin + CHUNK)
    features, carry = apply(params, carry, chunk, activations=kinds)
    (pattern,) = features.patterns.values()
    together = np.concatenate([np.exp(np.asarray(part, np.float64)) for part in pattern], axis=-1)
    (asked,) = kinds
    real = chunk.segment_ids[:, asked.at(CHUNK)] > 0
    found.append(together[:, real])
  return np.concatenate(found, axis=1)


@pytest.mark.parametrize('queries', [3, 2 * CHUNK])
def test_a_pattern_error_is_the_divergence_from_the_pattern_of_the_model(queries):
  """Of some queries and of all; without masks of its own, a masked model is one with V U."""
  term = ComponentScores(
    0, PerComponent, 'own', attacked_tokens=0, pattern_queries=queries, threshold=0.4
  )
  metrics, model, params = evaluated(term)
  (site,) = sites_of(model.parameters()).values()
  v, u = site.factors(params)
  kinds = (Patterns(queries),)
  p = weights(model, params, kinds)
  for masking, matrix in (('unmasked', v @ u), ('zero', 0 * (v @ u))):
    changed = params | {MODULE: params[MODULE] | {site.name: matrix}}
    q = weights(model, changed, kinds)
    seen = p > 0
    terms = np.where(seen, p * np.log(np.where(seen, p, 1) / np.where(seen, q, 1)), 0)
    expected = terms.sum(-1).mean((1, 2))
    assert expected.min() > 0.01
    for layer, error in enumerate(expected):
      found = metrics[f'components/pattern_error/{masking}/layers.{layer}.attention']
      assert found == pytest.approx(error, rel=1e-3)
    assert metrics[f'components/pattern_error/{masking}'] == pytest.approx(
      expected.mean(), rel=1e-3
    )
  assert {name for name in metrics if name.count('/') == 2 and 'pattern' in name} == {
    f'components/pattern_error/{masking}' for masking in MASKINGS
  }


def test_no_query_is_compared_where_none_is_asked_for():
  term = ComponentScores(0, PerComponent, 'clean', attacked_tokens=0, pattern_queries=0)
  metrics, _, _ = evaluated(term)
  assert 'components/hidden_error/zero' in metrics
  assert not [name for name in metrics if 'pattern' in name]
