"""Products in 8 bits: beside float64, in training, and where tokens or devices are divided."""

import functools
import types

import haiku as hk
import jax
import jax.numpy as jnp
from jaxprs import equations
from layouts import assert_equal, gradients, layout_of, of_step
import ml_dtypes
import numpy as np
import optax
import pytest
import tiny

from valkyrie.errors import ConfigurationError
from valkyrie.lab.certificates import collectives, hlo
from valkyrie.models.layers import projections
from valkyrie.models.lora import Lora
from valkyrie.models.matrices import products
from valkyrie.models.quantization import Quantization
from valkyrie.models.sites import Sites
from valkyrie.sharding import ambient

NARROW = functools.partial(Quantization, bfloat16_gradients=True)
FLOAT8 = functools.partial(Quantization, dtype='float8_e4m3fn')
KINDS = [pytest.param(Quantization, id='int8'), pytest.param(FLOAT8, id='float8')]


def rounded(x, axis, kind=Quantization):
  """x to 255 steps from the largest to its negative, or to float8, along an axis; numpy."""
  largest = np.max(np.abs(x), axis, keepdims=True)
  if kind is FLOAT8:
    return (x * (448 / largest)).astype(ml_dtypes.float8_e4m3fn).astype(x.dtype) * largest / 448
  step = largest / 127
  return np.rint(x / step) * step


def product(x, ws, kind=Quantization):
  """The products of x with all ws, as those of a module `mlp`."""

  class OfModule(hk.Module):
    def __call__(self):
      with hk.custom_getter(kind().getter):
        weights = projections(x, (None, None), **{f'w{n}': w.shape[1] for n, w in enumerate(ws)})
        return jnp.concatenate(products(x, weights), axis=-1)

  params = {'mlp': {f'w{n}': w for n, w in enumerate(ws)}}
  return hk.transform(lambda: OfModule('mlp')()).apply(params, None)  # noqa: PLW0108


@pytest.mark.parametrize('kind', KINDS)
def test_a_product_and_its_gradients_are_those_of_rounded_numbers(kind):
  random = np.random.default_rng(0)
  x, g = random.normal(size=(3, 5, 24)), random.normal(size=(3, 5, 20))
  # Tokens and features of very different sizes: one scale of all would round most of them to 0.
  x *= 10.0 ** random.uniform(-4, 4, (3, 5, 1))
  ws = [random.normal(size=(24, n)) * 10.0 ** random.uniform(-4, 4, n) for n in (12, 8)]
  with jax.enable_x64(True):

    @jax.jit
    def both(x, ws, g):
      y, back = jax.vjp(functools.partial(product, kind=kind), x, ws)
      return y, back(g)

    y, (dx, dws) = jax.device_get(both(x, ws, g))
  w = np.concatenate([rounded(w, 0, kind) for w in ws], axis=1)
  scales = np.max(np.abs(np.concatenate(ws, axis=1)), 0) / (448 if kind is FLOAT8 else 127)

  def close(found, expected, size):
    np.testing.assert_allclose(found / size, expected / size, rtol=0, atol=1e-12)

  close(y, rounded(x, 2, kind) @ w, np.abs(x).max(2, keepdims=True) * np.abs(w).max(0))
  expected = rounded(g * scales, 2, kind) @ (w / scales).T
  close(dx, expected, np.abs(expected).max(2, keepdims=True))
  close(np.concatenate(dws, 1), np.einsum('bti,bto->io', x, g), np.abs(x).max())


@pytest.mark.parametrize('kind', KINDS)
def test_rounding_hides_no_number_that_is_not_finite_and_zeros_stay(kind):
  x = np.ones((4, 6), np.float32)
  x[1, 2], x[2, 3], x[3] = np.nan, -np.inf, 0
  y = product(jnp.asarray(x), [jnp.eye(6)], kind)
  np.testing.assert_array_equal(np.isfinite(y).any(1), [True, False, False, True])
  # 1 / 448 is rounded twice, in the scales of both factors.
  np.testing.assert_allclose(y[0], 1, rtol=2**-22 if kind is FLOAT8 else 1e-7)
  np.testing.assert_array_equal(y[3], 0)


def dots(jaxpr):
  """The dtypes of the factors of every product."""
  found = [e for e in equations(jaxpr) if e.primitive.name == 'dot_general']
  return [tuple(v.aval.dtype.name for v in e.invars) for e in found]


@functools.cache
def program(remat_policy, quantization=Quantization):
  """The jaxpr of a gradient of one layer."""
  model = tiny.model((tiny.attention,), 1, quantization=quantization, remat_policy=remat_policy)
  params, carry = jax.eval_shape(lambda: model.init(jax.random.key(0), 2))
  batch = tiny.batch((7, 8))

  def loss(params, carry):
    return jnp.sum(model.apply(params, carry, batch.inputs, *batch[3:])[0].hidden)

  return jax.make_jaxpr(jax.grad(loss))(params, carry).jaxpr


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('policy, products', [(None, 8), ('products', 8), ('nothing', 11)])
def test_a_policy_that_saves_products_saves_those_of_8_bits_in_the_dtype_of_activations(
  policy, products, kind
):
  """Four in each pass: query, key and value; out; gate and hidden; and out, which none repeats."""
  jaxpr = program(policy, kind)
  assert dots(jaxpr).count((kind().dtype,) * 2) == products
  saved = [v.aval for e in equations(jaxpr) if e.primitive.name == 'scan' for v in e.outvars]
  of_tokens = {aval.dtype.name for aval in saved if aval.shape[1:2] == (2 * 15,)}
  assert of_tokens == ({'float32'} if policy != 'nothing' else set())


def hidden(model, params, batch, cuts=()):
  """The features of a batch that is read in chunks."""
  carry, found = model.initial_carry(len(batch.inputs)), []
  apply = jax.jit(model.apply)
  for begin, end in zip((0, *cuts), (*cuts, batch.inputs.shape[1]), strict=True):
    part = tiny.cut(batch, begin, end)
    features, carry = apply(params, carry, part.inputs, *part[3:])
    found.append(features.hidden)
  return np.concatenate(found, axis=1)


@pytest.mark.parametrize('kind', KINDS)
def test_no_token_depends_on_later_ones_or_on_the_cuts_or_on_its_neighbors(kind):
  with jax.enable_x64(True):
    options = {'layers': 1, 'compute_dtype': 'float64'}
    model = tiny.model(quantization=kind, **options)
    params, _ = tiny.init(model, 2)
    # A later token of another size than all others would change the scale of a whole tensor.
    params['model']['embedding'] = params['model']['embedding'].at[7].multiply(50)
    batch = tiny.batch((9, 15))
    inputs = np.where(batch.inputs == 7, 8, batch.inputs)
    batch = batch._replace(inputs=inputs)
    expected = hidden(model, params, batch)
    plain = hidden(tiny.model(**options), params, batch)
    assert 1e-4 < np.abs(expected - plain).max() < 0.5
    inputs = np.where(np.arange(24) == 20, 7, inputs)
    changed = hidden(model, params, batch._replace(inputs=inputs))
    np.testing.assert_array_equal(changed[:, :20], expected[:, :20])
    assert np.abs(changed[:, 20:] - expected[:, 20:]).max() > 0.01
    close = functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-10)
    close(hidden(model, params, batch, cuts=(8, 16)), expected)
    close(hidden(model, params, tiny.cut(batch, 9, 24)), expected[:, 9:])


def of_layout(name, **options):
  """(gradient, carry, sums) of a step in float64."""
  options = {'quantization': Quantization, 'mixers': (tiny.attention,), 'layers': 1, **options}
  return gradients(name, 'float64', **options)[0]


@pytest.mark.parametrize('kind', KINDS)
def test_a_layout_changes_no_loss_no_gradient_and_no_carry(kind):
  """Parts of a weight along its inputs share the scales of the whole."""
  for name in ('fsdp', 'tensor2d'):
    assert_equal(of_layout(name, quantization=kind), of_layout('single', quantization=kind))


def test_float8_is_for_gpus_and_cpus():
  FLOAT8()
  with ambient.within(devices=[types.SimpleNamespace(platform='gpu')]):
    FLOAT8()
  with ambient.within(devices=[types.SimpleNamespace(platform='tpu')]):
    Quantization()
    with pytest.raises(ConfigurationError, match=r"slower than bfloat16 on TPUs.*Use 'int8'\."):
      FLOAT8()


def test_gradients_that_are_sent_in_bfloat16_are_near():
  expected, _, _ = of_layout('single')
  found, _, _ = of_layout('fsdp', quantization=NARROW)
  error = optax.tree.norm(optax.tree.sub(found, expected)) / optax.tree.norm(expected)
  assert 1e-4 < error < 0.01


def test_layers_gather_matrices_in_int8_and_once_if_they_are_saved():
  layout = layout_of('fsdp')
  model = tiny.model((tiny.attention,), 1, quantization=NARROW, remat_policy='weights')
  params, carry = jax.eval_shape(lambda: model.init(jax.random.key(0), 8))
  state = tiny.shardings(layout, model, params, carry)
  shardings = state['params'], state['carry'], layout.batch_sharding()
  step = layout.jit(of_step(model, backprop_chunks=1), in_shardings=shardings)
  compiled = step.lower(params, carry, tiny.batch((8,), rows=8)).compile()
  sent = collectives.by_kind(collectives.list_collectives(hlo.parse(compiled.as_text())))

  def split(in_layers):
    return sum(
      leaf.size
      for module, group in params.items()
      for name, leaf in group.items()
      if ('layers/' in module) == in_layers and any(state['params'][module][name].spec)
    )

  # Two matrices are split along their 16 outputs, whose scales are gathered with them.
  of_layer = split(in_layers=True) + 2 * 16 * 4
  assert sent['all-gather'] == 7 * (of_layer + 4 * split(in_layers=False)) // 8


@pytest.mark.parametrize(
  'attempt, message',
  [
    (
      lambda: tiny.model(quantization=Quantization, lora=Lora),
      r'excludes adapters and sites\. Set LanguageModel\.lora = None and LanguageModel\.sites = N',
    ),
    (
      lambda: tiny.model(
        quantization=Quantization, sites=functools.partial(Sites, components=(('.', 2),))
      ),
      'excludes adapters and sites',
    ),
  ],
)
def test_what_does_not_fit_is_refused(attempt, message):
  with pytest.raises(ConfigurationError, match=message) as caught:
    attempt()
  assert caught.value.exit_code == 78
