"""What a loop over layers saves for the backward pass."""

import functools

import jax
import jax.numpy as jnp
import tiny

from valkyrie.models.recurrence.gated import GatedRecurrence

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
