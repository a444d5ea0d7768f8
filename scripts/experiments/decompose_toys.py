"""Toys with known answers for the decomposition: superposition, and a residual MLP.

A toy model of superposition (Elhage et al. 2022) stores features in fewer dimensions, and reads
them back by the transposed matrix: relu(x W (I) Wᵀ + b). Its parts are the rows of W, and so should
its components be. A residual MLP (Bushnaq, Braun & Sharkey 2025, arXiv 2506.20790, section 3.3)
computes x + relu(x) of more features than it has neurons; each feature should have one component in
the matrix that leads to the neurons.

The forward pass, the data, the target's training and the mean squared error are here; all else is
what decomposes language models. Of several seeds, that with the smallest loss is the answer. A
target that has not learned all features ends the program with 65.

    bash scripts/experiment decompose_toys 5-2 --seeds 0,1,2,3,4
"""
# Environment: base

import argparse
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import math
import re
import sys
import time
from typing import ClassVar, NamedTuple

import haiku as hk
from haiku.data_structures import merge, partition
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax
from scipy.optimize import linear_sum_assignment

from valkyrie.distributed import console
from valkyrie.errors import DataError
from valkyrie.lab.decomposition import importance
from valkyrie.lab.decomposition.faithfulness import faithful, unfaithfulness
from valkyrie.lab.decomposition.masks import Stochastic, Tokens
from valkyrie.models.layers import parameter, project
from valkyrie.models.matrices import Masks
from valkyrie.models.model import created
from valkyrie.models.sites import Site, Sites, U, V, sites_of
from valkyrie.types import Array, Params

FUNCTIONS = importance.PerComponent(width=16)
LOSSES = (Stochastic(live='all'), Stochastic(live='each'))
CLIP_NORM = 0.01
FAITHFUL_STEPS = 200
FAITHFUL_RATE = 0.01
STEPS_OF_A_CALL = 500
MODULE = 'layers/toy'
LEARNED = ('first', 'second', 'bias')  # by the target
PROBE = 0.75
ALIVE = 0.1  # an importance above
TOLERANCE = 0.1  # of an importance of 0 or 1
VANISHING = 0.01  # of the mean row: a shorter part matches nothing


@dataclasses.dataclass(frozen=True)
class Toy:
  """A target, its data, and the settings of its decomposition.

  Attributes:
    features: F; each is on with `probability`, and then uniform from `lowest` to 1.
    hidden: the dimensions between the two matrices.
    components: C of each site.
    minimality, exponent: the coefficient and the power of importances.
    steps, rows: of the decomposition; rows of a step that are not zero.
    target_steps, target_rows: the same of the target's training.
    alive: the components that should be alive, by site; other sites' components are free.
    least: the mean cosine similarity of a success.
    exact: whether a success has exactly these components alive.
    published: the mean cosine similarity and the ratio of norms.
    rate, target_rate: the learning rate at first, and its share at the end, by a cosine.
  """

  features: int
  hidden: int
  components: int
  minimality: float
  exponent: float
  steps: int
  rows: int
  target_steps: int
  target_rows: int
  alive: Mapping[str, int]
  least: float
  exact: bool = True
  published: tuple[str, str] = ('', '')
  rate: tuple[float, float] = (1e-3, 0.0)
  target_rate: tuple[float, float] = (5e-3, 1.0)
  probability: float = 0.05
  lowest: float = 0.0

  skips: ClassVar[bool] = False  # whether features also pass by the layer

  def batch(self, key: Array, rows: int) -> tuple[Array, Array]:
    """Rows with at least one feature and one row of zeros, [rows + 1, 1, F]; their weights.

    The weights make their mean equal the mean of rows of independent features, mostly zero.
    """
    p = self.probability
    zero = (1 - self.probability) ** self.features
    keys = jax.random.split(key, 3)
    drawn = jax.random.uniform(keys[0], (rows, 1))
    first = jnp.floor(jnp.log1p(-drawn * (1 - zero)) / math.log1p(-p))
    number = jnp.arange(self.features)[None]
    later = (number > first) & jax.random.bernoulli(keys[1], p, (rows, self.features))
    value = jax.random.uniform(keys[2], later.shape, minval=self.lowest)
    x = jnp.where((number == first) | later, value, 0.0)
    weights = jnp.append(jnp.full(rows, (1 - zero) / rows), zero)
    return jnp.append(x, jnp.zeros((1, self.features)), axis=0)[:, None], weights[:, None]

  def probes(self) -> Array:
    """One row for each feature, in which only it is on, [F, 1, F]."""
    return PROBE * jnp.eye(self.features)[:, None]

  def __call__(self, x: Array, given: Mapping[str, Masks]) -> tuple[Array, dict[str, Array]]:
    """The output [B, 1, F] with masks of sites, and the inputs of the sites [1, B, 1, D_in]."""
    sites = Sites((('.', self.components),))

    def layer(x, given):
      seen: dict[str, Array] = {}
      with hk.custom_getter(sites.getter(0, 'layers/', given, seen)):
        y = hk.to_module(self.layer)('toy')(x)
      return y, seen

    stack = hk.layer_stack(1, with_per_layer_inputs=True, unroll=1, name='layers')
    if (embedding := self.embedding()) is None:
      return stack(layer)(x, given)
    y, seen = stack(layer)(x @ embedding, given)
    return y @ embedding.T, seen

  def embedding(self) -> Array | None:
    """What comes before the layer, and transposed behind it, [F, D]."""
    return None

  def layer(self, x: Array) -> Array:
    """The Haiku function whose matrices are decomposed, [B, 1, D] -> [B, 1, D]."""
    raise NotImplementedError

  def labels(self, x: Array) -> Array:
    """What the target learns."""
    return jax.nn.relu(x) + x * self.skips

  def tied(self, params: Params) -> Params:
    """The parameters, with those that others determine."""
    return params


class Superposition(Toy):
  """relu(x W (I) Wᵀ + b); the components of Wᵀ are W's, transposed."""

  def layer(self, x):
    (h,) = project(x, ('embed', 'mlp'), first=self.hidden)
    if 'identity' in self.alive:
      (h,) = project(h, ('mlp', 'mlp'), identity=self.hidden)
    (y,) = project(h, ('mlp', 'embed'), second=self.features)
    bias = parameter('bias', (self.features,), jnp.zeros, axes=('norm',))
    return jax.nn.relu(y + bias[None, None])

  def tied(self, params):
    own = params[MODULE]
    pairs = {'second': 'first', 'second' + V: 'first' + U, 'second' + U: 'first' + V}
    found = own | {name: jnp.swapaxes(own[other], 1, 2) for name, other in pairs.items()}
    if 'identity' in own:
      found['identity'] = jnp.eye(self.hidden)[None]
    return {**params, MODULE: found}


class ResidualMLP(Toy):
  """(x E + relu(x E W_in) W_out) Eᵀ, for a random E of unit rows, which learns x + relu(x)."""

  skips = True

  def layer(self, x):
    (h,) = project(x, ('embed', 'mlp'), first=self.hidden)
    (y,) = project(jax.nn.relu(h), ('mlp', 'embed'), second=x.shape[-1])
    return x + y

  def embedding(self):
    def unit(shape, dtype):
      rows = jax.random.normal(hk.next_rng_key(), shape, dtype)
      return rows / jnp.linalg.norm(rows, axis=-1, keepdims=True)

    return parameter('embedding', (self.features, 1000), unit, axes=('vocabulary', 'embed'))


_SMALL = Superposition(
  features=5, hidden=2, components=20, minimality=3e-3, exponent=1.0, steps=10_000, rows=256,
  target_steps=10_000, target_rows=256, alive={'first': 5, 'second': 5}, least=0.995,
  published=('1.000 ± 0.000', '0.993 ± 0.002'),
)  # fmt: skip
_LARGE = Superposition(
  features=40, hidden=10, components=200, minimality=1e-4, exponent=2.0, steps=10_000, rows=512,
  target_steps=10_000, target_rows=2048, alive={'first': 40, 'second': 40}, least=0.98, exact=False,
  published=('1.000 ± 0.000', '1.010 ± 0.007'),
)  # fmt: skip
TOYS: Mapping[str, Toy] = {
  '5-2': _SMALL,
  '5-2-identity': dataclasses.replace(
    _SMALL, alive={**_SMALL.alive, 'identity': 2}, published=('1.000 ± 0.000', '0.992 ± 0.010')
  ),
  '40-10': _LARGE,
  '40-10-identity': dataclasses.replace(
    _LARGE, alive={**_LARGE.alive, 'identity': 10}, published=('1.000 ± 0.000', '1.031 ± 0.001')
  ),
  'residual': ResidualMLP(
    features=100, hidden=50, components=100, minimality=1e-5, exponent=2.0, steps=12_000, rows=256,
    target_steps=1000, target_rows=1024, alive={'first': 100}, least=0.98, rate=(2e-3, 1.0),
    target_rate=(3e-3, 0.0), probability=0.01, lowest=-1.0,
  ),
}  # fmt: skip


class Model(NamedTuple):
  """A toy as pure functions."""

  toy: Toy
  init: Callable[[Array], Params]
  apply: Callable[..., tuple[Array, dict[str, Array]]]
  sites: Mapping[str, Site]


def model_of(toy: Toy) -> Model:
  """The functions of a toy."""
  init, parameters = created(lambda: toy(jnp.zeros((1, 1, toy.features)), {}))
  return Model(toy, init, hk.without_apply_rng(hk.transform(toy)).apply, sites_of(parameters()))


def squared_error(out: Array, expected: Array, weights: Array) -> Array:
  """The mean squared error of outputs [B, 1, F]."""
  return jnp.sum(weights * jnp.mean(jnp.square(out - expected), axis=-1))


def falling(rate: tuple[float, float], steps: int) -> optax.Schedule:
  """A learning rate that falls by a cosine from `rate[0]` to its share `rate[1]`."""
  return optax.cosine_decay_schedule(rate[0], steps, rate[1])


def minimizer(loss: Callable, optimizer: optax.GradientTransformation, steps: int) -> Callable:
  """(params, *others) -> (params, terms), by `loss(params, step, *others)`, a dict of terms.

  The terms are means over the last steps; all are a multiple of STEPS_OF_A_CALL.
  """

  def total(params, step, *others):
    terms = loss(params, step, *others)
    return sum(terms.values(), jnp.zeros(())), terms

  @jax.jit
  def call(params, state, begin, *others):
    def one(carry, step):
      slope, terms = jax.grad(total, has_aux=True)(carry[0], step, *others)
      updates, state = optimizer.update(slope, carry[1], carry[0])
      return (optax.apply_updates(carry[0], updates), state), terms

    carry, terms = lax.scan(one, (params, state), begin + jnp.arange(STEPS_OF_A_CALL))
    return *carry, jax.tree.map(jnp.mean, terms)

  def run(params, *others):
    state = jax.jit(optimizer.init)(params)
    terms = {}
    for begin in range(0, steps, STEPS_OF_A_CALL):
      params, state, terms = call(params, state, begin, *others)
    return params, {name: float(value) for name, value in terms.items()}

  return run


def trained(model: Model, seed: int) -> tuple[Params, float]:
  """The target and its loss; the factors are left as they began."""
  toy = model.toy
  key = jax.random.key(seed)
  own, rest = partition(lambda _, name, __: name in LEARNED, model.init(key))

  def loss(own, step):
    x, weights = toy.batch(jax.random.fold_in(key, step), toy.target_rows)
    out, _ = model.apply(toy.tied(merge(own, rest)), x, {})
    return {'error': squared_error(out, toy.labels(x), weights)}

  optimizer = optax.adamw(falling(toy.target_rate, toy.target_steps), weight_decay=0.01)
  own, terms = minimizer(loss, optimizer, toy.target_steps)(own)
  return toy.tied(merge(own, rest)), terms['error']


def check_learned(shares: np.ndarray) -> None:
  """Raises a DataError if the layer reads less than a quarter of a feature, of these shares [F]."""
  if missing := [int(n) for n in np.flatnonzero(shares < 0.25)]:
    raise DataError(
      f'The target has not learned the features {missing} of {len(shares)}: no decomposition can '
      'find them. Train it from another start: --target_seed=N.'
    )


def importances(model: Model, params: Params, inputs: Mapping[str, Array]) -> dict[str, Array]:
  """{path: logits [1, B, 1, C]}, of the inputs of the sites in the clean pass."""
  return FUNCTIONS.logits(params, model.sites, inputs)


def losses(model: Model, params: Params, step: Array, seed: Array) -> dict[str, Array]:
  """The terms of the loss of a step, each with its coefficient."""
  toy = model.toy
  sites = model.sites
  # The data do not depend on the seed: losses of seeds are compared.
  x, weights = toy.batch(jax.random.fold_in(jax.random.key(0), step), toy.rows)
  clean, inputs = model.apply(params, x, {})
  z = importances(model, params, inputs)
  low = jax.tree.map(importance.lower, z)
  high = jax.tree.map(importance.upper, z)
  tokens = Tokens(seed, jnp.arange(len(x)), jnp.broadcast_to(step, (len(x), 1)))
  terms = {}
  for number, loss in enumerate(LOSSES):
    outs = [model.apply(params, x, given)[0] for given in loss.masks(number, low, sites, tokens)]
    errors = [squared_error(out, lax.stop_gradient(clean), weights) for out in outs]
    terms[loss.live] = loss.coefficient * sum(errors) / len(errors)
  powers = [jnp.sum(importance.counted(g, toy.exponent), axis=(0, 3)) for g in high.values()]
  terms['minimality'] = toy.minimality * sum(jnp.sum(weights * power) for power in powers)
  return {**terms, 'faithfulness': unfaithfulness(params, sites)}


def decomposer(model: Model, target: Params) -> Callable[[int], tuple[Params, dict[str, float]]]:
  """A function of a seed -> (the parameters, the terms of the loss over the last steps)."""
  toy = model.toy

  def is_factor(_, name, __=None):
    return name[-2:] in (V, U)

  matrices = hk.data_structures.filter(lambda *of: not is_factor(*of), target)

  @jax.jit
  def start(seed):
    keys = jax.random.split(jax.random.key(seed))
    params = merge(model.init(keys[0]), matrices)
    params = faithful(params, model.sites, FAITHFUL_STEPS, FAITHFUL_RATE)
    initial, _ = FUNCTIONS.created(model.sites)
    return hk.data_structures.filter(is_factor, params) | initial(keys[1])

  clip = optax.masked(
    optax.clip_by_global_norm(CLIP_NORM), functools.partial(hk.data_structures.map, is_factor)
  )
  optimizer = optax.chain(clip, optax.adam(falling(toy.rate, toy.steps)))
  minimized = minimizer(
    lambda own, *of: losses(model, toy.tied(merge(own, matrices)), *of), optimizer, toy.steps
  )

  def run(seed):
    own, terms = minimized(start(seed), seed)
    return toy.tied(merge(own, matrices)), terms

  return run


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
  lengths = np.linalg.norm(parts, axis=-1)
  expected = np.linalg.norm(rows, axis=-1)
  cosines = np.einsum('jcd,jd->jc', parts, rows) / np.maximum(lengths * expected[:, None], 1e-12)
  # A component of vanishing length has a direction, too.
  cosines = np.where(lengths > VANISHING * expected.mean(), cosines, -1.0)
  best = cosines.argmax(axis=1)
  own = np.arange(len(rows))
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
  """The match of the first matrix; the components alive on 16,384 rows and the errors by site."""

  @jax.jit
  def low_of(x):
    _, inputs = model.apply(params, x, {})
    return inputs, jax.tree.map(importance.lower, importances(model, params, inputs))

  inputs, of_probes = low_of(model.toy.probes())
  _, of_data = low_of(model.toy.batch(jax.random.key(1), 16_384)[0])
  alive = {}
  errors = {}
  for path, site in model.sites.items():
    alive[site.name] = int((of_data[path].max(axis=(0, 1, 2)) > ALIVE).sum())
    errors[site.name] = identity_errors(np.asarray(of_probes[path][0, :, 0]))
  site = next(site for site in model.sites.values() if site.name == 'first')
  rows = np.asarray(inputs[f'{site.module}/first'][0, :, 0]) / PROBE
  (w,), ((v,), (u,)) = (jax.tree.map(np.asarray, of(params)) for of in (site.target, site.factors))
  return match(rows @ w, rows @ v, u), alive, errors


def report(name: str, toy: Toy, seeds: Sequence[int], target_seed: int) -> None:
  """Trains the target, decomposes it with each seed, and prints the table."""
  began = time.monotonic()
  model = model_of(toy)
  names = sorted(site.name for site in model.sites.values())
  target, loss = trained(model, target_seed)
  outputs, _ = jax.jit(model.apply)(target, toy.probes(), {})
  shares = np.diag(outputs[:, 0]) / PROBE - toy.skips
  print(f'\n{name}: the target has a loss of {loss:.2e}, and reads', end=' ')
  print(f'{shares.min():.2f} to {shares.max():.2f} of a feature.', flush=True)
  check_learned(shares)
  print(f'Alive components and identity errors are of {", ".join(names)}.')
  line = '{:>9}  {:>8}  {:>13}  {:>13}  {:>8}  {:>12}  {:>12}  {:>7}  {}'
  print(line.format('seed', 'loss', 'MMCS', 'ML2R', 'distinct', 'alive', 'errors', 'success', ''))

  def of_sites(values):
    return ' '.join(f'{values.get(name, "-"):>3}' for name in names)

  print(
    line.format('published', '', *toy.published, '', of_sites(toy.alive), '', '', ''), flush=True
  )
  decomposed = decomposer(model, target)
  found = {}
  for seed in seeds:
    params, terms = decomposed(seed)
    matched, alive, errors = measured(model, params)
    success = (
      matched.cosine >= toy.least
      and 0.97 <= matched.ratio <= 1.05
      and matched.distinct == toy.features
      and (not toy.exact or {**alive, **toy.alive} == alive)
    )
    found[seed] = total, _ = sum(terms.values()), success
    parts = ', '.join(f'{term} {value:.2e}' for term, value in terms.items())
    cosine, ratio = (f'{value:.3f}' for value in matched[:2])
    print(
      line.format(
        seed, f'{total:.2e}', cosine, ratio, matched.distinct, of_sites(alive), of_sites(errors),
        'yes' if success else 'no', parts,
      ),
      flush=True,
    )  # fmt: skip
  best = min(found, key=lambda seed: found[seed][0])
  successes = sum(s for _, s in found.values())
  print(
    f'Seed {best} has the smallest loss: {"a success" if found[best][1] else "no success"}. '
    f'{successes} of {len(found)} seeds succeed. {time.monotonic() - began:.0f} s.',
    flush=True,
  )


@console.program
def main(arguments: Sequence[str] | None = None) -> None:
  """Prints the tables of the toys that are named."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('toys', nargs='*', help=f'of {", ".join(TOYS)}; without, all')
  parser.add_argument('--seeds', default='0', help='of the decomposition, such as 0,1,2,3,4')
  parser.add_argument('--target_seed', type=int, default=0, help='of the starts of the target')
  parser.add_argument('--steps', type=int, help='of the decomposition, rounded up to 500s')
  flags = parser.parse_args(arguments)
  if unknown := sorted({*flags.toys} - {*TOYS}):
    parser.error(f'unknown toys: {" ".join(unknown)}. Use {", ".join(TOYS)}.')
  if not re.fullmatch(r'\d+(,\d+)*', flags.seeds):
    parser.error(f'--seeds={flags.seeds} must be numbers with commas between them, such as 0,1,2.')
  if flags.steps is not None and flags.steps < 1:
    parser.error(f'--steps={flags.steps} must be at least 1.')
  for name in flags.toys or TOYS:
    toy = dataclasses.replace(TOYS[name], **({'steps': flags.steps} if flags.steps else {}))
    report(name, toy, [int(seed) for seed in flags.seeds.split(',')], flags.target_seed)


if __name__ == '__main__':
  sys.exit(main())
