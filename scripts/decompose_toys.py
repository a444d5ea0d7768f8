"""Toys with known answers for the decomposition: superposition, and a residual MLP.

A toy model of superposition (Elhage et al. 2022) stores features in fewer dimensions, and reads
them back by the transposed matrix: relu(x W (I) Wᵀ + b). Its parts are the rows of W, and so should
its components be. A residual MLP (Bushnaq, Braun & Sharkey 2025, arXiv 2506.20790, section 3.3)
computes x + relu(x) of more features than it has neurons; each feature should have one component in
the matrix that leads to the neurons.

The forward pass, the data, the target's training and the mean squared error are here; all else is
what decomposes language models. Of several seeds, that with the smallest loss is the answer. A
target that has not learned all features ends the program with 65.

    PYTHONPATH=. python scripts/decompose_toys.py 5-2 --seeds 0,1,2,3,4
"""

import argparse
from collections.abc import Mapping, Sequence
import dataclasses
import functools
import math
import sys
import time
from typing import Any, ClassVar, NamedTuple

import haiku as hk
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax
from scipy.optimize import linear_sum_assignment

from valkyrie.decomposition import importance, masks
from valkyrie.decomposition.masks import Stochastic, Tokens
from valkyrie.decomposition.objective import faithful, unfaithfulness
from valkyrie.errors import DataError, UsageError, ValkyrieError
from valkyrie.models.language_model import created
from valkyrie.models.layers import parameter, project
from valkyrie.models.sites import Site, Sites, U, V, sites_of
from valkyrie.types import Array, Params

FUNCTIONS = importance.PerComponent(width=16)
LOSSES = (Stochastic(live='all'), Stochastic(live='each'))
CLIP_NORM = 0.01
FAITHFUL_STEPS, FAITHFUL_RATE = 200, 0.01
STEPS_OF_A_CALL = 500
MODULE = 'layers/toy'
PROBE = 0.75
ALIVE = 0.1  # an importance above
TOLERANCE = 0.1  # of an importance of 0 or 1
VANISHING = 0.01  # of the mean row: a shorter part matches nothing


@dataclasses.dataclass(frozen=True)
class Toy:
  """A target, its data, and the settings of its decomposition.

  Attributes:
    features: F; each is on with `probability`.
    hidden: the dimensions between the two matrices.
    components: C of each site.
    minimality, exponent: the coefficient and the power of importances.
    rate, final_rate, steps, rows: the learning rate at first, its share at the end by a cosine, the
      steps, and the rows of a step that are not zero.
    target_rate, target_steps, target_rows: the same of the target's training.
    least: the mean cosine similarity of a success.
    published: the mean cosine similarity and the ratio of norms.
    alive: the number of components that should be alive, by site; those of other sites are free.
  """

  features: int
  hidden: int
  components: int
  minimality: float
  exponent: float
  steps: int
  rows: int
  target_rows: int
  least: float
  published: str
  alive: Mapping[str, int]
  rate: float = 1e-3
  final_rate: float = 0.0
  probability: float = 0.05
  target_steps: int = 10_000
  target_rate: float = 5e-3

  lowest: ClassVar[float] = 0.0  # value of a feature
  fixed: ClassVar[Sequence[str]] = ('identity', 'embedding')
  target_final_rate: ClassVar[float] = 1.0

  def layer(self, x: Array) -> Array:
    """The Haiku function whose matrices are decomposed, [B, 1, D] -> [B, 1, D]."""
    raise NotImplementedError

  def tied(self, params: Params) -> Params:
    """The parameters, those that others determine set by them."""
    return params

  def embedded(self, x: Array) -> tuple[Array, Array]:
    """(what the layer reads, the embedding [F, D])."""
    return x, jnp.eye(self.features)

  def labels(self, x: Array) -> Array:
    """What the target learns."""
    return x

  def __call__(self, x: Array, given: Mapping[str, masks.Masks]) -> tuple[Array, dict[str, Array]]:
    """The output [B, 1, F] with masks of sites, and the inputs of the sites [1, B, 1, D_in]."""
    sites = Sites((('.', self.components),))

    def layer(x, given):
      seen: dict[str, Array] = {}
      with hk.custom_getter(sites.getter('layers/', given, seen)):
        y = hk.to_module(self.layer)('toy')(x)
      return y, seen

    stream, embedding = self.embedded(x)
    stack = hk.layer_stack(1, with_per_layer_inputs=True, unroll=1, name='layers')
    y, seen = stack(layer)(stream, given)
    return y @ embedding.T, seen

  def batch(self, key: Array, rows: int) -> tuple[Array, Array]:
    """Rows with at least one feature and one row of zeros, [rows + 1, 1, F]; their weights.

    The weights make their mean that of rows of independent features, mostly zero.
    """
    p, zero = self.probability, (1 - self.probability) ** self.features
    keys = jax.random.split(key, 3)
    drawn = jax.random.uniform(keys[0], (rows, 1))
    first = jnp.floor(jnp.log1p(-drawn * (1 - zero)) / math.log1p(-p))
    number = jnp.arange(self.features)
    later = (number > first) & jax.random.bernoulli(keys[1], p, (rows, self.features))
    value = jax.random.uniform(keys[2], later.shape, minval=self.lowest)
    x = jnp.where((number == first) | later, value, 0.0)
    weights = jnp.append(jnp.full(rows, (1 - zero) / rows), zero)
    return jnp.append(x, jnp.zeros((1, self.features)), axis=0)[:, None], weights[:, None]


class Superposition(Toy):
  """relu(x W (I) Wᵀ + b); the components of Wᵀ are those of W, transposed."""

  def layer(self, x):
    (h,) = project(x, ('embed', 'mlp'), first=self.hidden)
    if 'identity' in self.alive:
      (h,) = project(h, ('mlp', 'mlp'), identity=self.hidden)
    (y,) = project(h, ('mlp', 'embed'), second=self.features)
    return jax.nn.relu(y + parameter('bias', (self.features,), jnp.zeros, axes=('norm',)))

  def tied(self, params):
    own = params[MODULE]
    flipped = functools.partial(jnp.swapaxes, axis1=1, axis2=2)
    found = dict(own, second=flipped(own['first']))
    found |= {'second' + V: flipped(own['first' + U]), 'second' + U: flipped(own['first' + V])}
    if 'identity' in own:
      found['identity'] = jnp.eye(self.hidden)[None]
    return {**params, MODULE: found}


class ResidualMLP(Toy):
  """(x E + relu(x E W_in) W_out) Eᵀ, for a random E of unit rows, which learns x + relu(x)."""

  lowest = -1.0
  target_final_rate = 0.0
  width: ClassVar[int] = 1000

  def layer(self, x):
    (h,) = project(x, ('embed', 'mlp'), first=self.hidden)
    (y,) = project(jax.nn.relu(h), ('mlp', 'embed'), second=x.shape[-1])
    return x + y

  def embedded(self, x):
    def unit(shape, dtype):
      rows = jax.random.normal(hk.next_rng_key(), shape, dtype)
      return rows / jnp.linalg.norm(rows, axis=-1, keepdims=True)

    shape = (self.features, self.width)
    embedding = parameter('embedding', shape, unit, axes=('vocabulary', 'embed'))
    return x @ embedding, embedding

  def labels(self, x):
    return x + jax.nn.relu(x)


_SMALL = {
  'features': 5, 'hidden': 2, 'components': 20, 'minimality': 3e-3, 'exponent': 1.0,
  'steps': 10_000, 'rows': 256, 'target_rows': 256, 'least': 0.995,
}  # fmt: skip
_LARGE = {
  'features': 40, 'hidden': 10, 'components': 200, 'minimality': 1e-4, 'exponent': 2.0,
  'steps': 10_000, 'rows': 512, 'target_rows': 2048, 'least': 0.98,
}  # fmt: skip
TOYS = {
  '5-2': Superposition(
    **_SMALL, published='1.000 ± 0.000, 0.993 ± 0.002', alive={'first': 5, 'second': 5}
  ),
  '5-2-identity': Superposition(
    **_SMALL,
    published='1.000 ± 0.000, 0.992 ± 0.010',
    alive={'first': 5, 'identity': 2, 'second': 5},
  ),
  '40-10': Superposition(
    **_LARGE, published='1.000 ± 0.000, 1.010 ± 0.007', alive={'first': 40, 'second': 40}
  ),
  '40-10-identity': Superposition(
    **_LARGE,
    published='1.000 ± 0.000, 1.031 ± 0.001',
    alive={'first': 40, 'identity': 10, 'second': 40},
  ),
  'residual': ResidualMLP(
    features=100, hidden=50, components=100, minimality=1e-5, exponent=2.0, probability=0.01,
    rate=2e-3, final_rate=1.0, steps=20_000, rows=512, target_rows=1024, target_rate=3e-3,
    target_steps=1000, least=0.95, published='one component a feature', alive={'first': 100},
  ),
}  # fmt: skip


class Model(NamedTuple):
  """A toy as pure functions."""

  toy: Toy
  init: Any
  apply: Any
  sites: Mapping[str, Site]

  def error(self, out: Array, expected: Array, weights: Array) -> Array:
    """The mean squared error of outputs [B, 1, F]."""
    return jnp.sum(weights * jnp.mean(jnp.square(out - expected), axis=-1))


def model_of(toy: Toy) -> Model:
  """The functions of a toy."""
  init, parameters = created(lambda: toy(jnp.zeros((1, 1, toy.features)), {}))
  return Model(toy, init, hk.without_apply_rng(hk.transform(toy)).apply, sites_of(parameters()))


# The target.


def trained(model: Model, seed: int, starts: int = 4) -> tuple[Params, float]:
  """The best of several targets, and its loss; the factors are left as they began."""
  toy = model.toy
  schedule = optax.cosine_decay_schedule(toy.target_rate, toy.target_steps, toy.target_final_rate)
  optimizer = optax.adamw(schedule, weight_decay=0.01)

  def learns(_, name, __):
    return name[-2:] not in (V, U) and name not in toy.fixed

  def loss(own, rest, x, weights):
    params = toy.tied(hk.data_structures.merge(own, rest))
    return model.error(model.apply(params, x, {})[0], toy.labels(x), weights)

  def train(key):
    own, rest = hk.data_structures.partition(learns, model.init(key))

    def step(carry, number):
      own, state = carry
      batch = toy.batch(jax.random.fold_in(key, number), toy.target_rows)
      value, slope = jax.value_and_grad(loss)(own, rest, *batch)
      updates, state = optimizer.update(slope, state, own)
      return (optax.apply_updates(own, updates), state), value

    (own, _), values = lax.scan(step, (own, optimizer.init(own)), jnp.arange(toy.target_steps))
    return toy.tied(hk.data_structures.merge(own, rest)), jnp.mean(values[-STEPS_OF_A_CALL:])

  params, losses = jax.jit(jax.vmap(train))(jax.random.split(jax.random.key(seed), starts))
  best = int(jnp.argmin(losses))
  return jax.tree.map(lambda leaf: leaf[best], params), float(losses[best])


def check_learned(outputs: np.ndarray) -> None:
  """Raises a DataError if a feature, on at PROBE, is not in the outputs [F, F] of these probes."""
  missing = [int(n) for n in np.flatnonzero(np.diag(outputs) < PROBE / 2)]
  if missing:
    raise DataError(
      f'The target has not learned the features {missing} of {len(outputs)}: no decomposition can '
      'find them. Train it from other starts: --target_seed=N.'
    )


# The decomposition.


def importances(model: Model, params: Params, inputs: Mapping[str, Array]) -> dict[str, Array]:
  """{path: logits [1, B, 1, C]}, of the inputs of the sites in the clean pass."""
  return {
    path: FUNCTIONS.logits(params[importance.MODULE], path, inputs[path], site.factors(params)[0])
    for path, site in model.sites.items()
  }


def losses(model: Model, params: Params, seed: Array, step: Array) -> dict[str, Array]:
  """All terms of the loss at a step, each with its coefficient."""
  toy, sites = model.toy, model.sites
  # The data do not depend on the seed: losses of seeds are compared.
  x, weights = toy.batch(jax.random.fold_in(jax.random.key(0), step), toy.rows)
  clean, inputs = model.apply(params, x, {})
  z = importances(model, params, inputs)
  low, high = jax.tree.map(importance.lower, z), jax.tree.map(importance.upper, z)
  rows = jnp.arange(len(x))
  tokens = Tokens(seed, rows, jnp.broadcast_to(step, (len(x), 1)))
  terms = {}
  for number, loss in enumerate(LOSSES):
    passes, total = loss.passes(sites), jnp.zeros(())
    for index, live in enumerate(passes):
      use = 2 * (1000 * number + index)
      routes = loss.routes(live, sites, use, tokens)
      sources = loss.sources([*routes], sites, use + 1, tokens)
      given = {path: masks.masks(low[path], sources[path], routes[path]) for path in routes}
      out, _ = model.apply(params, x, given)
      total += model.error(out, lax.stop_gradient(clean), weights) / len(passes)
    terms[loss.live] = loss.coefficient * total
  powers = [jnp.sum(importance.counted(g, toy.exponent), axis=(0, 3)) for g in high.values()]
  minimality = sum((jnp.sum(weights * power) for power in powers), jnp.zeros(()))
  return {
    **terms,
    'minimality': toy.minimality * minimality,
    'faithfulness': unfaithfulness(params, sites),
  }


def decomposer(model: Model, target: Params) -> Any:
  """A function of a seed -> (the parameters, the terms of the loss over the last steps)."""
  toy = model.toy
  schedule = optax.cosine_decay_schedule(toy.rate, toy.steps, toy.final_rate)

  def is_factor(_, name, __):
    return name[-2:] in (V, U)

  def learns(module, name, leaf):
    return module == importance.MODULE or is_factor(module, name, leaf)

  clip = optax.masked(
    optax.clip_by_global_norm(CLIP_NORM),
    lambda own: {m: {n: is_factor(m, n, None) for n in group} for m, group in own.items()},
  )
  optimizer = optax.chain(clip, optax.adam(schedule))
  matrices = hk.data_structures.filter(lambda *of: not learns(*of), target)
  merge = hk.data_structures.merge

  @jax.jit
  def start(seed):
    keys = jax.random.split(jax.random.key(seed))
    params = merge(model.init(keys[0]), matrices)
    params = faithful(params, model.sites, FAITHFUL_STEPS, FAITHFUL_RATE)
    params = {**params, **importance.initial(FUNCTIONS, model.sites, keys[1])}
    own = hk.data_structures.filter(learns, params)
    return own, optimizer.init(own)

  def loss(own, seed, step):
    terms = losses(model, toy.tied(merge(own, matrices)), seed, step)
    return sum(terms.values(), jnp.zeros(())), terms

  @jax.jit
  def steps(carry, seed, begin):
    def one(carry, step):
      own, state = carry
      slope, terms = jax.grad(loss, has_aux=True)(own, seed, step)
      updates, state = optimizer.update(slope, state, own)
      return (optax.apply_updates(own, updates), state), terms

    carry, terms = lax.scan(one, carry, begin + jnp.arange(STEPS_OF_A_CALL))
    return carry, jax.tree.map(jnp.mean, terms)

  def run(seed):
    carry, terms = start(seed), {}
    for begin in range(0, toy.steps, STEPS_OF_A_CALL):
      carry, terms = steps(carry, seed, begin)
    return toy.tied(merge(carry[0], matrices)), {name: float(v) for name, v in terms.items()}

  return run


# The measures.


class Match(NamedTuple):
  """How well components match rows: see `match`."""

  cosine: float
  ratio: float
  distinct: int


def match(rows: np.ndarray, inner: np.ndarray, u: np.ndarray) -> Match:
  """Mean max cosine similarity (MMCS), ratio of norms (ML2R), and the number of distinct matches.

  Args:
    rows: of the target [F, d], what its matrix makes of each feature.
    inner: [F, C], what V makes of each feature.
    u: U [C, d]; a component's part of row j is inner[j, c] u[c].
  """
  parts = inner[:, :, None] * u[None]
  lengths, expected = np.linalg.norm(parts, axis=-1), np.linalg.norm(rows, axis=-1)
  cosines = np.einsum('jcd,jd->jc', parts, rows) / np.maximum(lengths * expected[:, None], 1e-12)
  # A component of vanishing length has a direction, too.
  cosines = np.where(lengths > VANISHING * expected.mean(), cosines, -1.0)
  best, own = cosines.argmax(axis=1), np.arange(len(rows))
  ratio = np.mean(lengths[own, best] / expected)
  return Match(float(cosines[own, best].mean()), float(ratio), len({*best.tolist()}))


def identity_errors(found: np.ndarray) -> int:
  """The entries by which importances [F, C] of single features differ from a permuted identity."""
  rows, columns = linear_sum_assignment(-found)
  diagonal = found[rows, columns]
  others = found.copy()
  others[rows, columns] = 0
  return int((diagonal < 1 - TOLERANCE).sum() + (others > TOLERANCE).sum())


def measured(model: Model, params: Params) -> tuple[Match, dict[str, int], dict[str, int]]:
  """The match of the first matrix; by site, components alive on 16,384 rows, and identity errors."""
  toy, x = model.toy, PROBE * jnp.eye(model.toy.features)[:, None]

  @jax.jit
  def low_of(x):
    _, inputs = model.apply(params, x, {})
    return inputs, jax.tree.map(importance.lower, importances(model, params, inputs))

  inputs, of_probes = low_of(x)
  _, of_data = low_of(toy.batch(jax.random.key(1), 16_384)[0])
  alive, errors = {}, {}
  for path, site in model.sites.items():
    alive[site.name] = int((of_data[path].max(axis=(0, 1, 2)) > ALIVE).sum())
    errors[site.name] = identity_errors(np.asarray(of_probes[path][0, :, 0]))
  site = next(site for site in model.sites.values() if site.name == 'first')
  rows = np.asarray(inputs[f'{site.module}/first'][0, :, 0]) / PROBE
  (w,), ((v,), (u,)) = (jax.tree.map(np.asarray, of(params)) for of in (site.target, site.factors))
  return match(rows @ w, rows @ v, u), alive, errors


def shown(values: Mapping[str, int]) -> str:
  """Numbers of the sites, in the order of the table's head."""
  return ' '.join(f'{values[name]:>3}' for name in sorted(values))


def report(name: str, toy: Toy, seeds: Sequence[int], target_seed: int) -> None:
  """Trains the target, decomposes it with each seed, and prints the table."""
  model, began = model_of(toy), time.monotonic()
  target, loss = trained(model, target_seed)
  probes = PROBE * jnp.eye(toy.features)[:, None]
  outputs = np.asarray(jax.jit(model.apply)(target, probes, {})[0][:, 0])
  print(f'{name}: the target has a loss of {loss:.2e}, and reads {PROBE} as', end=' ')
  print(f'{np.diag(outputs).min():.2f} to {np.diag(outputs).max():.2f}', flush=True)
  check_learned(outputs)
  decomposed, found = decomposer(model, target), {}
  order = ', '.join(sorted(site.name for site in model.sites.values()))
  print(f'alive components and identity errors of {order}')
  print('seed      loss   MMCS   ML2R  distinct  alive         errors        success', flush=True)
  for seed in seeds:
    params, terms = decomposed(seed)
    matched, alive, errors = measured(model, params)
    success = (
      matched.cosine >= toy.least
      and 0.97 <= matched.ratio <= 1.05
      and matched.distinct == toy.features
      and all(alive[site] == count for site, count in toy.alive.items())
    )
    found[seed] = sum(terms.values()), success
    print(
      f'{seed:>4}  {found[seed][0]:.2e}  {matched.cosine:.3f}  {matched.ratio:.3f}  '
      f'{matched.distinct:>8}  {shown(alive):<12}  {shown(errors):<12}  {"yes" if success else "no"}',
      flush=True,
    )
    print('      ' + ', '.join(f'{term} {value:.2e}' for term, value in terms.items()), flush=True)
  best, count = min(found, key=lambda seed: found[seed][0]), sum(s for _, s in found.values())
  print(f'published: {toy.published}; alive: {dict(toy.alive)}')
  print(f'seed {best} has the smallest loss: {"a success" if found[best][1] else "no success"}.')
  print(f'{count} of {len(seeds)} seeds succeed; {time.monotonic() - began:.0f} s', flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
  """Prints the tables of the toys that are named."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('toys', nargs='*', default=['5-2'], help=', '.join(TOYS))
  parser.add_argument('--seeds', default='0', help='of the decomposition, such as 0,1,2,3,4')
  parser.add_argument('--target_seed', type=int, default=0)
  parser.add_argument('--steps', type=int, help='of the decomposition')
  flags = parser.parse_args(arguments)
  for name in flags.toys:
    toy = TOYS[name]
    toy = dataclasses.replace(toy, steps=flags.steps or toy.steps)
    report(name, toy, [int(seed) for seed in flags.seeds.split(',')], flags.target_seed)


if __name__ == '__main__':
  main()
