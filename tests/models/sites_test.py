"""The sites of a decomposition: nothing changes without masks, and what masks compute."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from valkyrie.errors import ConfigurationError
from valkyrie.models.features import SITES
from valkyrie.models.matrices import Masks
from valkyrie.models.recurrence.gated import GatedRecurrence
from valkyrie.models.recurrence.gated_delta import GatedDeltaNet
from valkyrie.models.recurrence.mamba2 import Mamba2
from valkyrie.models.s5.layer import S5
from valkyrie.models.sites import Sites, by_name, ordered, sites_of
from valkyrie.weights import named_tensors

C = 5
every = functools.partial(Sites, components=(('.', C),))
MIXERS = {
  'longformer_attention': tiny.attention,
  's5': functools.partial(tiny.s5, activation='full_glu'),
  's5, selective': functools.partial(tiny.s5, selective=True, activation='half_glu1'),
  's5, normalized': functools.partial(tiny.s5, discretization='normalized', conj_sym=False),
  'gated': functools.partial(
    GatedRecurrence, recurrence=functools.partial(S5, state_size=8, activation='linear'), width=24
  ),
  'mamba2': functools.partial(Mamba2, heads=2, head_width=8, state_size=4),
  'gated_delta': functools.partial(GatedDeltaNet, heads=2, key_width=8, value_width=8),
}


def reader(model):
  """Compiles what a test asks for more than once only once."""
  apply = jax.jit(model.apply, static_argnames=('activations',))

  def read(params, carry, batch, **options):
    return apply(params, carry, batch.inputs, batch.positions, batch.segment_ids, **options)

  return read


def masks_of(model, rows, time, make):
  """{path: masks} of all sites, from a function of a shape."""
  return {
    path: Masks(
      make((site.layers, rows, time, site.components)),
      make((site.layers, rows, time)),
      jnp.ones((site.layers, rows, time), bool),
    )
    for path, site in sites_of(model.parameters()).items()
  }


@functools.cache
def built(name):
  """(a model with these mixers, all of whose matrices are sites, params, carry, its reader)."""
  model = tiny.model((MIXERS[name],), sites=every)
  return model, *tiny.init(model, 2), reader(model)


@pytest.mark.parametrize('name', MIXERS)
def test_a_site_without_masks_is_the_matrix_and_masks_of_one_are_too(name):
  plain = tiny.model((MIXERS[name],))
  model, params, carry, read = built(name)
  without = {
    m: {n: leaf for n, leaf in group.items() if n in plain.parameters()[m]}
    for m, group in params.items()
  }
  batch = tiny.batch((9, 15))
  expected = reader(plain)(without, carry, batch)
  found = read(params, carry, batch, activations=(SITES,))
  sites = sites_of(model.parameters())
  assert {path: x.shape for path, x in found[0].sites.items()} == {
    path: (2, *batch.inputs.shape, site.d_in) for path, site in sites.items()
  }
  ones = masks_of(model, *batch.inputs.shape, jnp.ones)
  for features, after in (
    read(params, carry, batch),
    read(params, carry, batch, masks=ones),
  ):
    np.testing.assert_array_equal(features.hidden, expected[0].hidden)
    jax.tree.map(np.testing.assert_array_equal, after, expected[1])
  # More outputs of a program may change what XLA joins, and so the last digit.
  np.testing.assert_allclose(found[0].hidden, expected[0].hidden, atol=2e-6)
  matrices = {
    f'{module}/{name}'
    for module, group in plain.parameters().items()
    for name, p in group.items()
    if p.cast is not None and len(p.shape.shape) == 3 and name != 'filters'
  }
  assert matrices <= {*sites}
  if 's5' in name:
    assert {path.rsplit('/', 1)[1] for path in sites} > {'b', 'c'}


@pytest.mark.parametrize('name', MIXERS)
def test_masks_of_a_site_compute_the_formula(name):
  """Each site alone, in both layers: each gets what changed matrices would give it."""
  model, params, carry, read = built(name)
  batch, random = tiny.batch((9, 15)), np.random.default_rng(0)
  plain, _ = read(params, carry, batch)
  # Masks of the other sites, which nothing routes there, keep one program for all sites.
  nothing = {
    path: masks._replace(route=jnp.zeros_like(masks.route))
    for path, masks in masks_of(model, *batch.inputs.shape, jnp.ones).items()
  }
  untouched, _ = read(params, carry, batch, masks=nothing)
  np.testing.assert_array_equal(untouched.hidden, plain.hidden)
  for path, site in sites_of(model.parameters()).items():
    shape = (site.layers, *batch.inputs.shape)
    m, d = random.random(C, np.float32), np.float32(0.3)
    masks = Masks(jnp.broadcast_to(m, (*shape, C)), jnp.full(shape, d), jnp.ones(shape, bool))
    found, after = read(params, carry, batch, masks={**nothing, path: masks})
    # One mask for all tokens is a matrix: V diag(m) U + d (W - V U).
    v, u = (np.asarray(factors) for factors in site.factors(params))
    w = np.asarray(site.target(params))
    changed = (v * m[None, None]) @ u + d * (w - v @ u)
    stored = params[site.module][site.name]
    across = np.swapaxes(changed, 1, 2)
    if stored.shape == changed.shape:
      leaf = changed
    elif site.name == 'b':
      leaf = np.stack(np.split(across, 2, axis=1), axis=1)
    else:
      re, im = np.split(across, 2, axis=2)
      leaf = np.stack([re, -im], axis=1) / np.float32(1 if 'normalized' in name else 2)
    other = {**params, site.module: {**params[site.module], site.name: leaf}}
    expected, expected_after = read(other, carry, batch)
    np.testing.assert_allclose(found.hidden, expected.hidden, atol=2e-5, err_msg=path)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-5), after, expected_after)
    unrouted = masks._replace(route=jnp.zeros(shape, bool))
    same, _ = read(params, carry, batch, masks={**nothing, path: unrouted})
    np.testing.assert_array_equal(same.hidden, plain.hidden)
    assert np.abs(found.hidden - plain.hidden).max() > 1e-3


def test_masks_of_one_site_alone_are_those_with_the_others_unrouted():
  """As a decomposition gives them, which masks some sites of a pass."""
  model, params, carry, read = built('s5')
  batch = tiny.batch((9, 15))
  zeros = masks_of(model, *batch.inputs.shape, jnp.zeros)
  others = {
    path: masks._replace(route=jnp.zeros_like(masks.route)) for path, masks in zeros.items()
  }
  chosen = next(path for path in zeros if path.endswith('/b'))
  alone, _ = read(params, carry, batch, masks={chosen: zeros[chosen]})
  among, _ = read(params, carry, batch, masks={**others, chosen: zeros[chosen]})
  np.testing.assert_allclose(alone.hidden, among.hidden, atol=2e-6)


@pytest.mark.parametrize(
  ('components', 'message'),
  [
    ((('mlp/', 0),), r"contains \('mlp/', 0\)"),
    ((('mlp/', True),), r"contains \('mlp/', True\)"),
    ((('(', 4),), 'Sites.components'),
    (('mlp/', 4), "contains 'mlp/'"),
    ((('mlp/', 4, '3-1'),), "contains .*'3-1'"),
    ((('mlp/', 4, '1,'),), "contains .*'1,'"),
  ],
)
def test_wrong_components_are_named(components, message):
  with pytest.raises(ConfigurationError, match=message):
    Sites(components)


@pytest.mark.parametrize('part', Masks._fields)
def test_a_mask_of_another_shape_is_named(part):
  """Shapes that would broadcast, too: they are as wrong."""
  model = tiny.model(layers=1, sites=every)
  batch = tiny.batch((9, 15))
  params, carry = jax.eval_shape(lambda: model.init(jax.random.key(0), 2))
  path = next(iter(sites_of(model.parameters())))
  ones = masks_of(model, *batch.inputs.shape, jnp.ones)[path]
  wrong = ones._replace(**{part: getattr(ones, part)[..., :1]})
  with pytest.raises(ConfigurationError, match=f'of {path} have the shapes .* need'):
    jax.eval_shape(reader(model), params, carry, batch, masks={path: wrong})


def test_chosen_layers_have_components_and_only_what_lies_above_them_has_a_backward_pass():
  """Of four layers: the MLP of the third one, and S5's B in all."""
  entries = (('mlp/', C, '2'), ('s5/b', 2))
  plain = tiny.model((tiny.s5,), layers=4)
  model = tiny.model((tiny.s5,), layers=4, sites=functools.partial(Sites, entries))
  whole, _ = tiny.init(plain, 2)
  random, carry = tiny.init(model, 2)
  of_target = named_tensors.of_params(whole)
  params = {module: {**group} for module, group in random.items()}
  for leaf in named_tensors.leaves(random):
    known = [of_target[name].whole() for name in leaf.tensors if name in of_target]
    if known:
      params[leaf.module][leaf.name] = np.stack(known) if leaf.stacked else known[0]
  names = named_tensors.names_of(model.parameters())
  sites = sites_of(model.parameters())
  assert {name for path in sites for name in names[path] if 'mlp' in name} == {
    f'layers.2.mlp.{name}' for name in ('gate', 'hidden', 'out')
  }
  in_order = [names[path][layer] for path, layer in ordered(sites) if path.endswith('/b')]
  assert in_order == [f'layers.{layer}.s5.b' for layer in range(4)]
  layers = {path: site.first + jnp.arange(site.layers) for path, site in sites.items()}
  found = by_name(layers, sites, names)
  assert [*found.values()] == sorted(found.values()) and {*in_order} < found.keys()
  assert all(int(name.split('.')[1]) == layer for name, layer in found.items())

  batch = tiny.batch((9, 15))
  expected, after = reader(plain)(whole, plain.initial_carry(2), batch, activations=('stream',))
  read = reader(model)
  found, carry_after = read(params, carry, batch, activations=('stream',))
  np.testing.assert_array_equal(found.hidden, expected.hidden)
  np.testing.assert_array_equal(found.activations['stream'], expected.activations['stream'])
  stacks = [carry_after['model'][name] for name in ('carry', 'from_2_carry', 'from_3_carry')]
  joined = jax.tree.map(lambda *leaves: np.concatenate(leaves), *stacks)
  jax.tree.map(np.testing.assert_array_equal, joined, after['model']['carry'])

  above = {path: m for path, m in masks_of(model, 2, 24, jnp.ones).items() if 'from_2' in path}

  def loss(v):
    site = {**params['model/from_2_layers/block_0/~/mlp'], 'out_v': v}
    own = {**params, 'model/from_2_layers/block_0/~/mlp': site}
    features, _ = model.read(own, carry, batch, masks=above)
    return jnp.sum(features.hidden**2)

  program = jax.make_jaxpr(jax.grad(loss))(params['model/from_2_layers/block_0/~/mlp']['out_v'])
  loops = [equation.params for equation in program.eqns if equation.primitive.name == 'scan']
  forwards = [loop['length'] for loop in loops if not loop['reverse']]
  backwards = [loop['length'] for loop in loops if loop['reverse']]
  assert (forwards, backwards) == ([2, 1, 1], [1, 1])


def test_layers_that_a_model_lacks_are_named():
  sites = functools.partial(Sites, (('mlp/', 4, '1,2-3'),))
  with pytest.raises(ConfigurationError, match=r'layer 2 for .* layers 0 to 1'):
    tiny.model(layers=2, sites=sites)
