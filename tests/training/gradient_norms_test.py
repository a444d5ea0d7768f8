"""Norms of gradients by part and by layer, and the program of a step without them."""

import jax
import jax.numpy as jnp
import numpy as np
import tiny

from valkyrie.models.parts import sums_of_parts
from valkyrie.training import gradient_norms
from valkyrie.training.curriculum import Curriculum, Phase
from valkyrie.training.optimizers import Optimizer
from valkyrie.training.train_state import initial_state
from valkyrie.training.train_step import make_train_step

PHASE = Phase(chunk_size=6, chunks=1, backprop_chunks=1)


def test_layers_are_counted_from_the_embedding_through_blocks_and_stacks():
  random = np.random.default_rng(0)
  shapes = {
    'model': (5,),
    'model/upper_layers/block_1/~/s5': (1, 3),
    'model/upper_layers/block_0': (1, 2),
    'model/layers/block_0/~/s5': (2, 3),
    'model/layers/block_0/norm': (2, 4, 2),
    'model/layers/block_1/~/s5': (2, 7),
    'teacher/layers/block_0': (2, 2),
  }
  gradient = {module: {'w': random.normal(size=shape)} for module, shape in shapes.items()}
  order = [('layers', 0, 0), ('layers', 0, 1), ('layers', 1, 0), ('layers', 1, 1)]
  order += [('upper_layers', 0, 0), ('upper_layers', 0, 1)]
  expected = {}
  for layer, (stack, repeat, block) in enumerate(order):
    start = f'model/{stack}/block_{block}'
    inside = [group['w'][repeat].ravel() for name, group in gradient.items() if start in name]
    expected[f'layers/{layer}'] = np.linalg.norm(np.concatenate(inside))
  found = gradient_norms.by_part_and_layer(gradient)
  parts = gradient_norms.by_part(gradient)
  assert list(found) == [*parts, *expected]
  for name, norm in expected.items():
    np.testing.assert_allclose(found[name], norm, rtol=1e-5)


def test_only_a_step_that_asks_for_norms_by_layer_computes_them():
  model = tiny.model(mixers=(tiny.s5,))
  optimizer = Optimizer(learning_rate=0.01, warmup_steps=2, train_steps=20)
  state = jax.eval_shape(lambda: initial_state(model, optimizer, 0, 2))

  def lowered(**options):
    curriculum = Curriculum([PHASE])
    step = make_train_step(
      model, optimizer, curriculum, PHASE, seed=0, remat_chunks=False, **options
    )
    return jax.jit(step).lower(state, tiny.batch((3, 3)))

  def of_parts_alone(gradient):
    """What a step has computed since version 0.1."""
    squares = sums_of_parts(gradient, lambda leaf: jnp.sum(jnp.square(leaf)))
    return {part: jnp.sqrt(total) for part, total in squares.items()}

  usual = lowered()
  with_layers = lowered(norms=gradient_norms.by_part_and_layer)
  assert usual.as_text() == lowered(norms=of_parts_alone).as_text()
  found = [set(one.out_info[1].part_norms) for one in (usual, with_layers)]
  assert found[1] - found[0] == {'layers/0', 'layers/1'}
