"""Products whose weights are split in two dimensions: their results, and what they send."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from valkyrie.lab.certificates import collectives, hlo
from valkyrie.lab.certificates.collectives import mesh_axes
from valkyrie.models import language_model
from valkyrie.models.attention.longformer import LongformerAttention
from valkyrie.models.block import Block
from valkyrie.models.matrices import Adapted, products
from valkyrie.models.precision import matmul
from valkyrie.models.recurrence.gated import GatedRecurrence
from valkyrie.sharding.partitioner import Partitioner
from valkyrie.sharding.split_products import split_product
from valkyrie.training import tbptt

RULES = {
  'batch': 'z',
  'embed': ('y', 'z'),
  'activation': ('y', 'x'),
  'heads': 'x',
  'mlp': 'x',
  'state': 'x',
  'vocabulary': 'x',
}


def layout(**rules):
  return Partitioner((('x', 2), ('y', 2), ('z', 2)), tuple((RULES | rules).items()), manual=False)


def with_gradients(f):
  return lambda *arguments: jax.value_and_grad(lambda arguments: jnp.sum(jnp.sin(f(*arguments))))(
    arguments
  )


@pytest.mark.parametrize(
  'options, rules',
  [
    ({}, {}),
    ({'features': 6}, {'embed': 'y'}),  # divides over y, and not over both
    ({'outputs': 10}, {}),
    ({'batch': 3}, {}),
    ({'inputs': 1}, {}),
    ({'rows': (0, 1)}, {}),
    ({}, {'embed': ('z', 'y')}),
    ({}, {'embed': None}),
    ({}, {'mlp': None}),
  ],
)
def test_a_split_product_and_its_gradients_are_those_of_one_device(options, rules):
  batch, features, outputs, inputs, rows = (
    options.get(name, default)
    for name, default in (
      ('batch', 4),
      ('features', 8),
      ('outputs', 12),
      ('inputs', 0),
      ('rows', (0, 0)),
    )
  )
  random = np.random.default_rng(0)
  with jax.enable_x64(True):
    x = random.normal(size=(batch, 5, features))
    w = random.normal(size=(features, outputs) if inputs == 0 else (outputs, features))

    def product(x, w):
      out = matmul(x, w if inputs == 0 else w.T)
      return jnp.swapaxes(out, 0, 1) if rows[1] else out

    def split(x, w):
      axes = ('embed', 'mlp') if inputs == 0 else ('mlp', 'embed')
      return split_product(product, x, w, axes, inputs=inputs, rows=rows)

    found = layout(**rules).jit(with_gradients(split))(x, w)
    expected = jax.jit(with_gradients(product))(x, w)
    jax.tree.map(
      functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-12), found, expected
    )


def test_adapters_of_split_products_change_nothing():
  random = np.random.default_rng(0)
  with jax.enable_x64(True):
    x, whole, plain, down, up = (
      random.normal(size=size) for size in ((4, 5, 8), (8, 12), (8, 4), (8, 2), (2, 12))
    )

    def product(x, whole, plain, down, up):
      adapted = Adapted(whole, down, up)
      return jnp.concatenate(products(x, [[adapted, plain], plain], ('embed', 'mlp')), axis=-1)

    arguments = x, whole, plain, down, up
    found = layout().jit(with_gradients(product))(*arguments)
    expected = jax.jit(with_gradients(product))(*arguments)
    jax.tree.map(
      functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-12), found, expected
    )


def test_a_step_sends_the_features_of_products_and_little_else():
  """The products of a layer are (inputs, outputs); the rest is norms, permutations, embeddings."""
  rows, time, width, mlp, inner, states, layers = 4, 64, 128, 192, 160, 32, 2
  recurrence = functools.partial(
    GatedRecurrence,
    recurrence=functools.partial(tiny.s5, state_size=states, activation='linear'),
    width=inner,
  )
  attention = functools.partial(LongformerAttention, heads=4, head_width=32, window=8)
  model = language_model.transform(
    functools.partial(
      language_model.LanguageModel,
      vocabulary_size=128,
      d_model=width,
      layers=layers,
      pattern=(functools.partial(Block, mixers=(recurrence, attention), mlp_width=mlp),),
    )
  )
  of_mlp = [(width, 2 * mlp), (mlp, width)]
  of_attention = [(width, 3 * width), (width, width)]
  of_recurrence = [(width, 2 * inner), (inner, 2 * states), (2 * states, inner), (inner, width)]
  products = layers * [*of_mlp, *of_attention, *of_recurrence] + [(width, 128)]
  # Forwards and backwards, and the inputs once more for the gradient of the weights.
  features = sum(3 * inputs + 2 * outputs for inputs, outputs in products)
  by_hand = rows // 2 * time * features * 4 / 2**2  # in float32, over two devices an axis

  split = layout()
  params, carry = jax.eval_shape(lambda: model.init(jax.random.key(0), rows))
  batch = tiny.batch((time,), rows=rows)
  shardings = tiny.shardings(split, model, params, carry)

  def gradients(params, carry, batch):
    total = jnp.sum(batch.weights)
    return tbptt.gradients(
      model, params, carry, batch, total, chunk_size=time, backprop_chunks=1, remat_chunks=False
    )

  placed = shardings['params'], shardings['carry']
  step = split.jit(
    gradients, in_shardings=(*placed, split.batch_sharding()), out_shardings=(*placed, None)
  )
  sent = collectives.list_collectives(
    hlo.parse(step.lower(params, carry, batch).compile().as_text())
  )
  between = sum(c.bytes * c.times for c in sent if mesh_axes(c, split.mesh) != ('z',))
  assert by_hand <= between <= 1.3 * by_hand
