"""What a decomposed model still knows with only some components: the most used, or random ones.

Components are ordered by the tokens of the validation split at which they are active. Those that
are kept stay at all tokens. All others, and the deltas, are gone: what is left is a smaller model.

    bash scripts/experiment kept_components runs/recall_parts --kept 91 182 365
"""
# Environment: base

import argparse
from collections.abc import Mapping, Sequence
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

from valkyrie import main as command_line
from valkyrie.config.load import load_gin
from valkyrie.data.read_ahead import prefetch
from valkyrie.distributed import console
from valkyrie.lab.decomposition.evaluation import ComponentScores
from valkyrie.models import language_model
from valkyrie.models.features import SITES
from valkyrie.models.matrices import Masks
from valkyrie.models.sites import sites_of
from valkyrie.run.evaluator import Evaluator
from valkyrie.sharding.partitioner import Partitioner
from valkyrie.training.losses import token_scores
from valkyrie.training.objective import evaluations, terms_of
from valkyrie.training.setup import StepSettings
from valkyrie.types import Array
from valkyrie.weights.restored import restored_params


@console.program
def main(arguments: Sequence[str] | None = None) -> None:
  """Prints a line for each number of components that are kept."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('run', help='the directory of a run with @Decomposition')
  parser.add_argument('--kept', type=int, nargs='+', required=True, help='numbers of components')
  parser.add_argument('--draws', type=int, default=3, help='of random ones (default: %(default)s)')
  flags = parser.parse_args(arguments)
  load_gin((), (), run=pathlib.Path(flags.run), modules=command_line.CONFIGURABLE_MODULES)
  made = StepSettings()
  device = Partitioner((('data', 1),), (), (), manual=True)
  terms = evaluations(terms_of(made.objective))
  (scores,) = [term for term in terms if isinstance(term, ComponentScores)]
  measure = Evaluator(language_model.transform(made.model), device, terms=(scores,))
  model = measure.model
  sites = sites_of(measure.model.parameters())
  params, _ = restored_params(model, device, flags.run, measure.vocabulary)
  measure.open()

  def chunks():
    for feed in measure.sources.values():
      yield from prefetch(feed, measure.spans(feed, whole=True))

  def right(features, batch):
    found = token_scores(features, batch.targets, model.about.vocabulary_size)
    return jnp.sum(batch.weights * found.right)

  @jax.jit
  def whole(carry, batch):
    of_model, of_importance = carry
    features, of_model = model.apply(
      params, of_model, batch.inputs, batch.positions, batch.segment_ids, activations=(SITES,)
    )
    low, of_importance = scores.importances(model, params, features, of_importance, batch)
    active = {
      path: jnp.einsum('lbtc,bt->lc', 1.0 * (g > scores.threshold), 1.0 * (batch.segment_ids > 0))
      for path, g in low.items()
    }
    return (right(features, batch), active), (of_model, of_importance)

  @jax.jit
  def without(carry, batch, kept: Mapping[str, Array]):
    def masks(of):
      shape = len(of), *batch.inputs.shape
      all_tokens = jnp.broadcast_to(of[:, None, None], (*shape, of.shape[-1]))
      return Masks(all_tokens, jnp.zeros(shape), jnp.ones(shape, bool))

    given = {path: masks(of) for path, of in kept.items()}
    where = batch.inputs, batch.positions, batch.segment_ids
    features, carry = model.apply(params, carry, *where, masks=given)
    return right(features, batch), carry

  def total(read, carry, *kept):
    found = []
    for batch in chunks():
      of_chunk, carry = read(carry, batch, *kept)
      found.append(of_chunk)
    return jax.tree.map(lambda *parts: np.sum(parts, axis=0), *jax.device_get(found))

  fresh = model.initial_carry(measure.batch_size)
  of_model = {'model': fresh['model']}
  asked = sum(batch.weights.sum() for batch in chunks())
  of_all, active = total(whole, (of_model, fresh[scores.name].importance))
  counts = np.concatenate([active[path].ravel() for path in sites])

  def accuracy(chosen):
    mask = np.zeros(counts.size, np.float32)
    kept = {}
    begin = 0
    mask[chosen] = 1
    for path, site in sites.items():
      size = site.layers * site.components
      kept[path] = mask[begin : begin + size].reshape(site.layers, site.components)
      begin += size
    return total(without, of_model, kept) / asked

  random = np.random.default_rng(0)
  used = np.lexsort((random.random(counts.size), -counts))
  share = f'{of_all / asked:.1%} of {asked:,.0f} targets'
  print(f'The model gets {share} right. {np.sum(counts > 0):,} of its {counts.size:,} components')
  print('are active at some token. With only so many of them, at all tokens:')
  print(f'{"kept":>8}  {"share":>6}  {"most used":>9}  random ones')
  for number in flags.kept:
    others = [accuracy(random.permutation(counts.size)[:number]) for _ in range(flags.draws)]
    shown = ' '.join(f'{share:.1%}' for share in others)
    share = f'{number / counts.size:.1%}'
    print(f'{number:>8}  {share:>6}  {accuracy(used[:number]):>9.1%}  {shown}', flush=True)


if __name__ == '__main__':
  sys.exit(main())
