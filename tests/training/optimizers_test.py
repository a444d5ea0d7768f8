"""Optimizers: any algorithm of optax on stacked layers, groups, schedules, and what is refused."""

import inspect
import math
from typing import Any

import gin
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from valkyrie.config.load import load_gin
from valkyrie.errors import ConfigurationError
from valkyrie.models.declarations import Kind
from valkyrie.training.algorithms import nature
from valkyrie.training.curriculum import Phase
from valkyrie.training.optimizers import Group, Optimizer, recurrence_group

LAYERS = 3
SHAPES = {'w': (LAYERS, 8, 6), 'v': (LAYERS, 6), 'embedding': (10, 8), 'norm': (8,)}
KINDS = {
  'w': Kind(True, stacked=1),
  'v': Kind(False, stacked=1),
  'embedding': Kind(True),
  'norm': Kind(False),
}


def draw(seed, scale=1.0):
  random = np.random.default_rng(seed)
  return {n: jnp.asarray(scale * random.normal(size=s), jnp.float32) for n, s in SHAPES.items()}


def trained(optimizer, params, kinds, gradients):
  state = optimizer.init(params, kinds)

  @jax.jit
  def step(params, state, gradient):
    return optimizer.update(gradient, state, params, jnp.float32(0.1), kinds)

  for gradient in gradients:
    params, state = step(params, state, gradient)
  return params, state


ALGORITHMS = [
  getattr(module, name)
  for module in (optax, optax.contrib)
  for name in dir(module)
  if inspect.isfunction(getattr(module, name))
  and not name.startswith(('_', 'scale_by'))
  and 'learning_rate' in inspect.signature(getattr(module, name)).parameters
]
WITHOUT_SCHEDULES = {'optimistic_adam', 'sm3'}  # optax itself takes only one rate for all steps
REFUSED = {
  'dpsgd', 'lbfgs', 'momo', 'momo_adam', 'noisy_sgd', 'polyak_sgd', 'rprop', 'schedule_free',
  'schedule_free_adamw', 'schedule_free_sgd', 'sophia',
}  # fmt: skip


@pytest.mark.parametrize('algorithm', ALGORITHMS, ids=lambda algorithm: algorithm.__name__)
def test_every_optimizer_of_optax_takes_the_steps_that_it_takes_in_optax(algorithm):
  """Of a group with a scale, at rates that change; or it is refused by name."""
  if algorithm.__name__ in REFUSED:
    with pytest.raises(ConfigurationError, match=rf'^(The steps of )?{algorithm.__name__} '):
      Optimizer(0.1, 0, 10, algorithm)
    return
  group = Group('w', learning_rate_scale=0.5, algorithm=algorithm)
  optimizer = Optimizer(2.0, 4, 20, groups=[group], clip_norm=math.inf)
  random = np.random.default_rng(0)
  params = {'w1': random.normal(size=(4, 3)), 'w2': 0.01 * random.normal(size=(3, 5))}
  params = {name: jnp.asarray(leaf, jnp.float32) for name, leaf in params.items()}
  kinds = dict.fromkeys(params, Kind(True))
  noise = [jax.tree.map(lambda p: random.normal(size=p.shape), params) for _ in range(20)]
  gradients = [
    jax.tree.map(lambda n, m: jnp.asarray(n + m, jnp.float32), one, noise[0]) for one in noise
  ]

  def rate(count):
    return optimizer.learning_rate(jnp.int32(2) if constant else count)

  constant = algorithm.__name__ in WITHOUT_SCHEDULES
  direct = algorithm(learning_rate=0.5 * float(rate(0)) if constant else lambda n: 0.5 * rate(n))
  update = jax.jit(direct.update)
  ours = jax.jit(lambda g, s, p, r: optimizer.update(g, s, p, r, kinds))
  expected: Any = params
  state = direct.init(params)
  found = params
  our_state = optimizer.init(params, kinds)
  for count, gradient in enumerate(gradients):
    steps, state = update(gradient, state, expected)
    expected = optax.apply_updates(expected, steps)
    found, our_state = ours(gradient, our_state, found, rate(jnp.int32(count)))
  for name, leaf in expected.items():
    moved = jnp.linalg.norm(leaf - params[name])
    assert jnp.linalg.norm(found[name] - leaf) <= 3e-3 * moved, name


def test_the_optimizers_whose_steps_are_not_proportional_to_the_rate():
  inside = [a.__name__ for a in ALGORITHMS if a.__name__ not in REFUSED and not nature(a)[1]]
  assert inside == ['fromage', 'lars', 'cocob', 'dadapt_adamw', 'madgrad', 'prodigy']


def split(tree):
  """The same parameters, each layer of a stack on its own."""
  return {
    f'{name}{n}' if KINDS[name].stacked else name: layer
    for name, leaf in tree.items()
    for n, layer in enumerate(leaf if KINDS[name].stacked else [leaf])
  }


@pytest.mark.parametrize(
  'algorithm',
  [optax.adamw, optax.lamb, optax.adafactor, optax.contrib.muon, optax.contrib.prodigy, optax.adan],
  ids=lambda algorithm: algorithm.__name__,
)
def test_stacked_layers_learn_as_layers_on_their_own(algorithm):
  optimizer = Optimizer(0.1, 0, 10, algorithm, algorithm, clip_norm=math.inf)
  params, gradients = draw(0), [draw(seed, 3.0) for seed in range(1, 5)]
  found, _ = trained(optimizer, params, KINDS, gradients)
  kinds = {name: Kind(leaf.ndim > 1) for name, leaf in split(params).items()}
  expected, _ = trained(optimizer, split(params), kinds, [*map(split, gradients)])
  for name, leaf in split(found).items():
    np.testing.assert_allclose(leaf, expected[name], rtol=2e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize('algorithm', [optax.contrib.muon, optax.lamb])
def test_a_parameter_with_more_dimensions_is_a_stack_of_matrices(algorithm):
  """S5's C, [layers, 2, D, P] in a stack, and the blocks of a gate, [heads, W, W], outside one."""
  random = np.random.default_rng(0)
  shapes = {'c': (LAYERS, 2, 6, 5), 'gate': (4, 5, 5)}
  kinds = {'c': Kind(True, stacked=1), 'gate': Kind(True)}
  params, *gradients = (
    {name: jnp.asarray(random.normal(size=s), jnp.float32) for name, s in shapes.items()}
    for _ in range(3)
  )
  optimizer = Optimizer(0.1, 0, 10, algorithm, clip_norm=math.inf)

  def matrices(tree):
    return {
      f'{name}{n}': matrix
      for name, leaf in tree.items()
      for n, matrix in enumerate(leaf.reshape(-1, *leaf.shape[-2:]))
    }

  found, _ = trained(optimizer, params, kinds, gradients)
  apart = dict.fromkeys(matrices(params), Kind(True))
  expected, _ = trained(optimizer, matrices(params), apart, [*map(matrices, gradients)])
  for name, matrix in matrices(found).items():
    np.testing.assert_allclose(matrix, expected[name], rtol=2e-4, atol=1e-5, err_msg=name)


def test_which_algorithms_act_on_layers():
  alike = (optax.nadam, optax.yogi, optax.contrib.prodigy, optax.contrib.madgrad)
  assert not any(nature(algorithm).by_layers for algorithm in alike)
  assert all(nature(a).by_layers for a in (optax.lamb, optax.contrib.muon, optax.fromage))


@pytest.mark.parametrize(
  ('algorithm', 'message'),
  [
    (optax.lbfgs, 'needs more than gradients and parameters'),
    (optax.contrib.momo_adam, 'needs more than gradients and parameters'),
    (optax.polyak_sgd, 'cannot be created from only a learning_rate'),
    (optax.contrib.schedule_free_adamw, 'evaluates other parameters than those that it trains'),
  ],
)
def test_algorithms_that_are_refused(algorithm, message):
  with pytest.raises(ConfigurationError, match=message):
    Optimizer(0.1, 0, 10, algorithm)


def test_groups():
  groups = (
    Group('^embedding$', learning_rate_scale=0.0),
    Group('^w$', learning_rate_scale=0.5, algorithm=optax.sgd),
    Group('', decay=False),
  )
  optimizer = Optimizer(0.1, 0, 10, optax.adamw, optax.adam, groups, clip_norm=math.inf)
  params, gradients = draw(0), [draw(1)]
  moved, state = trained(optimizer, params, KINDS, gradients)
  np.testing.assert_array_equal(moved['embedding'], params['embedding'])
  np.testing.assert_allclose(moved['w'], params['w'] - 0.05 * gradients[0]['w'], rtol=1e-5)
  expected = params['v'] - 0.1 * jnp.sign(gradients[0]['v'])
  np.testing.assert_allclose(moved['v'], expected, rtol=1e-4)
  shapes = [leaf.shape for leaf in jax.tree.leaves(state)]
  assert SHAPES['embedding'] not in shapes and SHAPES['w'] not in shapes  # no moments
  assert shapes.count(SHAPES['v']) == shapes.count(SHAPES['norm']) == 2


def test_a_group_without_parameters_is_refused():
  groups = [recurrence_group(), Group('^embeding$')]  # the first may be empty
  with pytest.raises(ConfigurationError, match=r'none of the 1 .* Did you mean embedding\?'):
    Optimizer(1.0, 0, 10, groups=groups).init(
      {'embedding': jnp.zeros((2, 2))}, {'embedding': Kind(True)}
    )


def test_a_group_whose_parameters_belong_to_earlier_ones_is_refused():
  """A term's groups may take all parameters, and the recurrences' group may be empty."""
  params, kinds = {'embedding': jnp.zeros((2, 2))}, {'embedding': Kind(True)}
  optimizer = Optimizer(1.0, 0, 10, groups=[Group('emb')])
  optimizer.preceded_by([Group(''), Group('emb')]).init(params, kinds)
  groups = [Group('emb'), recurrence_group('bedd'), Group('embedding', learning_rate_scale=0.0)]
  with pytest.raises(ConfigurationError, match="'embedding', but earlier ones choose all 1 paths"):
    Optimizer(1.0, 0, 10, groups=groups).init(params, kinds)


def test_a_group_of_recurrences():
  group = recurrence_group()
  assert (group.learning_rate_scale, group.decay) == (0.25, False)
  with pytest.raises(ConfigurationError, match='not a regular expression'):
    Group('(')
  with pytest.raises(ConfigurationError, match='is out of range'):
    Group('a', learning_rate_scale=-1.0)


def rates(**options):
  optimizer = Optimizer(2.0, warmup_steps=10, train_steps=110, **options)
  return [float(optimizer.learning_rate(jnp.int32(n))) / 2 for n in (0, 5, 10, 60, 90, 100, 110)]


@pytest.mark.parametrize(
  ('options', 'expected'),
  [
    ({'schedule': 'constant'}, [0.1, 0.55, 1, 1, 1, 1, 1]),
    ({'schedule': 'linear'}, [0.1, 0.55, 1, 0.55, 0.28, 0.19, 0.1]),
    (
      {'schedule': 'inverse_sqrt'},
      [0.1, 0.55, 1, *(math.sqrt(10 / n) for n in (60, 90, 100, 110))],
    ),
    ({'schedule': 'wsd'}, [0.1, 0.55, 1, 1, 1 - 0.9 * 2 / 22, 1 - 0.9 * 12 / 22, 0.1]),
    (
      {'schedule': optax.polynomial_schedule(1.0, 0.0, 2, 100)},
      [0.1, 0.55, 1, 0.25, 0.04, 0.01, 0],
    ),
  ],
)
def test_schedules(options, expected):
  np.testing.assert_allclose(rates(**options), expected, rtol=1e-5, atol=1e-7)


def test_schedules_that_are_refused():
  with pytest.raises(ConfigurationError, match=r"'cosin' is unknown\. Use one of constant, linear"):
    rates(schedule='cosin')
  with pytest.raises(ConfigurationError, match='cooldown=0'):
    rates(schedule='wsd', cooldown=0)
  with pytest.raises(ConfigurationError, match=r'needs parentheses: @polynomial_schedule\(\)'):
    rates(schedule=optax.polynomial_schedule)
  with pytest.raises(ConfigurationError, match=r'an array of shape \(3,\) for a step'):
    rates(schedule=lambda step: jnp.zeros(3) + step)


# Public report google-deepmind/optax#1752: clipping at a norm of 0.
@pytest.mark.parametrize('value', [-1.0, -1e-9, math.nan, -math.inf])
def test_numbers_that_would_train_backwards_are_refused(value):
  for name in ('learning_rate', 'warmup_steps', 'final_learning_rate_scale', 'clip_norm'):
    options = {'learning_rate': 0.1, 'warmup_steps': 0, 'train_steps': 10, name: value}
    with pytest.raises(ConfigurationError, match=rf'Optimizer\.{name} = .* is out of range'):
      Optimizer(**options)
  with pytest.raises(ConfigurationError, match=r'Optimizer\.clip_norm = 0 .*3.4e38\] or inf'):
    Optimizer(0.1, 0, 10, clip_norm=0)  # 0 / 0 for a gradient of zero
  with pytest.raises(ConfigurationError, match=r'Phase\.learning_rate_scale = .* in \[0, 3.4e38\]'):
    Phase(8, 1, 1, learning_rate_scale=value)
  with pytest.raises(ConfigurationError, match=r'Group\.learning_rate_scale = .* in \[0, 3.4e38\]'):
    Group('w', learning_rate_scale=value)
  assert Optimizer(0.0, 0, 10, clip_norm=math.inf)


def test_gin_files_name_any_function_of_optax(tmp_path):
  file = tmp_path / 'a.gin'
  file.write_text("""
Optimizer.learning_rate = 1.0
Optimizer.warmup_steps = 0
Optimizer.train_steps = 9
Optimizer.algorithm = @optax.contrib.muon
optax.contrib.muon.beta = 0.5
Optimizer.vector_algorithm = @optax.nadam
Optimizer.schedule = @optax.polynomial_schedule()
optax.polynomial_schedule.init_value = 1.0
optax.polynomial_schedule.end_value = 0.0
optax.polynomial_schedule.power = 1
optax.polynomial_schedule.transition_steps = 8
""")
  gin.clear_config(clear_constants=True)
  load_gin([str(file)], modules=['valkyrie.training.optimizers'])
  optimizer = gin.get_configurable(Optimizer)()
  assert float(optimizer.learning_rate(jnp.int32(2))) == 0.75
  file.write_text('Optimizer.algorithm = @optax.nadamn')
  with pytest.raises(ConfigurationError, match=r"no configurable 'optax\.nadamn'"):
    load_gin([str(file)], modules=['valkyrie.training.optimizers'])
  gin.clear_config(clear_constants=True)
