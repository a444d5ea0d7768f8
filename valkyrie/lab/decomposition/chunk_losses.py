"""The losses of a decomposition in one chunk, and terms that compute only some losses."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import itertools
import math
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
from jax import lax
import jax.numpy as jnp

from valkyrie.lab.decomposition import draws, importance
from valkyrie.lab.decomposition.adversary import Adversary
from valkyrie.lab.decomposition.evaluation import Memory
from valkyrie.lab.decomposition.importance import Importance
from valkyrie.lab.decomposition.masks import Stochastic, Tokens, masked
from valkyrie.models.features import SITES
from valkyrie.models.matrices import Masks
from valkyrie.models.sites import sites_of
from valkyrie.training.losses import divergences
from valkyrie.training.objective import Chunk, Part, Term
from valkyrie.types import Array, Carry

NAME = 'decomposition'
# The module of the arrays that all chunks of a step read, and their names. The name of a mean
# importance begins with FREQUENCY, the name of an adversary's source with its number.
ARRAYS = f'shared/{NAME}'
STEP = 'step'
TOKENS = 'tokens'
PENALTY = 'penalty'
FREQUENCY = 'frequency/'


class Settings(Protocol):
  """The settings that a chunk reads; `objective.Decomposition` explains them."""

  @property
  def seed(self) -> int: ...

  @property
  def train_steps(self) -> int: ...

  @property
  def importance(self) -> Callable[[], Importance]: ...

  @property
  def exponent(self) -> float: ...

  @property
  def last_exponent(self) -> float: ...

  @property
  def smooth(self) -> bool: ...

  @property
  def reference_tokens(self) -> int: ...


class _Pass(NamedTuple):
  """A masked pass: the masks of its sites by path, and the carry before it."""

  masks: Mapping[str, Masks]
  carry: Carry


class ChunkReading:
  """What the losses of a chunk share: importances, draws and the clean distribution.

  Attributes:
    before, after: the memory of the decomposition before the chunk and after it; the carries of
      masked passes come from `reconstruction`.
    weight: the summed weight of the chunk's targets.
    low, high: the two importances, {path: g [L, B, T, C]}.
  """

  def __init__(self, settings: Settings, chunk: Chunk):
    self._settings = settings
    self._chunk = chunk
    self._arrays = chunk.params[ARRAYS]
    self._sites = sites_of(chunk.model.parameters())
    self.before: Memory = chunk.before[NAME]
    time = chunk.batch.inputs.shape[1]
    numbers, place = draws.tokens(self.before.place, time)
    self._tokens = Tokens(settings.seed, self.before.place.row, numbers)
    self._weights = chunk.batch.weights
    self.weight = jnp.sum(self._weights)
    # Importances count for all tokens, also where nothing is predicted.
    tokens_of_step = lax.stop_gradient(self._arrays[TOKENS])
    is_real = chunk.batch.segment_ids > 0
    token_share = chunk.total / tokens_of_step
    self._share = is_real * token_share
    functions = settings.importance()
    inputs = chunk.features.sites or {}
    z, after = functions(chunk.params, self._sites, inputs, self.before.importance, chunk.batch)
    self.after = self.before._replace(place=place, importance=after)
    self.low = jax.tree.map(importance.lower, z)
    self.high = jax.tree.map(importance.upper, z)

  def reconstruction(self, number: int, loss: Stochastic) -> tuple[Array, list[Carry]]:
    """(The summed divergence of a loss, the mean over its passes; the carries of the passes)."""
    passes = self._passes(number, loss)
    return self._mean([self._read(*each) for each in passes])

  def reconstructions(
    self,
    losses: Sequence[Stochastic],
    side_by_side: bool,
  ) -> list[tuple[Array, list[Carry]]]:
    """`reconstruction` of each loss; `side_by_side`, see `objective.Decomposition`."""
    if not side_by_side:
      return [self.reconstruction(number, loss) for number, loss in enumerate(losses)]
    by_loss = [self._passes(number, loss) for number, loss in enumerate(losses)]
    all_passes = itertools.chain.from_iterable(by_loss)
    results = iter(self._read_side_by_side([*all_passes]))
    return [self._mean([next(results) for _ in passes]) for passes in by_loss]

  def _passes(self, number: int, loss: Stochastic) -> list[_Pass]:
    """The passes of a loss."""
    sources = None
    if isinstance(loss, Adversary):
      given_sources = sources_of(str(number), self._arrays)
      sources = loss.spread(given_sources, self._tokens)
    masks = [*loss.masks(number, self.low, self._sites, self._tokens, sources)]
    carries = self.before.passes[number]  # none with the memory 'clean'
    if not carries:
      clean = {'model': self._chunk.before['model']}
      carries = [clean] * len(masks)
    return [_Pass(*each) for each in zip(masks, carries, strict=True)]

  def _read(self, given: Mapping[str, Masks], carry: Carry) -> tuple[Array, Carry]:
    """(The summed divergence of a pass, the carry after it)."""
    size = self._chunk.model.about.vocabulary_size
    features, after = masked(self._chunk, given, carry)
    divergence = divergences(self._chunk.features, features, size)
    return jnp.sum(self._weights * divergence), after

  def _mean(self, results: Sequence[tuple[Array, Carry]]) -> tuple[Array, list[Carry]]:
    """(The mean divergence of passes, and their carries, if they have carries of their own)."""
    total = jnp.zeros(())
    carries = []
    for weighted, after in results:
      total += weighted / len(results)
      carries.append(after)
    if not any(self.before.passes):
      carries = []
    return total, carries

  def _read_side_by_side(self, passes: Sequence[_Pass]) -> list[tuple[Array, Carry]]:
    """`_read` of each pass; passes with the same sites share one program."""
    by_sites: dict[tuple[str, ...], list[int]] = {}
    for number, each in enumerate(passes):
      by_sites.setdefault((*each.masks,), []).append(number)
    results: dict[int, tuple[Array, Carry]] = {}
    for numbers in by_sites.values():
      group = [passes[number] for number in numbers]
      # Layers stay in front, where the loop over them reads.
      masks = _stacked([each.masks for each in group], axis=1)
      carries = _stacked([each.carry for each in group], axis=0)
      found = jax.vmap(self._read, in_axes=(1, 0))(masks, carries)
      for place, number in enumerate(numbers):
        results[number] = jax.tree.map(lambda leaf, place=place: leaf[place], found)
    return [results[number] for number in range(len(passes))]

  @functools.cached_property
  def powers(self) -> dict[str, Array]:
    """{path: [L, C]}, the sum over tokens of a power of each importance (D11)."""
    first = self._settings.exponent
    last = self._settings.last_exponent
    step = lax.stop_gradient(self._arrays[STEP])
    progress = jnp.minimum(step / max(self._settings.train_steps, 1), 1.0)
    exponent = first + (last - first) * progress
    powers = {}
    for path, high in self.high.items():
      counted = importance.counted(high, exponent, self._settings.smooth)
      powers[path] = jnp.einsum('lbtc,bt->lc', counted, self._share)
    return powers

  def minimality(self) -> Array:
    """The sum of all powers over tokens and components."""
    total = jnp.zeros(())
    for power in self.powers.values():
      total += jnp.sum(power)
    return total

  def frequency(self) -> Array:
    """The chunk's share of h(f) = f log2(1 + a f), with the mean f of the whole step (D12).

    Its gradient is h'(f) times the gradient of the chunk's f; summed over chunks it is h's.
    """
    a = self._settings.reference_tokens
    linear = jnp.zeros(())
    value = jnp.zeros(())
    for path, power in self.powers.items():
      f = lax.stop_gradient(self._arrays[FREQUENCY + path])
      argument = 1 + a * f
      bits = jnp.log2(argument)
      change_of_bits = a * f / (argument * math.log(2))
      slope = bits + change_of_bits
      linear += jnp.sum(slope * power)
      value += jnp.sum(f * bits)
    return linear + lax.stop_gradient(value * self.weight - linear)

  def alive(self) -> Array:
    """The number of components with an importance above 0.1, summed over tokens."""
    total = jnp.zeros(())
    for low in self.low.values():
      is_alive = (low > 0.1).astype(low.dtype)
      total += jnp.einsum('lbtc,bt->', is_alive, self._share)
    return total


def _stacked(trees: Sequence[Any], axis: int) -> Any:
  """Equal pytrees as one, whose leaves are stacked along a new axis."""
  return jax.tree.map(lambda *leaves: jnp.stack(leaves, axis), *trees)


@dataclasses.dataclass(frozen=True)
class AttackedTerm(Term):
  """The loss of one adversary, everywhere routed, which its sources ascend."""

  settings: Settings
  number: str
  adversary: Adversary

  name: ClassVar[str] = NAME
  activations: ClassVar[Sequence[str]] = (SITES,)

  def __call__(self, chunk: Chunk) -> Part:
    read = ChunkReading(self.settings, chunk)
    number = int(self.number)
    adversary = dataclasses.replace(self.adversary, live='all')
    total, carries = read.reconstruction(number, adversary)
    passes = [*read.before.passes]
    passes[number] = carries
    after = read.after._replace(passes=passes)
    return Part(total / chunk.total, {}, after)


@dataclasses.dataclass(frozen=True)
class MeanImportance(Term):
  """The importance of each component, summed over the tokens of a step."""

  settings: Settings

  name: ClassVar[str] = NAME
  activations: ClassVar[Sequence[str]] = (SITES,)

  def __call__(self, chunk: Chunk) -> Part:
    read = ChunkReading(self.settings, chunk)
    sums = {}
    for path, power in read.powers.items():
      sums[FREQUENCY + path] = power
    return Part(jnp.zeros(()), sums, read.after)


def is_array(module: str, name: str) -> bool:
  """Whether a parameter is one of the arrays that all chunks of a step read."""
  return module == ARRAYS


def named_sources(number: str, sources: Mapping[str, Array]) -> dict[str, Array]:
  """The sources of an adversary by their names among the arrays."""
  return {f'{number} {path}': r for path, r in sources.items()}


def sources_of(number: str, arrays: Mapping[str, Array]) -> dict[str, Array]:
  """The sources of an adversary by path, from the arrays of a step."""
  prefix = f'{number} '
  sources = {}
  for name, r in arrays.items():
    if name.startswith(prefix):
      path = name.removeprefix(prefix)
      sources[path] = r
  return sources
