"""The losses of a decomposition in one chunk, and terms that compute a part of them."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import math
from typing import ClassVar, Protocol

import jax
from jax import lax
import jax.numpy as jnp

from valkyrie.lab.decomposition import draws, importance
from valkyrie.lab.decomposition.adversary import Adversary
from valkyrie.lab.decomposition.evaluation import Memory
from valkyrie.lab.decomposition.importance import Importance
from valkyrie.lab.decomposition.masks import Stochastic, Tokens, masked
from valkyrie.models.features import SITES
from valkyrie.models.sites import sites_of
from valkyrie.training.losses import divergences
from valkyrie.training.objective import Chunk, Part, Term
from valkyrie.types import Array, Carry

NAME = 'decomposition'
# The module of the arrays that all chunks of a step read, and their names. Names of the means of
# importances begin with FREQUENCY, those of an adversary's sources with its number.
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


class ChunkReading:
  """What the losses of a chunk share: importances, draws and the clean distribution."""

  def __init__(self, settings: Settings, chunk: Chunk):
    self.settings = settings
    self.chunk = chunk
    self._arrays = chunk.params[ARRAYS]
    self.sites = sites_of(chunk.model.parameters())
    self.before: Memory = chunk.before[NAME]
    time = chunk.batch.inputs.shape[1]
    numbers, place = draws.tokens(self.before.place, time)
    self._tokens = Tokens(settings.seed, self.before.place.row, numbers)
    self._weights = chunk.batch.weights
    # Importances count for all tokens, also where nothing is predicted.
    of_step = lax.stop_gradient(self._arrays[TOKENS])
    self._share = (chunk.batch.segment_ids > 0) * (chunk.total / of_step)
    self.weight = jnp.sum(self._weights)
    functions = settings.importance()
    inputs = chunk.features.sites or {}
    z, after = functions(chunk.params, self.sites, inputs, self.before.importance, chunk.batch)
    self.after = self.before._replace(place=place, importance=after)
    self.low = jax.tree.map(importance.lower, z)
    self.high = jax.tree.map(importance.upper, z)

  def reconstruction(self, number: int, loss: Stochastic) -> tuple[Array, list[Carry]]:
    """The summed divergence of a loss, the mean over its passes, and their carries."""
    sources = None
    if isinstance(loss, Adversary):
      sources = loss.of_tokens(sources_of(str(number), self._arrays), self._tokens)
    passes = [*loss.masks(number, self.low, self.sites, self._tokens, sources)]
    own = self.before.passes[number]
    size = self.chunk.model.about.vocabulary_size
    total = jnp.zeros(())
    carries = []
    for index, given in enumerate(passes):
      features, after = masked(self.chunk, given, own[index] if own else self.chunk.before)
      found = divergences(self.chunk.features, features, size)
      total += jnp.sum(self._weights * found) / len(passes)
      carries += [after] if own else []
    return total, carries

  @functools.cached_property
  def powers(self) -> dict[str, Array]:
    """{path: [L, C]}, sums over the tokens of the importance to some power (D11)."""
    first = self.settings.exponent
    last = self.settings.last_exponent
    done = lax.stop_gradient(self._arrays[STEP]) / self.settings.train_steps
    exponent = first + (last - first) * jnp.minimum(done, 1.0)

    def of(high):
      counted = importance.counted(high, exponent, self.settings.smooth)
      return jnp.einsum('lbtc,bt->lc', counted, self._share)

    return {path: of(high) for path, high in self.high.items()}

  def minimality(self) -> Array:
    """The sum over tokens and components."""
    return sum((jnp.sum(f) for f in self.powers.values()), jnp.zeros(()))

  def frequency(self) -> Array:
    """The chunk's share of h(f) = f log2(1 + a f), of the mean f of the whole step (D12).

    Its gradient is the gradient of h'(f) times the chunk's f; over all chunks, they add up to h's.
    """
    a = self.settings.reference_tokens
    slopes = jnp.zeros(())
    value = jnp.zeros(())
    for path, of_chunk in self.powers.items():
      f = lax.stop_gradient(self._arrays[FREQUENCY + path])
      bits = jnp.log2(1 + a * f)
      slopes += jnp.sum((bits + a * f / ((1 + a * f) * math.log(2))) * of_chunk)
      value += jnp.sum(f * bits)
    return slopes + lax.stop_gradient(value * self.weight - slopes)

  def alive(self) -> Array:
    """The components with an importance above 0.1, summed over tokens."""
    return sum(
      (jnp.einsum('lbtc,bt->', (low > 0.1).astype(low.dtype), self._share)
       for low in self.low.values()),
      jnp.zeros(()),
    )  # fmt: skip


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
    return Part(total / chunk.total, {}, read.after._replace(passes=passes))


@dataclasses.dataclass(frozen=True)
class MeanImportance(Term):
  """The importance of each component, summed over the tokens of a step."""

  settings: Settings

  name: ClassVar[str] = NAME
  activations: ClassVar[Sequence[str]] = (SITES,)

  def __call__(self, chunk: Chunk) -> Part:
    read = ChunkReading(self.settings, chunk)
    found = {FREQUENCY + path: f for path, f in read.powers.items()}
    return Part(jnp.zeros(()), found, read.after)


def is_array(module: str, name: str) -> bool:
  return module == ARRAYS


def named_sources(number: str, sources: Mapping[str, Array]) -> dict[str, Array]:
  return {f'{number} {path}': r for path, r in sources.items()}


def sources_of(number: str, shared: Mapping[str, Array]) -> dict[str, Array]:
  begin = f'{number} '
  return {n.removeprefix(begin): r for n, r in shared.items() if n.startswith(begin)}
