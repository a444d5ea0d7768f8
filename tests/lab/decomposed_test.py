"""A trained decomposition in Python: components of texts, masks, clusters, and who wrote what."""

import gin
import jax
import numpy as np
import pytest
import tiny_run

import valkyrie
from valkyrie import main
from valkyrie.checkpoint.manager import Checkpoints
from valkyrie.config.load import load_gin
from valkyrie.errors import ConfigurationError, UsageError
from valkyrie.lab.decomposition import masking, text_patterns, trace
from valkyrie.lab.decomposition.clusters import clustered
from valkyrie.lab.decomposition.importance import NETS, PerComponent
from valkyrie.models.features import SITES
from valkyrie.models.matrices import Masks
from valkyrie.models.sites import sites_of
from valkyrie.run.configuration_files import write_configuration
from valkyrie.training.setup import Setup, StepSettings

C, CHUNK = 3, 16
TEXT = 'abcdefgh' * 5 + 'hgfe'  # three chunks
WRITER, READER = 'layers.0.s5.b', 'layers.1.mlp.out'
MORE = f"""
StepSettings.objective = @Decomposition
Decomposition.seed = 0
Decomposition.train_steps = 2
LanguageModel.sites = @Sites
Sites.components = (('s5/b', {C}, '0'), ('mlp/out', {C}))
ComponentScores.attacked_tokens = 0
ComponentScores.threshold = 0.4
"""


@pytest.fixture(scope='module')
def parts(tmp_path_factory):
  """A decomposition of two layers, whose importances are anything between 0 and 1."""
  folder = tmp_path_factory.mktemp('parts')
  (folder / 'run.gin').write_text(tiny_run.gin_text(folder, layers=2, more=MORE))
  gin.clear_config(clear_constants=True)
  load_gin([str(folder / 'run.gin')], [], modules=main.CONFIGURABLE_MODULES)
  state = Setup(StepSettings()).initial_state()
  random = np.random.default_rng(0)
  nets = {n: 0.7 * random.normal(size=leaf.shape) for n, leaf in state.params[NETS].items()}
  nets = {n: jax.numpy.asarray(x + 0.5 * n.endswith('b2'), 'float32') for n, x in nets.items()}
  with Checkpoints().open(folder / 'run') as directory:
    state = state._replace(params={**state.params, NETS: nets})
    directory.save_now(1, state, {'vocabulary': 'bytes'})
  write_configuration(folder / 'run')
  gin.clear_config(clear_constants=True)
  return valkyrie.decomposition(folder / 'run', bindings=[f'open_run.chunk_size={CHUNK}'])


@pytest.fixture(scope='module')
def whole(parts):
  """A function (options of the model) -> its features of the text in one piece."""
  (tokens,) = parts.run.text_rows.tokens([TEXT], None)
  where = tokens[None], np.arange(len(tokens), dtype=np.int32)[None], np.ones((1, len(tokens)), int)
  apply = jax.jit(parts.run.model.apply, static_argnames='activations')
  carry = parts.run.model.initial_carry(1)

  def read(**options):
    features, _ = apply(parts.run.params, carry, *where, activations=(SITES,), **options)
    return features

  return read


def test_components_of_a_text_are_those_of_the_whole_in_any_chunks(parts, whole):
  inputs = whole().sites
  sites = sites_of(parts.run.model.parameters())
  z = PerComponent().logits(parts._params, sites, inputs)
  assert parts.names == ['layers.0.mlp.out', WRITER, READER]
  assert parts.sizes == dict.fromkeys(parts.names, C)
  g, inner = parts.importances(TEXT), parts.activations(TEXT)
  assert [reading.begin for reading in parts.readings(TEXT)] == [0, 16, 32]
  for name in parts.names:
    path, layer = parts.place(name)
    w, v, u = parts.factors(name)
    assert v.shape[1] == u.shape[0] == C and w.shape == (len(v), u.shape[1])
    np.testing.assert_allclose(g[name], np.clip(z[path][layer, 0], 0, 1), atol=1e-5)
    expected = np.asarray(inputs[path][layer, 0]) @ v * np.linalg.norm(u, axis=1)
    np.testing.assert_allclose(inner[name], expected, atol=1e-5)
  assert 0.2 < np.mean(g[READER] > parts.threshold) < 0.8


def test_a_text_is_read_once_for_its_components_and_its_patterns(parts):
  """This model has no attention, so nothing but its components can be shown."""
  reader = parts.run.text_rows.reader
  assert not text_patterns.has_patterns(reader, parts._params)
  compiled = parts._passes.read._cache_size()
  assert parts.patterns(TEXT, masking.ROUNDED) == {}
  assert parts._passes.read._cache_size() == compiled  # no chunk was read for it
  (tokens,) = parts.run.text_rows.tokens([TEXT], None)
  chunks = [
    *text_patterns.read(parts._passes, parts._params, tokens, masking.IMPORTANT, queries=20)
  ]
  for name, g in parts.importances(TEXT).items():
    found = np.concatenate([chunk.importances[name] for chunk in chunks])
    np.testing.assert_allclose(found, g, atol=1e-5)


def changed(parts, name, matrix):
  """The parameters with another matrix of a site of an MLP."""
  path, layer = parts.place(name)
  module, _, leaf = path.rpartition('/')
  arrays = np.array(parts.run.params[module][leaf])
  arrays[layer] = matrix
  return {**parts.run.params, module: {**parts.run.params[module], leaf: arrays}}


def test_masks_compute_the_model_with_other_matrices(parts, whole):
  w, v, u = parts.factors(READER)
  path, layer = parts.place(READER)
  inputs = np.asarray(whole().sites[path])[layer, 0]
  without = w - np.outer(v[:, 1], u[1])
  louder = w + 2 * np.outer(v[:, 0], u[0])
  (expected,) = parts.run.score(TEXT)
  same = parts.compare(TEXT, parts.ablated({}))
  np.testing.assert_allclose(same.log_probs, expected.log_probs, atol=1e-5)
  np.testing.assert_allclose(same.masked_log_probs, same.log_probs, atol=1e-5)
  assert np.abs(same.divergences).max() < 1e-5
  assert all(error.max() < 1e-10 for error in same.hidden_errors.values())
  for masks, matrix in (
    (parts.ablated({READER: [1]}), without),
    (parts.scaled({READER: {0: 3.0}}), louder),
  ):
    params = changed(parts, READER, matrix)
    (score,) = parts.run.score(TEXT, params=params)
    found = parts.compare(TEXT, masks)
    assert np.nanmax(np.abs(found.masked_log_probs - found.log_probs)) > 1e-3
    np.testing.assert_allclose(found.masked_log_probs, score.log_probs, atol=1e-4)
    logits = parts.run.logits(TEXT, params=params)
    np.testing.assert_allclose(parts.logits(TEXT, masks), logits, atol=1e-4)
    log_p, log_q = (jax.nn.log_softmax(x) for x in (parts.run.logits(TEXT), logits))
    kl = np.sum(np.exp(log_p) * (log_p - log_q), axis=-1)
    np.testing.assert_allclose(found.divergences, kl, atol=1e-5)
    # Only the MLP of the second layer computes something else.
    mlp, mixers = found.hidden_errors['mlp'], found.hidden_errors['mixers']
    clean = inputs @ w
    values = inputs @ (matrix - w)
    assert mlp[0] < 1e-10 and mixers.max() < 1e-10
    np.testing.assert_allclose(mlp[1], np.sum(values**2) / np.sum(clean**2), rtol=1e-3)


def test_what_is_kept_is_all_that_is_left(parts, whole):
  g = parts.importances(TEXT)
  chosen = {READER: [0, 2]}
  for kind in masking.KINDS:
    of_kind = {'whole': np.ones_like, 'important': np.asarray, 'rounded': lambda g: g > 0.4}[kind]
    given = {}
    for path, site in sites_of(parts.run.model.parameters()).items():
      names = [name for name in parts.names if parts.place(name)[0] == path]
      factor = np.stack([np.isin(np.arange(C), chosen.get(name, [])) for name in names])
      m = np.stack([of_kind(g[name]) for name in names])[:, None] * factor[:, None, None]
      shape = (site.layers, 1, m.shape[2])
      given[path] = Masks(m.astype('f'), np.zeros(shape, 'f'), np.ones(shape, bool))
    features = whole(masks=given)
    expected = features.hidden[0] @ features.unembedding.T
    found = parts.logits(TEXT, parts.kept(chosen, kind))
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_writers_are_slopes_of_the_masks_through_all_chunks(parts, whole):
  """Against differences in the text in one piece, for S5's B and the MLP of the first layer."""
  found = parts.writers(TEXT, READER, 2, 40, distance=10, count=5)
  path, layer = parts.place(READER)
  _, v, _ = parts.factors(READER)

  def activation(path_of_mask=None, index=None, step=0.0):
    given = {}
    for each, site in sites_of(parts.run.model.parameters()).items():
      m = np.ones((site.layers, 1, len(TEXT), C), 'f')
      if each == path_of_mask:
        m[index] += step
      ones = np.ones(m.shape[:-1], 'f')
      given[each] = Masks(m, ones, ones > 0)
    x = whole(masks=given).sites[path][layer, 0, 40]
    return float(np.asarray(x, np.float64) @ v[:, 2])

  assert found.activation == pytest.approx(activation(), rel=1e-4)
  sizes = [abs(write.effect) for write in found.strongest]
  assert sizes == sorted(sizes, reverse=True) and len(sizes) == 5
  assert {write.site for write in found.strongest} <= {WRITER, 'layers.0.mlp.out'}
  first = found.strongest[0]
  assert first.token < 31
  early = parts.writers(TEXT, READER, 2, 40, distance=30).strongest[0]
  assert early.token < 11
  for write in (first, early):
    writer, number = parts.place(write.site)
    at = (number, 0, write.token, write.component)
    slope = activation(writer, at, 0.5) - activation(writer, at, -0.5)
    assert write.effect == pytest.approx(slope, rel=0.02)
  everything = parts.writers(TEXT, READER, 2, 40, distance=10, count=10**6)
  assert [*everything.totals] == parts.names  # of equal effects, too, the first layer's come first
  for name, total in everything.totals.items():
    effects = np.zeros(C)
    for write in everything.strongest:
      effects[write.component] += write.effect * (write.site == name)
    np.testing.assert_allclose(total, effects, rtol=1e-4, atol=1e-9)


def test_clusters_are_components_that_are_active_together():
  """Two groups among components that are active at random; one group holds only at times."""
  random = np.random.default_rng(0)

  def chunk(number):
    group, loose = random.random((2, 64, 1)) < 0.3
    seldom = group & (random.random((64, 1)) < 0.35)  # a part of the group's tokens
    g = {'a': np.concatenate([group, group, seldom, random.random((64, 1)) < 0.3], 1)}
    g['b'] = np.concatenate(
      [group, loose, loose if number % 4 else random.random((64, 1)) < 0.3], 1
    )
    return {name: x.astype('f') for name, x in g.items()}

  chunks = [chunk(number) for number in range(24)]
  found = clustered(lambda: iter(chunks), 0.5)
  members = [[(m.site, m.component) for m in cluster.members] for cluster in found.clusters]
  assert members == [[('a', 0), ('a', 1), ('b', 0)], [('b', 1), ('b', 2)]]
  assert found.clusters[0].stability == 1
  assert [(m.site, m.component) for m in found.alone] == [('a', 2), ('a', 3)]
  active = sum((c['a'] > 0.5).sum(0) for c in chunks)
  assert found.clusters[0].members[0].tokens == active[0]
  strict = clustered(lambda: iter(chunks), 0.5, distance=0.1)
  assert len(strict.clusters) == 1
  some = clustered(lambda: iter(chunks), 0.5, most=4)
  assert some.left_out == 3 and sum(len(c.members) for c in some.clusters) + len(some.alone) == 4
  silent = clustered(lambda: iter([{'a': np.zeros((4, 3))}]), 0.5)
  assert not silent.clusters and not silent.alone


def test_a_cluster_of_some_chunks_only_is_not_stable():
  random = np.random.default_rng(1)

  def chunk(number):
    x = random.random((64, 1)) < 0.3
    other = x if number < 9 else random.random((64, 1)) < 0.3
    third = x if number > 5 else random.random((64, 1)) < 0.3
    return {'a': np.concatenate([x, other, third], 1).astype('f')}

  chunks = [chunk(number) for number in range(16)]
  found = clustered(lambda: iter(chunks), 0.5)
  assert found.clusters and all(cluster.stability < 0.95 for cluster in found.clusters)


def test_a_factor_of_a_component_is_a_number_of_float32():
  for factor in (1e39, float('nan'), float('inf')):
    with pytest.raises(ConfigurationError, match=r'a factor of a = .* Use a number in \[-3.4e38, '):
      masking.scaled({'a': {0: factor}}, {'a': C})
  assert masking.scaled({'a': {0: -2.5, 1: 0}}, {'a': C}).factors['a'].tolist() == [-2.5, 0, 1]


@pytest.mark.parametrize(
  ('ask', 'message'),
  [
    (lambda parts: parts.factors('layers.0.mlp'), r"no site 'layers.0.mlp'. Name one of these: "),
    (lambda parts: parts.ablated({READER: [C]}), 'has no component 3. Use numbers from 0 to 2'),
    (lambda parts: parts.ablated({READER: [1.5]}), r'has no component 1\.5'),
    (lambda parts: parts.ablated({READER: [True]}), 'has no component True'),
    (lambda parts: parts.ablated({READER: 'ab'}), "has no component 'a'"),
    (lambda parts: parts.scaled({'x': {0: 1.0}}), "no site 'x'"),
    (lambda parts: parts.compare('', masking.ROUNDED), 'text is empty'),
    (lambda parts: parts.writers('abc', READER, 0, 3), 'token=3, but the text has 3'),
    (lambda parts: parts.writers('abc', READER, 0, distance=3), 'distance=3, but 2 tokens'),
    (lambda parts: parts.clusters('abc', most=1), 'most=1 and distance=0.5 are out of range'),
  ],
)
def test_what_does_not_exist_is_named(parts, ask, message):
  with pytest.raises(UsageError, match=message):
    ask(parts)


def test_a_run_without_a_decomposition_is_named(trained):
  with pytest.raises(ConfigurationError, match='decomposes nothing'):
    valkyrie.decomposition(trained[1])


def test_the_command_prints_writers_and_names_mistakes(parts, tmp_path, capsys):
  (tmp_path / 'text.txt').write_text(TEXT)
  run = str(parts.run.model_dir)
  flags = ['--token', '40', '--distance', '30', '--count', '3']
  assert trace.main([run, str(tmp_path / 'text.txt'), READER, '2', *flags]) == 0
  head, *lines = capsys.readouterr().out.splitlines()
  found = parts.writers(TEXT, READER, 2, 40, distance=30, count=3)
  assert head == f'{READER} 2 reads {found.activation:.4g} at token 40: efghabcdefgh[h]gfe'
  assert len(lines) == 3
  for line, write in zip(lines, found.strongest, strict=True):
    effect, site, number, _, _, token, distance, *_ = line.split()
    assert float(effect) == pytest.approx(write.effect, rel=1e-2)
    assert (site, int(number)) == (write.site, write.component)
    assert int(token.rstrip(',')) == write.token == 40 - int(distance) <= 10
    assert f'[{TEXT[write.token]}]' in line
  assert trace.main([run, str(tmp_path / 'missing.txt'), READER, '2']) == 65
  assert 'missing.txt cannot be read' in capsys.readouterr().err
