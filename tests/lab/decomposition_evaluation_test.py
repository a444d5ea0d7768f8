"""What evaluations, the page of components and the export report, against numpy."""

import dataclasses
import functools
import json
import math
import re

import gin
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
import tiny
import tiny_run
from tiny_run import BYTES

import valkyrie
from valkyrie import main
from valkyrie.checkpoint.manager import Checkpoints
from valkyrie.config.load import load_gin
from valkyrie.data.feed import TaskFeed
from valkyrie.lab.decomposition import draws, page
from valkyrie.lab.decomposition.adversary import Adversary
from valkyrie.lab.decomposition.clusters import Cluster, Clustering, Member
from valkyrie.lab.decomposition.components import text_chunks
from valkyrie.lab.decomposition.evaluation import ComponentScores
from valkyrie.lab.decomposition.harvest import harvest
from valkyrie.lab.decomposition.importance import NETS, PerComponent
from valkyrie.lab.decomposition.own_text import ActiveComponent, ReadText
from valkyrie.lab.decomposition.shown import SPAN, Component, ShownSite, Token, Window
from valkyrie.lab.decomposition.split import SplitReader
from valkyrie.lab.decomposition.text_patterns import LayerPatterns
from valkyrie.models.features import SITES
from valkyrie.models.matrices import Masks
from valkyrie.models.sites import Sites, sites_of
from valkyrie.run.configuration_files import write_configuration
from valkyrie.run.evaluator import Evaluator, chunk_scores
from valkyrie.sharding.partitioner import Partitioner
from valkyrie.training.losses import logits
from valkyrie.training.setup import Setup, StepSettings

ROWS, C, CHUNK, THRESHOLD, ASCENTS = 2, 3, 8, 0.4, 3
BATCH = tiny.batch((9, 6), padding=1)
GATE, OUT = (f'model/layers/block_0/~/mlp/{name}' for name in ('gate', 'out'))
erf = np.vectorize(math.erf)


@functools.cache
def target():
  """A model with two matrices of its MLP as sites."""
  sites = functools.partial(Sites, components=(('mlp/(gate|out)', C),))
  return tiny.model((tiny.s5,), layers=1, sites=sites)


@functools.cache
def built():
  """(the model with its evaluation, params, carry)."""
  model = scores().extended(target())
  params, carry = tiny.init(model, ROWS)
  random = np.random.default_rng(1)
  own = {n: 0.7 * random.normal(size=leaf.shape) for n, leaf in params[NETS].items()}
  own |= {n: 0.5 + x for n, x in own.items() if n.endswith('b2')}
  return model, params | {NETS: {n: x.astype('f') for n, x in own.items()}}, carry


def scores():
  return ComponentScores(
    0, PerComponent, 'own', threshold=THRESHOLD, attacked_tokens=CHUNK, ascents=ASCENTS
  )


@functools.cache
def applied():
  return jax.jit(built()[0].apply, static_argnames='activations')


def read(batch=BATCH, params=None, **options):
  """(features, log-probabilities of the tokens that exist [B, T, V]) from an empty carry."""
  _, own, carry = built()
  features, _ = applied()(
    own if params is None else params,
    {'model': carry['model']},
    batch.inputs,
    batch.positions,
    batch.segment_ids,
    **options,
  )
  x = np.asarray(logits(features, tiny.VOCABULARY), np.float64)[..., : tiny.VOCABULARY]
  return features, x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def importances(x, v, w1, b1, w2, b2):
  """g [T, C] of `PerComponent` in one layer, from inputs [T, d_in], in float64."""
  hidden = (np.asarray(x, np.float64) @ v)[..., None] * w1 + b1
  active = hidden * (1 + erf(hidden / 2**0.5)) / 2
  return np.clip((active * w2).sum(-1) + b2, 0, 1)


def factors(path):
  """V and the importance function of a site, in float64."""
  _, params, _ = built()
  module, _, name = path.rpartition('/')
  own = [params[NETS][f'{path}/{part}'] for part in ('w1', 'b1', 'w2', 'b2')]
  return [np.asarray(array[0], np.float64) for array in (params[module][f'{name}_v'], *own)]


@functools.cache
def clean():
  """(log-probabilities, {path: g [L, B, T, C]}) of the target model."""
  features, log_p = read(activations=(SITES,))
  g = {path: importances(features.sites[path], *factors(path)) for path in (GATE, OUT)}
  return log_p, g


def everywhere(m, delta=None):
  """Masks m {path: [L, B, T, C]} and deltas, 0 by default, for all tokens."""
  return {
    path: Masks(
      np.asarray(of, 'f'),
      np.zeros(of.shape[:-1], 'f') if delta is None else np.asarray(delta[path], 'f'),
      np.ones(of.shape[:-1], bool),
    )
    for path, of in m.items()
  }


def sums_of(log_q):
  """(cross-entropy, divergence from the target model) summed over the targets."""
  log_p, _ = clean()
  loss = -np.take_along_axis(log_q, BATCH.targets[..., None], -1)[..., 0]
  kl = (np.exp(log_p) * (log_p - log_q)).sum(-1)
  return (BATCH.weights * loss).sum(), (BATCH.weights * kl).sum()


@functools.cache
def evaluated():
  """(the sums of an evaluation of BATCH in two chunks, its metrics)."""
  model, params, carry = built()
  term = scores()
  sums = tiny.term_sums(term, model, params, carry, BATCH, CHUNK)
  return sums, term.metrics(model, sums)


def test_constant_maskings_are_the_model_with_other_matrices_or_masks():
  """D4, D8: each pass has a memory of its own, so two chunks are the whole."""
  model, params, _ = built()
  products, zeros = ({m: dict(group) for m, group in params.items()} for _ in range(2))
  for site in sites_of(model.parameters()).values():
    v, u = site.factors(params)
    products[site.module][site.name] = v @ u
    zeros[site.module][site.name] = 0 * (v @ u)
  log_p, g = clean()
  rounded = {path: of > THRESHOLD for path, of in g.items()}
  assert 0.2 < np.mean(rounded[GATE]) < 0.8
  expected = {
    'target': sums_of(log_p),
    'unmasked': sums_of(read(params=products)[1]),
    'important': sums_of(read(masks=everywhere(g))[1]),
    'rounded': sums_of(read(masks=everywhere(rounded))[1]),
    'zero': sums_of(read(params=zeros)[1]),
  }
  streams = [read(**options, activations=('stream',))[0].activations['stream']
             for options in ({}, {'masks': everywhere(g)})]  # fmt: skip
  real = (BATCH.segment_ids > 0)[None, :, :, None]
  whole, error = (np.asarray(x, np.float64) * real for x in (streams[0], streams[1] - streams[0]))
  hidden = np.sum(error**2) / np.sum(whole**2)
  assert evaluated()[1]['components/hidden_error/important'] == pytest.approx(hidden, rel=1e-4)
  right = read(masks=everywhere(g))[1].argmax(-1) == BATCH.targets
  assert 0 < (BATCH.weights * right).sum() == evaluated()[0]['accuracy/important']
  assert len({round(loss, 2) for loss, _ in expected.values()}) == len(expected)
  sums, metrics = evaluated()
  weight = BATCH.weights.sum()
  for name, (loss, kl) in expected.items():
    assert sums[f'loss/{name}'] == pytest.approx(loss, rel=1e-5), name
    if name != 'target':
      assert metrics[f'components/loss/{name}'] == pytest.approx(loss / weight, rel=1e-5)
      excess = (loss - expected['target'][0]) / weight
      assert metrics[f'components/excess_loss/{name}'] == pytest.approx(excess, abs=1e-5)
      assert metrics[f'components/kl/{name}'] == pytest.approx(kl / weight, rel=1e-4)


def test_random_maskings_are_drawn_by_token_and_pass():
  """D1, D7: g + (1 - g) r with the delta, and r without it."""
  _, g = clean()
  rows, numbers = np.arange(ROWS), np.tile(np.arange(BATCH.inputs.shape[1]), (ROWS, 1))
  sums, _ = evaluated()
  for name, use in (('stochastic', 1), ('random', 4), ('shuffled', 6)):
    r = np.asarray(draws.uniform(0, 2**20 + use, rows, numbers, 2 * (C + 1)))[None]
    of = dict(zip(g, np.split(r, 2, axis=-1), strict=True))
    m, delta = {path: x[..., :C] for path, x in of.items()}, None
    if name == 'shuffled':  # as many as are active: those with the smallest r
      counts = {path: (x > THRESHOLD).sum(-1, keepdims=True) for path, x in g.items()}
      m = {path: x <= np.take_along_axis(np.pad(np.sort(x), ((0, 0),) * 3 + ((1, 0),),
           constant_values=-1), counts[path], -1) for path, x in m.items()}  # fmt: skip
    if name == 'stochastic':
      m = {path: g[path] + (1 - g[path]) * x for path, x in m.items()}
      delta = {path: x[..., C] for path, x in of.items()}
    loss, kl = sums_of(read(masks=everywhere(m, delta))[1])
    assert sums[f'loss/{name}'] == pytest.approx(loss, rel=1e-5)
    assert sums[f'kl/{name}'] == pytest.approx(kl, rel=1e-4)


def test_an_attack_ascends_by_signs_on_the_tokens_of_a_chunk():
  model, _, _ = built()
  batch, (_, g) = tiny.cut(BATCH, 0, CHUNK), clean()
  low = {path: of[:, :, :CHUNK] for path, of in g.items()}
  p = np.exp(read(batch)[1])

  def divergence(r):
    masks = {
      path: Masks(
        low[path] + (1 - low[path]) * r[path][..., :C],
        jnp.broadcast_to(r[path][..., C], low[path].shape[:-1]),
        jnp.ones(low[path].shape[:-1], bool),
      )
      for path in low
    }
    _, params, carry = built()
    features, _ = model.apply(
      params, {'model': carry['model']}, *(batch[n] for n in (0, 3, 4)), masks=masks
    )
    log_q = jax.nn.log_softmax(logits(features, tiny.VOCABULARY))[..., : tiny.VOCABULARY]
    return jnp.sum(batch.weights[..., None] * p * (np.log(p) - log_q))

  start = Adversary(scope='all').start(sites_of(model.parameters()), 1, 1, 0).sources
  r, reached = start, jax.jit(jax.value_and_grad(divergence))
  for _ in range(ASCENTS):
    gradient = reached(r)[1]
    r = {path: np.clip(r[path] + 0.1 * np.sign(gradient[path]), 0, 1) for path in r}
  sums, metrics = evaluated()
  assert sums['attacked'] == batch.weights.sum()  # the second chunk is not attacked
  kl = metrics['components/kl/adversarial']
  assert kl == pytest.approx(float(reached(r)[0]) / sums['attacked'], rel=1e-4)
  assert kl > float(reached(start)[0]) / sums['attacked']


def test_components_are_counted_over_all_tokens():
  _, g = clean()
  real = BATCH.segment_ids > 0
  active = {path: (of > THRESHOLD)[0][real] for path, of in g.items()}
  alive = np.concatenate([of[0][real].mean(0) for of in g.values()]) > 1e-6
  share = np.concatenate([of.mean(0) for of in active.values()])
  _, metrics = evaluated()
  found = {n.removeprefix('components/'): metrics[n] for n in metrics}
  assert found['active/layers.0.mlp.gate'] == pytest.approx(active[GATE].sum(-1).mean())
  assert found['active/layers.0.mlp.out'] == pytest.approx(active[OUT].sum(-1).mean())
  assert found['active'] == pytest.approx(share.sum())
  assert found['alive'] == alive.sum()
  assert found['ever_active'] == (share > 0).sum()
  assert found['density'] == pytest.approx(share[alive].mean())


def test_with_clean_memory_masked_passes_carry_nothing():
  term = dataclasses.replace(scores(), memory='clean')
  model, (_, params, _) = term.extended(target()), built()
  carry = model.initial_carry(ROWS)
  assert not jax.tree.leaves(carry['decomposition'].passes)
  run = functools.partial(chunk_scores, model, terms=(term,))
  _, after = jax.eval_shape(run, params, carry, tiny.cut(BATCH, 0, CHUNK))
  assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, carry)


def feed(path):
  tiny_run.write_stores(path, 'letters', '$%&*')  # bytes within the tiny model's vocabulary

  def make():
    tokens = TaskFeed('letters', 'validation', ROWS, 0, shuffle=False, epochs=1, data_dir=str(path))
    tokens.vocabulary_size = tiny.VOCABULARY
    return tokens

  return make


def test_a_harvest_has_the_most_important_windows_and_the_telling_tokens(tmp_path):
  _, params, _ = built()
  device = Partitioner((('data', 1),), (), (), manual=True)
  measure = Evaluator(target(), device, feed(tmp_path), ROWS, 64, terms=(scores(),))
  measure.open()
  sites = harvest(SplitReader(measure, scores(), params), shown=2, windows=3).shown
  (source,) = measure.sources.values()
  batch = source.read(0, source.row_tokens)
  features, _ = read(batch, activations=(SITES,))
  real, ends = batch.segment_ids > 0, batch.inputs == source.vocabulary.eos_id
  assert [site.name for site in sites] == ['layers.0.mlp.gate', 'layers.0.mlp.out']
  for path, site in zip((GATE, OUT), sites, strict=True):
    g = importances(features.sites[path], *factors(path))[0]
    active = (g > THRESHOLD) & real[..., None]
    share, mean = active[real].mean(0), g[real].mean(0)
    np.testing.assert_allclose(site.means, np.sort(mean)[::-1], rtol=1e-5)
    assert site.alive == (mean > 1e-6).sum() and len(site.means) == C
    assert site.active == pytest.approx(share.sum())
    order = [n for n in np.argsort(-share) if mean[n] > 1e-6][:2]
    assert [component.number for component in site.components] == order
    for component in site.components:
      n = component.number
      assert component.share == pytest.approx(share[n])
      assert component.mean == pytest.approx(mean[n], rel=1e-5)
      assert len(component.windows) == 3
      texts = {tuple(window.ids) for window in component.windows}
      assert len(texts) == 3
      for window in component.windows:
        # It is part of one document, with the importances of this place.
        assert 1 <= len(window.ids) <= SPAN
        assert window.importances[window.peak] >= window.importances.max() - 0.1
        places = [
          (row, t)
          for row, t in np.argwhere(batch.inputs == window.ids[0])
          if np.array_equal(batch.inputs[row, t : t + len(window.ids)], window.ids)
        ]
        assert any(
          len({*batch.segment_ids[row, t : t + len(window.ids)]}) == 1
          and np.allclose(g[row, t : t + len(window.ids), n], window.importances, atol=1e-5)
          for row, t in places
        )
      best = max(window.importances.max() for window in component.windows)
      assert best >= g[real][:, n].max() - 0.1  # equal ones are drawn at random
      for found, ids, kept in (
        (component.inputs, batch.inputs, real),
        (component.outputs, batch.targets, real & ~ends),
      ):
        for token in found:
          both = ((ids == token.id) & kept & active[..., n]).sum()
          acts, of, total = (
            (kept & active[..., n]).sum(),
            (kept & (ids == token.id)).sum(),
            kept.sum(),
          )
          assert token.share == pytest.approx(both / acts)
          pmi = math.log2((both / total) / ((acts / total) * (of / total)))
          assert token.bits == pytest.approx(pmi, rel=1e-6)


def test_held_out_windows_are_of_other_chunks_and_half_of_them_are_active(tmp_path):
  _, params, _ = built()
  device = Partitioner((('data', 1),), (), (), manual=True)
  strict = dataclasses.replace(scores(), threshold=0.85)  # in half of the documents
  measure = Evaluator(target(), device, feed(tmp_path), ROWS, 64, terms=(strict,))
  measure.open()
  reader = SplitReader(measure, strict, params)
  found = harvest(reader, shown=1, windows=2, labeled=C + 1, held_out=6)
  without_prompts = harvest(reader, shown=1, windows=2)
  assert repr(found.shown) == repr(without_prompts.shown)  # of all chunks
  sites = found.labeled
  (source,) = measure.sources.values()
  batch = source.read(0, source.row_tokens)
  features, _ = read(batch, activations=(SITES,))

  def halves(g, window):
    """The halves of the chunks in which a window may lie: 0 is shown, 1 is held out."""
    size = len(window.ids)
    found = set()
    for row, t in np.argwhere(batch.inputs == window.ids[0]):
      span = slice(t, t + size)
      same = np.array_equal(batch.inputs[row, span], window.ids)
      if same and np.allclose(g[row, span], window.importances, atol=1e-5):
        found.add((row + t // 64) % 2)
    return found

  tested = 0
  for path, site in zip((GATE, OUT), sites, strict=True):
    g = importances(features.sites[path], *factors(path))[0]
    for component in site.components:
      of_component = g[..., component.number]
      assert all(0 in halves(of_component, window) for window in component.windows)
      assert all(1 in halves(of_component, window) for window in component.held_out)
      active = [bool((window.importances > 0.85).any()) for window in component.held_out]
      each = len(active) // 2
      assert each <= 3 and active == [True] * each + [False] * each
      tested += each
  assert tested


def test_a_page_says_why_it_shows_no_attention_patterns(tmp_path, capsys):
  _, params, _ = built()
  device = Partitioner((('data', 1),), (), (), manual=True)
  measure = Evaluator(target(), device, feed(tmp_path), ROWS, 64, terms=(scores(),))
  split = SplitReader(measure, scores(), params)
  alone = tiny.model((functools.partial(tiny.full, carried=False),))
  text_chunks(alone, 64, split, params)
  assert 'no attention patterns: FullAttention.carried is False' in capsys.readouterr().out


def data_of(page_folder, name):
  """The value of a file of data of a page, whose script is one call with JSON."""
  script = (page_folder / 'data' / f'{name}.js').read_bytes().decode('ascii')
  head = f'receive("{name}", '
  assert script.startswith(head) and script.endswith(');\n')
  return json.loads(script.removeprefix(head).removesuffix(');\n'))


def content_of_a_page():
  """One component of two, in a cluster, and a text of the user."""
  text = 'é<b>\n\u202e'
  ids = np.asarray(BYTES.encode(text))
  window = Window(ids, np.linspace(0, 1, len(ids)), len(ids) - 1)
  token = Token(1.5, 0.25, BYTES.encode('<')[0])
  component = Component(7, 0.01, 0.02, [window], [token], [], label='</script>')
  site = ShownSite('a<b', 1, 0.02, np.array([0.01, 0]), [component])
  members = [Member('a<b', 7, 5), Member('a<b', 1, 3)]
  clustering = Clustering([Cluster(members, math.nan)], [], 0)
  active = [[ActiveComponent('a<b', 7, 1.25)], *([] for _ in ids[1:])]
  weights = np.zeros((1, 2, 1 + len(ids)), 'f')  # of the last two tokens, in one head
  weights[0, 0, [0, 3, 8]] = 0.04, 0.12, 0.84
  weights[0, 1, [8, 9]] = 0.25, 0.75
  patterns = {'layers.0.attention': LayerPatterns(weights, weights[..., ::-1])}
  own = ReadText('../<x>.txt', ids.tolist(), active, patterns)
  return page.PageContent('run', [site], clustering, [own])


def test_a_page_is_data_beside_a_program_that_makes_no_markup(tmp_path):
  page.write(tmp_path / 'page', content_of_a_page(), BYTES.decode)
  index = data_of(tmp_path / 'page', 'index')
  assert index['title'] == 'Components of run'
  (site,) = index['sites']
  assert site == {'name': 'a<b', 'components': 2, 'alive': 1, 'active': 0.02, 'means': [0.01, 0]}
  lines = index['components']
  assert {name: value for name, (value,) in lines.items()} == {
    'site': 0,
    'number': 7,
    'mean': 0.01,
    'share': 0.02,
    'tokens': ['<'],
    'label': '</script>',
    'cluster': 0,
  }
  assert index['clusters'] == [{'stability': None, 'members': [[0, 7, 5], [0, 1, 3]]}]
  layers = ['layers.0.attention']
  assert index['readings'] == [{'name': '../<x>.txt', 'tokens': 9, 'attention': layers}]
  (texts,) = data_of(tmp_path / 'page', 'texts_0')
  assert texts['inputs'] == [['<', 1.5, 0.25]] and texts['outputs'] == []
  (window,) = texts['windows']
  assert window['pieces'] == ['', 'é', '<', 'b', '>', '↵', '', '', '·']
  assert window['levels'] == [0, 2, 3, 4, 5, 7, 8, 9, 10] and window['peak'] == 8
  reading = data_of(tmp_path / 'page', 'reading_0')
  assert reading['active'] == [[[0, 7, 1.0]], *[[]] * 8]
  assert ''.join(reading['pieces']) == 'é<b>↵\n·'
  attention = data_of(tmp_path / 'page', 'attention_0_0')
  # Square roots in tenths: of registers and earlier tokens, and of each token up to the query.
  assert attention['first'] == 7 and attention['model'] == [['49', '059']]
  assert attention['masked'] == [['a0', 'a00']]

  program = (tmp_path / 'page' / 'app.js').read_text()
  assert not re.search(r'innerHTML|outerHTML|insertAdjacent|document\.write|eval\(', program)
  start = (tmp_path / 'page' / 'index.html').read_text()
  names = re.findall(r'(?:src|href)="([^"#]+)"', start)
  assert names == ['style.css', 'app.js', 'data/index.js']
  assert not re.search(r'https?://(?!www\.w3\.org)', program + start)
  assert f'LEVELS = {page._LEVELS};' in program


def test_a_later_page_replaces_an_earlier_one_and_nothing_else(tmp_path):
  folder = tmp_path / 'page'
  content = content_of_a_page()
  page.write(folder, content, BYTES.decode)
  (folder / 'notes.txt').write_text('mine')
  page.write(folder, content._replace(readings=[]), BYTES.decode)
  assert sorted(path.name for path in (folder / 'data').iterdir()) == ['index.js', 'texts_0.js']
  assert (tmp_path / 'page.replaced' / 'notes.txt').read_text() == 'mine'
  assert sorted(path.name for path in tmp_path.iterdir()) == ['page', 'page.replaced']


MORE = """
StepSettings.objective = (@Prediction, @Decomposition)
Decomposition.seed = 0
Decomposition.train_steps = 2
LanguageModel.sites = @Sites
Sites.components = (('mlp/out|s5/b', 3),)
ComponentScores.attacked_tokens = 0
"""


def test_a_run_is_evaluated_shown_and_exported(tmp_path, capsys):
  tiny_run.write_stores(tmp_path / 'data', 'letters', 'abc')
  run = tmp_path / 'run'
  (tmp_path / 'run.gin').write_text(tiny_run.gin_text(tmp_path / 'data', more=MORE))
  gin.clear_config(clear_constants=True)
  load_gin([str(tmp_path / 'run.gin')], [], modules=main.CONFIGURABLE_MODULES)
  state = Setup(StepSettings()).initial_state()
  with Checkpoints().open(run) as directory:
    directory.save_now(1, state, {'vocabulary': 'bytes'})
  write_configuration(run)

  start = functools.partial(tiny_run.output_of, capsys, run)
  start('--run_mode=eval')
  metrics = tiny_run.metrics(run, 'eval')[1]
  assert metrics['components/loss/unmasked'] - metrics['components/excess_loss/unmasked'] == (
    pytest.approx(metrics['loss'], rel=1e-5)
  )
  assert 'components/active/layers.0.s5.b' in metrics
  assert 'components/kl/adversarial' not in metrics  # nothing is attacked
  (tmp_path / 'own.txt').write_text('abcab' * 20)
  own = f'--gin.components.texts=("{tmp_path / "own.txt"}",)'
  said = start('--run_mode=components', '--gin.components.labeled=2', own)
  assert 'components_1/index.html: ' in said and 'clusters_1.json: ' in said
  prompts = (run / 'labels_1' / 'prompts.jsonl').read_text().splitlines()
  assert 1 <= len(prompts) <= 4 and f'asks for labels of {len(prompts)} components' in said
  clusters = json.loads((run / 'clusters_1.json').read_text())
  members = [m for cluster in clusters['clusters'] for m in cluster['members']]
  assert {m['site'] for m in members + clusters['alone']} <= {'layers.0.mlp.out', 'layers.0.s5.b'}
  index = data_of(run / 'components_1', 'index')
  assert [site['name'] for site in index['sites']] == ['layers.0.mlp.out', 'layers.0.s5.b']
  reading = data_of(run / 'components_1', 'reading_0')
  assert len(reading['active']) == index['readings'][0]['tokens'] == 100

  start('--run_mode=export', f'--output={tmp_path / "out"}', '--gin.export.form="components"')
  arrays = load_file(tmp_path / 'out' / 'model.safetensors')
  config = json.loads((tmp_path / 'out' / 'config.json').read_text())
  assert config['model']['Decomposition.train_steps'] == 2
  loaded = valkyrie.load(run)
  name, path = 'layers.0.mlp.out', OUT
  names = {name + end for end in ('', '_v', '_u', '_w1', '_b1', '_w2', '_b2')}
  assert {n for n in arrays if 'mlp' in n} == names
  assert arrays['layers.0.s5.b'].shape == (16, 16)  # [D, 2 P], the real map into complex states
  w, v, u, *net = (arrays[name + end] for end in ('', '_v', '_u', '_w1', '_b1', '_w2', '_b2'))

  batch = tiny.batch((9,))
  inputs = batch.inputs, batch.positions, batch.segment_ids
  carry, kinds = loaded.model.initial_carry(ROWS), (SITES, 'mlp')
  apply = jax.jit(loaded.model.apply, static_argnames='activations')
  features, _ = apply(loaded.params, carry, *inputs, activations=kinds)
  x = np.asarray(features.sites[path][0], np.float64)
  np.testing.assert_allclose(x @ w, features.activations['mlp'][0], atol=1e-5)
  g, delta = importances(x, v, *net), 0.3
  params = {**state.params, **loaded.params}
  z = PerComponent().logits(params, sites_of(loaded.model.parameters()), features.sites)
  np.testing.assert_allclose(g, np.clip(z[path][0], 0, 1), atol=1e-5)
  given = {
    path: Masks(
      g[None].astype('f'),
      np.full(g.shape[:-1], delta, 'f')[None],
      np.ones(g.shape[:-1], bool)[None],
    )
  }
  masked, _ = apply(loaded.params, carry, *inputs, activations=kinds, masks=given)
  y = ((x @ v) * g) @ u + delta * (x @ w - (x @ v) @ u)
  np.testing.assert_allclose(y, masked.activations['mlp'][0], atol=1e-5)
