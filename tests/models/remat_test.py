"""What a loop over layers saves for the backward pass."""

import functools

import haiku as hk
import jax
from jax.ad_checkpoint import print_saved_residuals
import jax.numpy as jnp
import pytest
import tiny

from valkyrie.models import block
from valkyrie.models.block import Block
from valkyrie.models.recurrence.gated import GatedRecurrence
from valkyrie.models.remat import POLICIES

LAYERS = 2
TIME = 24
STATES = 12
s5 = functools.partial(tiny.s5, state_size=STATES)
mixers = (functools.partial(GatedRecurrence, s5, width=40),)


def stack_loops():
  """The loops over the layers of a gradient: the scan forwards, and the one backwards."""
  model = tiny.model(mixers, layers=LAYERS, remat_policy='products')
  params, carry = tiny.init(model, 2)
  batch = tiny.batch((7, TIME - 7))

  def loss(params):
    features, _ = model.apply(params, carry, batch.inputs, batch.positions, batch.segment_ids)
    return jnp.sum(features.hidden)

  program = jax.make_jaxpr(jax.grad(loss))(params)
  scans = [equation for equation in program.eqns if equation.primitive.name == 'scan']
  return [scan for scan in scans if scan.params['length'] == LAYERS]


def shapes(variables):
  return [(variable.aval.dtype.name, variable.aval.shape) for variable in variables]


def test_a_loop_over_layers_saves_states_and_not_the_product_before_them():
  forwards, _ = stack_loops()
  saved = shapes(forwards.outvars)
  # Two parts of the states instead of the product before them, with both parts side by side.
  assert saved.count(('float32', (2, TIME, 2, STATES))) == 2
  assert ('float32', (2, 2 * TIME, 2 * STATES)) not in saved


@pytest.mark.parametrize('platform', ['cpu', 'gpu'])
@pytest.mark.parametrize(('norm', 'sums', 'products'), [('before', 3, 0), ('after', 0, 4)])
def test_layers_save_the_stream_instead_of_what_they_add_to_it(
  norm, sums, products, platform, capsys, monkeypatch
):
  """A norm after a mixer, or after an MLP, reads what is added. A GPU adds rows."""
  monkeypatch.setattr(block, 'platform', lambda: platform)
  width = 8

  def read(x):
    for name in ('first', 'second'):
      layer = Block(mixers, mlp_width=20, norm=norm, name=name)
      carry = layer.initial_carry(1, x.dtype)
      places = jnp.arange(TIME)[None]
      x, _ = layer(x, carry, positions=places, segment_ids=jnp.ones_like(places))
    return x

  model = hk.transform(read)
  x = jnp.ones((1, TIME, width))
  params = model.init(jax.random.key(0), x)

  def loss(params, x):
    y = model.apply(params, None, x)
    return jnp.sum(y)

  print_saved_residuals(jax.checkpoint(loss, policy=POLICIES['products']), params, x)
  lines = capsys.readouterr().out.splitlines()
  shapes = (f'f32[{TIME},{width}]', f'f32[1,{TIME},{width}]')
  wide = [line for line in lines if line.startswith(shapes) and 'argument' not in line]
  named = [line for line in wide if "'stream'" in line]
  assert (len(named), len(wide) - len(named)) == (sums, products)
