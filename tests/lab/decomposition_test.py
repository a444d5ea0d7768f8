"""Decomposition: the rules D1 to D25 of valkyrie.lab.decomposition, against other references."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_run

from valkyrie.checkpoint.manager import open_to_read
from valkyrie.errors import ConfigurationError
from valkyrie.lab.decomposition import draws, importance
from valkyrie.lab.decomposition.adversary import Adversary, Attack
from valkyrie.lab.decomposition.faithfulness import unfaithfulness
from valkyrie.lab.decomposition.masks import Stochastic, Tokens
from valkyrie.lab.decomposition.objective import Decomposition
from valkyrie.models.block import Block
from valkyrie.models.features import SITES
from valkyrie.models.matrices import Masks
from valkyrie.models.sites import Site, Sites, ordered, sites_of
from valkyrie.sharding.partitioner import Partitioner
from valkyrie.training.curriculum import Curriculum, Phase
from valkyrie.training.optimizers import Optimizer
from valkyrie.training.train_state import initial_state, state_axes
from valkyrie.training.train_step import make_train_step
from valkyrie.weights import named_tensors

ROWS, TIME, C = 2, 24, 3
BATCH = tiny.batch((9, 15))
BATCH = BATCH._replace(weights=BATCH.weights.astype(float))
SUBSET = functools.partial(Stochastic, live='subset', coefficient=0.5)


def wide(tree):
  def cast(x):
    return x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x

  return jax.tree.map(cast, tree)


def parts(dtype='float64', components=C, also=(), **options):
  """(model, term, optimizer) of a small decomposition."""
  term = Decomposition(0, 10, **options)
  sites = functools.partial(Sites, components=(('s5/|mlp/hidden', components), *also))
  model = tiny.model((tiny.s5,), layers=1, sites=sites, remat_policy=None, compute_dtype=dtype)
  optimizer = Optimizer(learning_rate=0.01, warmup_steps=1, train_steps=10)
  return term.extended(model), term, optimizer.preceded_by(term.groups)


def start(model, term, optimizer, rows=ROWS):
  """The state before the first step."""
  kept = term.initial_state(model, rows, TIME)
  return initial_state(model, optimizer, 0, rows, None, kept and {term.name: kept})


def decomposed(rows=ROWS, dtype='float64', **options):
  """`parts`, and the state before the first step, whose parameters many cases compile once."""
  made = parts(dtype, **options)
  state = start(*made, rows)
  return *made, wide(state) if dtype == 'float64' else state


def step_of(model, term, optimizer, chunk_size=TIME, **options):
  phase = Phase(chunk_size, TIME // chunk_size, TIME // chunk_size)
  fixed = {'seed': 0, 'remat_chunks': False, 'terms': (term,)}
  return make_train_step(model, optimizer, Curriculum([phase]), phase, **fixed, **options)


def assert_same(found, expected, rtol=1e-12):
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    scale = max(float(np.abs(b).max()), 1.0)
    np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * scale)


# The functions.


def test_squashings_and_their_gradients():
  """D6."""
  z = jnp.array([-2.0, -1e-3, 0.0, 0.3, 1.0, 1.5])
  np.testing.assert_allclose(importance.lower(z), [0, 0, 0, 0.3, 1, 1])
  np.testing.assert_allclose(importance.upper(z), [0, 0, 0, 0.3, 1, 1.005])
  for sign, below in ((-1.0, -0.01), (1.0, 0.0)):
    found = jax.grad(lambda z, sign=sign: jnp.sum(sign * importance.lower(z)))(z)
    np.testing.assert_allclose(found, [below, below, below, sign, sign, 0])
  slopes = jax.grad(lambda z: jnp.sum(importance.upper(z)))(z)
  np.testing.assert_allclose(slopes[jnp.array([0, 1, 3, 5])], [0, 0, 1, 0.01])


@pytest.mark.parametrize('kind', [importance.PerComponent, importance.Shared])
def test_importance_functions(kind):
  model, *_ = parts()
  functions, sites = kind(width=4), sites_of(model.parameters())
  init, parameters = functions.created(sites)
  params, declared = init(jax.random.key(1))[importance.NETS], parameters()[importance.NETS]
  assert {n: p.shape.shape for n, p in declared.items()} == {n: p.shape for n, p in params.items()}
  random = np.random.default_rng(0)
  for path, site in sites.items():
    x = random.normal(size=(site.layers, 2, 5, site.d_in))
    v = random.normal(size=(site.layers, site.d_in, C))
    w1, b1, w2, b2 = (
      random.normal(size=params[f'{path}/{n}'].shape) for n in ('w1', 'b1', 'w2', 'b2')
    )
    given = dict(zip(('w1', 'b1', 'w2', 'b2'), (w1, b1, w2, b2), strict=True))
    own = {
      importance.NETS: {f'{path}/{n}': jnp.asarray(w) for n, w in given.items()},
      site.module: {f'{site.name}_v': jnp.asarray(v), f'{site.name}_u': jnp.zeros(())},
    }
    found, _ = functions(own, {path: site}, {path: jnp.asarray(x)}, (), tiny.batch((5,)))
    found = found[path]
    gelu = np.vectorize(lambda a: a * (1 + math.erf(a / math.sqrt(2))) / 2)
    for layer, row, token, c in np.ndindex(site.layers, 2, 5, C):
      one = x[layer, row, token]
      if kind is importance.PerComponent:
        hidden = gelu(one @ v[layer, :, c] * w1[layer, c] + b1[layer, c])
        expected = hidden @ w2[layer, c] + b2[layer, c]
      else:
        expected = gelu(one @ w1[layer] + b1[layer]) @ w2[layer, :, c] + b2[layer, c]
      np.testing.assert_allclose(found[layer, row, token, c], expected, rtol=1e-4, atol=1e-5)


def test_importance_by_blocks_reads_the_past_through_its_carry():
  model, *_ = parts(dtype='float32')
  sites = sites_of(model.parameters())
  block = functools.partial(Block, mixers=(tiny.attention,), mlp_width=8)
  functions = importance.Blocks(width=16, pattern=(block, block))
  init, parameters = functions.created(sites)
  params, batch = jax.jit(init)(jax.random.key(0)), BATCH
  shapes = {m: {n: p.shape.shape for n, p in g.items()} for m, g in parameters().items()}
  assert shapes == jax.tree.map(jnp.shape, params)
  assert all(module.startswith('decomposition') for module in params)
  random = np.random.default_rng(0)
  inputs = {
    path: jnp.asarray(random.normal(size=(site.layers, ROWS, TIME, site.d_in)), jnp.float32)
    for path, site in sites.items()
  }
  begin = functions.initial_carry(ROWS, jnp.float32)

  @jax.jit
  def read(inputs, carry, batch):
    return functions(params, sites, inputs, carry, batch)

  whole, _ = read(inputs, begin, batch)
  assert {p: z.shape for p, z in whole.items()} == {p: (1, ROWS, TIME, C) for p in sites}

  def part(carry, begin, end):
    some = {path: x[:, :, begin:end] for path, x in inputs.items()}
    return read(some, carry, tiny.cut(batch, begin, end))

  first, carry = part(begin, 0, 13)
  second, _ = part(carry, 13, TIME)
  forgotten, _ = part(begin, 13, TIME)
  for path in sites:
    cut = jnp.concatenate([first[path], second[path]], axis=2)
    np.testing.assert_allclose(cut, whole[path], atol=1e-5)
    assert np.abs(forgotten[path][:, :, 0] - second[path][:, :, 0]).max() > 1e-3


@pytest.mark.parametrize('recomputed', [False, True])
def test_blocks_of_groups_are_a_stack_for_each_group(recomputed):
  """Two groups of two layers, against a loop over the groups: logits, carries and gradients."""
  pattern = (functools.partial(Block, mixers=(tiny.attention,), mlp_width=8),)
  every = functools.partial(Sites, components=(('mlp/', C),))
  sites = sites_of(tiny.model((tiny.s5,), layers=4, sites=every).parameters())
  halves = {path: site._replace(layers=2) for path, site in sites.items()}
  grouped = importance.Blocks(16, pattern, groups=2, recomputed=recomputed)
  single = importance.Blocks(16, pattern)
  params = jax.jit(grouped.created(sites)[0])(jax.random.key(0))
  random = np.random.default_rng(0)
  inputs = {
    path: jnp.asarray(random.normal(size=(4, ROWS, TIME, site.d_in)), jnp.float32)
    for path, site in sites.items()
  }
  begin = grouped.initial_carry(ROWS, jnp.float32)

  def in_a_loop(params, sites, inputs, carry, batch):
    renamed = {
      name.replace('decomposition/group', 'decomposition'): p for name, p in params.items()
    }
    found = []
    for group in range(2):
      own, before = jax.tree.map(lambda leaf, group=group: leaf[group], (renamed, carry))
      some = {path: x[2 * group : 2 * group + 2] for path, x in inputs.items()}
      found.append(single(own, halves, some, before, batch))
    z = {path: jnp.concatenate([of_group[path] for of_group, _ in found]) for path in sites}
    return z, jax.tree.map(lambda *leaves: jnp.stack(leaves), *[after for _, after in found])

  def results(functions):
    def loss(params):
      z, after = functions(params, sites, inputs, begin, BATCH)
      return sum(jnp.sum(jnp.sin(leaf)) for leaf in z.values()), (z, after)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)

  assert_same(results(grouped), results(in_a_loop), rtol=1e-5)


def test_draws_depend_only_on_seed_use_row_and_token():
  """D7."""
  row, numbers = jnp.arange(3), jnp.tile(jnp.arange(8)[None], (3, 1))
  whole = draws.uniform(0, 1, row, numbers, 5)
  np.testing.assert_array_equal(whole[1:, 2:6], draws.uniform(0, 1, row[1:], numbers[1:, 2:6], 5))
  others = [draws.uniform(*of, row, numbers, 5) for of in ((0, 2), (1, 1))]
  values = np.concatenate([np.ravel(x) for x in (whole, *others)])
  assert len({*values.tolist()}) == values.size and values.min() >= 0 and values.max() < 1
  place = draws.start(3)
  first, place = draws.tokens(place, 4)
  second, place = draws.tokens(place, 4)
  np.testing.assert_array_equal(jnp.concatenate([first, second], axis=1), numbers)


def test_a_subset_has_each_size_and_each_site_alike():
  model, *_ = parts()
  sites = sites_of(model.parameters())
  known, tokens = (
    ordered(sites),
    Tokens(0, jnp.arange(20), jnp.tile(jnp.arange(300)[None], (20, 1))),
  )
  routes = SUBSET().routes(known, sites, 0, tokens)
  chosen = np.concatenate([routes[path] for path in routes]).reshape(len(known), -1)
  sizes = np.bincount(chosen.sum(0), minlength=len(known) + 1)
  assert sizes[0] == 0
  share = 1 / len(known)
  error = 4 * math.sqrt(share * (1 - share) / 6000)
  np.testing.assert_allclose(sizes[1:] / 6000, share, atol=error)
  np.testing.assert_allclose(
    chosen.mean(1), (len(known) + 1) / 2 / len(known), atol=4 * 0.5 / math.sqrt(6000)
  )
  grouped = Stochastic(live='groups', groups=2)
  first, second = grouped.passes(sites)
  assert first + second == known and abs(len(first) - len(second)) <= 1
  assert Stochastic(live='each').passes(sites) == [[site] for site in known]


# The losses of a step.


def reference(model, term, params, batch, sources, step):
  """The loss of a step in one piece, from the formulas; `sources` of each loss by path."""
  carry = model.initial_carry(ROWS)
  where = batch.inputs, batch.positions, batch.segment_ids
  clean, _ = model.apply(params, {'model': carry['model']}, *where, activations=(SITES,))
  sites, weights = sites_of(model.parameters()), jnp.asarray(batch.weights)
  own = params[importance.NETS]

  def log_p(features):
    logits = features.hidden @ features.unembedding[: tiny.VOCABULARY].T
    return jax.nn.log_softmax(logits)

  low, high = {}, {}
  for path, site in sites.items():
    v, _ = site.factors(params)
    inner = jnp.einsum('lbtd,ldc->lbtc', clean.sites[path], v)
    hidden = inner[..., None] * own[f'{path}/w1'][:, None, None] + own[f'{path}/b1'][:, None, None]
    hidden = hidden * (1 + jax.lax.erf(hidden / math.sqrt(2))) / 2
    z = jnp.sum(hidden * own[f'{path}/w2'][:, None, None], -1) + own[f'{path}/b2'][:, None, None]
    low[path], high[path] = importance.lower(z), importance.upper(z)
  total = jnp.zeros(())
  p = jax.lax.stop_gradient(log_p(clean))
  for loss, (source, route) in zip(term.losses, sources, strict=True):
    given = {
      path: Masks(
        low[path] + (1 - low[path]) * source[path][..., :-1], source[path][..., -1], route[path]
      )
      for path in sites
    }
    masked, _ = model.apply(params, {'model': carry['model']}, *where, masks=given)
    divergence = jnp.sum(jnp.exp(p) * (p - log_p(masked)), axis=-1)
    total += loss.coefficient * jnp.sum(weights * divergence) / jnp.sum(weights)
  first, last = term.exponent, term.last_exponent
  exponent = first + (last - first) * (jnp.float32(step) / term.train_steps)
  differences, elements = jnp.zeros(()), 0
  for path, site in sites.items():
    f = jnp.mean((high[path] + 1e-12) ** exponent, (1, 2))
    a = term.reference_tokens
    total += term.minimality * jnp.sum(f) + term.frequency * jnp.sum(f * jnp.log2(1 + a * f))
    v, u = site.factors(params)
    w = jax.lax.stop_gradient(site.target(params))
    differences += jnp.sum((w - v @ u) ** 2)
    elements += w.size
  return total + term.faithfulness * differences / elements


QUIET = functools.partial(Adversary, scope='positions', ascents=0)
GROUPS = functools.partial(Stochastic, live='groups', groups=99)
OPTIONS = {
  'reconstruction': (Stochastic, SUBSET, QUIET),
  'frequency': 2e-3, 'reference_tokens': 7, 'minimality': 3e-2, 'faithfulness': 0.7,
}  # fmt: skip


@functools.cache
def whole(**changed):
  """(a decomposition, the state after a step at step 4, its metrics, the gradient) in float64."""
  with jax.enable_x64(True):
    built = decomposed(**{**OPTIONS, **changed})
    state = built[-1]._replace(step=jnp.asarray(4, jnp.int32))
    return built, state, jax.jit(step_of(*built[:3]))(state, BATCH)


def gradient_by_adam(state, after, path):
  """The gradient of a parameter from the first moment after the first step of Adam."""
  found = [
    leaf
    for key, leaf in jax.tree_util.tree_leaves_with_path(after.optimizer_state)
    if 'mu' in jax.tree_util.keystr(key) and path in jax.tree_util.keystr(key).replace("']['", '/')
  ]
  (moment,) = found
  return moment / (1 - 0.9)


def test_the_loss_of_a_step_and_its_gradient():
  """D1 to D4, D9 to D12 and D18."""
  with jax.enable_x64(True):
    (model, term, _, _), state, (after, metrics) = whole(clip_norm=math.inf)
    batch = BATCH
    sites = sites_of(model.parameters())
    numbers = jnp.tile(jnp.arange(TIME)[None], (ROWS, 1))
    tokens = Tokens(0, jnp.arange(ROWS), numbers)
    sources = []
    for number, loss in enumerate(term.losses):
      route = loss.routes(ordered(sites), sites, 2000 * number, tokens)
      if isinstance(loss, Adversary):
        attack = state.objective[term.name][str(number)]
        found = {
          p: jnp.moveaxis(jnp.tile(r, (ROWS, 1, 1, 1)), 2, 0) for p, r in attack.sources.items()
        }
      else:
        found = loss.sources([*sites], sites, 2000 * number + 1, tokens)
      sources.append((found, route))
    of = jax.jit(
      jax.value_and_grad(lambda params: reference(model, term, params, batch, sources, 4))
    )
    value, gradient = of(state.params)
    np.testing.assert_allclose(metrics.sums.followed / metrics.sums.weight, value, rtol=1e-7)
    learned = {
      f'{m}/{n}'
      for m, g in state.params.items()
      for n in g
      if n.endswith(('_v', '_u')) or m == importance.NETS
    }
    for module, group in state.params.items():
      for name in group:
        path, before, now = f'{module}/{name}', group[name], after.params[module][name]
        if path in learned:
          found = gradient_by_adam(state, after, path)
          np.testing.assert_allclose(
            found, gradient[module][name], rtol=1e-8, atol=1e-12, err_msg=path
          )
        else:
          np.testing.assert_array_equal(now, before)
    moments = {
      jax.tree_util.keystr(key)
      for key, _ in jax.tree_util.tree_leaves_with_path(after.optimizer_state)
    }
    assert not any("'lambda_re'" in key for key in moments)


def test_cuts_change_no_loss_no_gradient_and_no_adversary():
  """D22, D17; with the clean memory in masked passes they do."""
  with jax.enable_x64(True):
    built, state, (expected, metrics) = whole(clip_norm=math.inf)
    found, cut = jax.jit(step_of(*built[:3], chunk_size=3))(state, BATCH)
    np.testing.assert_allclose(cut.sums.followed, metrics.sums.followed, rtol=1e-12)
    assert_same(cut.sums.terms, metrics.sums.terms)
    for name in ('params', 'optimizer_state', 'carry', 'objective'):
      assert_same(getattr(found, name), getattr(expected, name), rtol=1e-9)


def test_passes_side_by_side_are_the_same_passes():
  """D9: a pass of each of two groups of sites, and two passes of all sites."""
  groups = functools.partial(Stochastic, live='groups', groups=2)
  options = {'clip_norm': math.inf, 'reconstruction': (groups, SUBSET, QUIET)}
  with jax.enable_x64(True):
    _, _, (expected, metrics) = whole(**options)
    _, _, (found, together) = whole(**options, side_by_side=True)
    assert_same(together.sums.terms, metrics.sums.terms)
    for name in ('params', 'carry', 'objective'):
      assert_same(getattr(found, name), getattr(expected, name), rtol=1e-9)


def test_the_clean_memory_depends_on_the_cuts():
  with jax.enable_x64(True):
    built, state, (_, metrics) = whole(memory='clean', frequency=0.0)
    _, cut = jax.jit(step_of(*built[:3], chunk_size=12))(state, BATCH)
    assert abs(cut.sums.followed - metrics.sums.followed) > 1e-4


def test_masked_passes_carry_what_the_masked_model_remembers():
  """D23: they begin anew with each document, as the clean one; and D24."""
  model, term, optimizer, state = decomposed(dtype='float32')
  step = jax.jit(step_of(model, term, optimizer))
  after, _ = step(state, BATCH)
  memory = after.carry[term.name]
  (masked,) = memory.passes[0]
  clean = after.carry['model']
  differ = [
    np.abs(a - b).max()
    for a, b in zip(*map(jax.tree.leaves, (masked['model'], clean)), strict=True)
  ]
  assert max(differ) > 1e-3
  np.testing.assert_array_equal(memory.place.read, [TIME] * ROWS)
  # A refused step clears all carries, and changes neither the adversary nor the components.
  broken = jax.tree_util.tree_map_with_path(
    lambda path, x: jnp.full_like(x, jnp.nan) if 'hidden/w1' in jax.tree_util.keystr(path) else x,
    after.params,
  )
  refused, _ = step(after._replace(params=broken), BATCH)
  assert int(refused.skipped) == 1
  jax.tree.map(np.testing.assert_array_equal, refused.carry, model.initial_carry(ROWS))


# Adversaries.


def test_an_adversary_ascends_with_adam_inside_the_unit_interval():
  """D13, D16."""
  model, *_ = parts()
  sites, adversary = sites_of(model.parameters()), Adversary(rate=0.3, warmup_steps=2)
  attack = adversary.start(sites, ROWS, TIME, 0)
  random = np.random.default_rng(0)
  values = {p: np.asarray(r, float) for p, r in attack.sources.items()}
  assert all(r.min() >= 0 and r.max() < 1 for r in values.values())
  mean, square = ({p: np.zeros_like(r) for p, r in values.items()} for _ in range(2))
  for step in range(3):
    gradient = {p: random.normal(size=r.shape) for p, r in values.items()}
    attack = adversary.ascend(attack, jnp.int32(step), jax.tree.map(jnp.asarray, gradient))
    for p, g in gradient.items():
      mean[p], square[p] = 0.5 * mean[p] + 0.5 * g, 0.99 * square[p] + 0.01 * g**2
      direction = (
        mean[p] / (1 - 0.5 ** (step + 1)) / (np.sqrt(square[p] / (1 - 0.99 ** (step + 1))) + 1e-8)
      )
      values[p] = np.clip(values[p] + 0.3 * min(1, (step + 1) / 2) * direction, 0, 1)
      np.testing.assert_allclose(attack.sources[p], values[p], rtol=1e-5, atol=1e-6)
  by_signs = Adversary(rate=0.1, persistent=False)
  moved = by_signs.ascend(attack, jnp.int32(0), jax.tree.map(jnp.asarray, gradient))
  for p, g in gradient.items():
    np.testing.assert_allclose(
      moved.sources[p], np.clip(values[p] + 0.1 * np.sign(g), 0, 1), atol=1e-6
    )


def test_sources_and_moments_in_bfloat16_are_those_of_float32_rounded():
  """An ascent by Adam from the same values; the sources of tokens are wide."""
  model, *_ = parts()
  sites = sites_of(model.parameters())
  narrow = Adversary(rate=0.3, dtype='bfloat16')
  attack = narrow.start(sites, ROWS, TIME, 0)
  assert {leaf.dtype for leaf in jax.tree.leaves(attack[:3])} == {jnp.dtype('bfloat16')}
  tokens = Tokens(0, jnp.arange(ROWS), jnp.zeros((ROWS, TIME), jnp.int32))
  spread = narrow.spread(attack.sources, tokens)
  assert {r.dtype for r in spread.values()} == {jnp.dtype('float32')}
  random = np.random.default_rng(0)
  slope = {p: jnp.asarray(random.normal(size=r.shape), 'float32') for p, r in attack[0].items()}
  wide = jax.tree.map(lambda leaf: leaf.astype('float32'), attack[:3])
  expected = Adversary(rate=0.3).ascend(Attack(*wide, attack.count), 0, slope)
  found = narrow.ascend(attack, 0, slope)
  for a, b in zip(jax.tree.leaves(found[:3]), jax.tree.leaves(expected[:3]), strict=True):
    np.testing.assert_array_equal(a, b.astype('bfloat16'))


@pytest.mark.parametrize(
  ('scope', 'sets', 'shape'),
  [('all', 1, (1, 1)), ('rows', 3, (3, 1)), ('positions', 1, (1, TIME)), ('tokens', 1, (4, TIME))],
)
def test_scopes_of_sources(scope, sets, shape):
  model, *_ = parts()
  sites, adversary = sites_of(model.parameters()), Adversary(scope=scope, sets=sets)
  sources = adversary.start(sites, 4, TIME, 0).sources
  tokens = Tokens(0, jnp.arange(4), TIME + jnp.tile(jnp.arange(TIME)[None], (4, 1)))
  for path, found in adversary.spread(sources, tokens).items():
    assert sources[path].shape[:2] == shape
    for row, token in ((1, 5), (3, 0)):
      expected = sources[path][row % shape[0], token % shape[1]]
      np.testing.assert_array_equal(found[:, row, token], expected)


def test_ascents_raise_the_loss_and_the_step_gives_one_more():
  """D14: ascents before a step, with all else constant, then one by the step's own gradient."""
  options = {'frequency': 0.0, 'minimality': 0.0, 'faithfulness': 0.0}

  def losses(ascents, persistent=True):
    adversary = functools.partial(
      Adversary, ascents=ascents, rate=0.2, persistent=persistent, coefficient=0.5
    )
    model, term, optimizer, state = decomposed(
      dtype='float32', reconstruction=(adversary,), **options
    )
    after, metrics = jax.jit(step_of(model, term, optimizer))(state, BATCH)
    return metrics.sums.terms['reconstruction_0_adversarial'], state, after

  found = {ascents: losses(ascents) for ascents in (0, 1)}
  assert found[1][0] > found[0][0] * 1.01
  (_, _, none), (_, _, one) = found[0], found[1]
  counts = [int(after.objective['decomposition']['0'].count) for after in (none, one)]
  assert counts == [1, 2]
  before = found[0][1].objective['decomposition']['0'].sources
  moved = none.objective['decomposition']['0'].sources
  assert all(np.abs(moved[p] - before[p]).max() > 0.1 for p in before)


# Layouts.


@functools.cache
def on_one_device(importance):
  """(a decomposition and its state, a batch of 8 rows, the state after it, its metrics), float64.

  A loss with routes and one with an adversary draw all that a step draws by rows and tokens.
  """
  batch = jax.tree.map(lambda x: np.tile(x, (4, 1)), BATCH)
  inputs = np.random.default_rng(0).integers(0, 50, batch.inputs.shape, np.int32)
  batch = batch._replace(inputs=inputs)
  options = OPTIONS | {'reconstruction': (SUBSET, QUIET)}
  built = decomposed(8, components=8, importance=importance, **options)
  expected, metrics = jax.jit(step_of(*built[:3]))(built[-1], batch)
  return built, batch, expected, metrics


def assert_layout_changes_nothing(mesh, importance, factors_are_split, **options):
  """A step on the mesh in float64; options of `step_of`."""
  (model, term, optimizer, state), batch, expected, metrics = on_one_device(importance)
  axes = state_axes(model, optimizer, mesh, jax.eval_shape(lambda: state))
  placed = jax.device_put(state, mesh.shardings(state, axes))
  for site in sites_of(model.parameters()).values():
    for factor in site.factors(placed.params):
      assert factor.is_fully_replicated != factors_are_split
  step = mesh.jit(step_of(model, term, optimizer, **options))
  found, many = step(placed, mesh.place_batch(batch, 8))
  np.testing.assert_allclose(many.sums.followed, metrics.sums.followed, rtol=1e-12)
  assert_same(many.sums.terms, metrics.sums.terms)
  for name in ('params', 'carry', 'objective'):
    assert_same(jax.device_get(getattr(found, name)), getattr(expected, name), rtol=1e-9)


def test_layouts_and_micro_batches_change_nothing():
  """D21, in float64: rows over four devices, time over two."""
  mesh = Partitioner((('data', 4), ('time', 2)), (('batch', 'data'), ('time', 'time')))
  with jax.enable_x64(True):
    assert_layout_changes_nothing(
      mesh, importance.PerComponent, factors_are_split=False, chunk_size=12, micro_batches=2
    )


@pytest.mark.parametrize(
  ('layout', 'importance'),
  [
    ('gathered by layer', importance.Shared),
    ('split in two dimensions', importance.PerComponent),
  ],
)
def test_split_matrices_and_factors_change_nothing(layout, importance):
  """D21, in float64, where no device holds a whole site."""
  two = layout == 'split in two dimensions'
  split = (('mlp', 'x'), ('state', 'x')) if two else ()
  mesh = Partitioner(
    (('x', 2), ('y', 2), ('z', 2)) if two else (('z', 8),),
    (('batch', 'z'), ('embed', ('y', 'z') if two else 'z'), *split),
    manual=not two, gather_layers=not two,
  )  # fmt: skip
  with jax.enable_x64(True):
    assert_layout_changes_nothing(mesh, importance, factors_are_split=True)


@pytest.mark.parametrize(('layers', 'split'), [(4, 0), (4, 1), (3, 0)])
def test_devices_divide_the_layers_for_faithfulness(layers, split):
  """D10: 4 layers are divided over two axes and their parts over the third; 3 only by parts."""
  axes = ('x', 'y', 'z')
  mesh = Partitioner(
    tuple((axis, 2) for axis in axes), (('batch', axes), ('embed', axes)), gather_layers=True
  )
  of_matrix = ('embed', None) if split == 0 else (None, 'embed')
  site = Site('m', 'w', 0, layers, 8, 16, 24, lambda w: w, of_matrix)
  shapes = {'w': (layers, 8, 16), 'w_v': (layers, 8, 24), 'w_u': (layers, 24, 16)}
  rng = np.random.default_rng(0)
  with jax.enable_x64(True):
    params = {'m': {name: rng.standard_normal(shape) for name, shape in shapes.items()}}
    of = jax.value_and_grad(lambda params: unfaithfulness(params, {'m/w': site}))
    expected = jax.jit(of)(params)
    placed = jax.device_put(params, mesh.sharding((None, *of_matrix)))
    program = mesh.jit(of).lower(placed).compile()
    assert_same(jax.device_get(program(placed)), expected)
    assert ('all-to-all' in program.as_text()) == (layers == 4)


@pytest.mark.parametrize(
  ('make', 'message'),
  [
    (lambda: parts(reconstruction=()), 'reconstruction is empty'),
    (lambda: parts(memory='mine'), "memory='mine' is unknown"),
    (lambda: parts(minimality=-1.0), 'Decomposition.minimality = -1.0 is out of'),
    (lambda: Stochastic(live='some'), "Stochastic.live='some' is unknown"),
    (lambda: Stochastic(source=2.0), 'Stochastic.source = 2.0 is out of'),
    (lambda: start(*parts(reconstruction=(GROUPS,))), 'groups=99'),
    (lambda: Adversary(scope='row'), "Adversary.scope='row' is unknown"),
    (lambda: parts(importance=functools.partial(importance.Blocks, 8, (Block,), 2)), 'groups=2'),
    (lambda: Adversary(dtype='float16'), "Adversary.dtype='float16' is unknown"),
    (lambda: Adversary(sets=2), "sets=2 needs Adversary.scope = 'rows'"),
    (lambda: Adversary(live='each'), "Adversary.live='each'"),
    (lambda: Decomposition(0, 10).extended(tiny.model(layers=1)), 'needs matrices to decompose'),
    (lambda: parts(also=(('mpl/', 2),)), r"'mpl/', but no path .* Did you mean mlp\?"),
    (lambda: parts(also=(('s5/', 2, '0'),)), "the pattern 's5/', but no path"),
    (lambda: Adversary(scope='rows', sets=5).start({}, 4, TIME, 0), 'a step has 4 rows'),
  ],
)  # fmt: skip
def test_what_does_not_fit_is_named(make, message):
  with pytest.raises(ConfigurationError, match=message):
    make()


def test_importances_of_another_shape_are_named():
  """Also one for all components, which would broadcast."""

  class One(importance.Shared):
    def _logits(self, own, x, v):
      return super()._logits(own, x, v)[..., :1]

  made = parts(importance=One, dtype='float32')
  state = jax.eval_shape(lambda: start(*made))
  with pytest.raises(ConfigurationError, match=r'shape \(1, 2, 24, 1\).*expected \(1, 2, 24, 3\)'):
    jax.eval_shape(step_of(*made), state, BATCH)


# Memory and runs.


@pytest.mark.parametrize(('memory', 'finds'), [('own', True), ('clean', False)])
def test_a_write_is_important_where_it_is_read_chunks_later(memory, finds):
  """D25: only the last token counts; who ablates S5's B in the first chunk changes it."""
  quiet = functools.partial(Adversary, scope='positions', ascents=0)
  model, term, optimizer, state = decomposed(
    dtype='float32', memory=memory, minimality=0.0, faithfulness=0.0, reconstruction=(quiet,)
  )
  batch = tiny.batch((TIME,))
  weights = np.zeros_like(batch.weights)
  weights[:, -1] = 1
  step = jax.jit(step_of(model, term, optimizer, chunk_size=6))
  after, _ = step(state, batch._replace(weights=weights))
  gradient = after.objective[term.name]['0'].mean['model/layers/block_0/~/s5/b'] / (1 - 0.5)
  assert (np.abs(gradient[0, :6]).max() > 1e-7) == finds
  assert not finds or np.abs(gradient[0, :6]).min(axis=(1, 2)).max() < np.abs(gradient).max()
  assert np.abs(gradient[0, 18:]).max() > 1e-7


DECOMPOSE = """
include 'gin/decompose.gin'
Sites.components = (('s5/b', 4, '1'), ('mlp/out', 3))
Decomposition.faithful_steps = 3
Adversary.persistent = True
Adversary.ascents = 1
InitialWeights.any_loss = True
train_steps = {steps}
Decomposition.train_steps = 10
Optimizer.train_steps = 10
checkpoint_every = 2
eval_every = 100
"""


def test_a_run_that_was_stopped_is_the_same_run(tmp_path, capsys):
  """D19, D20: bit for bit, adversaries included; the steps on faithfulness are not repeated."""
  tiny_run.write_stores(tmp_path, 'letters', 'abc ')
  target = tiny_run.train(tmp_path / 'target', tmp_path, layers=2)
  weights = f'--gin.train.initial_weights="{target}"'

  def run(name, steps):
    data = DECOMPOSE.format(steps=steps)
    return tiny_run.train(tmp_path / name, tmp_path, weights, data=data, layers=2)

  run('parts', 2)
  assert '3 steps on faithfulness' in capsys.readouterr().err
  parts = run('parts', 4)
  assert 'steps on faithfulness' not in capsys.readouterr().err
  whole = run('whole', 4)
  states = []
  for folder in (parts, whole):
    with open_to_read(str(folder), '4') as directory:
      place, files = directory._place_of_state(), directory._files
      fields = 'params', 'optimizer_state', 'carry', 'objective'
      states.append({field: files.read_to_host(place, field) for field in fields})
  assert states[0]['objective']['decomposition']
  jax.tree.map(np.testing.assert_array_equal, *states)
  lines = [tiny_run.metrics(folder)[4] for folder in (parts, whole)]
  terms = {name for name in lines[0] if name.startswith('terms/')}
  assert {name.split('/')[1][:6] for name in terms} == {'reconst'[:6], 'minima', 'faithf', 'alive_'}
  assert [lines[0][name] for name in terms] == [lines[1][name] for name in terms]
  # The matrices of the target are as they were.
  with open_to_read(str(target), '2') as directory:
    before = directory.restore_evaluated()
  after = named_tensors.of_params(states[0]['params'])
  for name, tensor in named_tensors.of_params(before).items():
    np.testing.assert_array_equal(after[name].whole(), tensor.whole())
  assert {name for name in after if name.endswith('_v')} == {
    'layers.1.s5.b_v', 'layers.0.mlp.out_v', 'layers.1.mlp.out_v',
  }  # fmt: skip
