"""Masks that a person chooses: components that are ablated, kept alone or scaled."""

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from valkyrie.config.ranges import FiniteFloat, check
from valkyrie.errors import UsageError, check_choice, first_of
from valkyrie.models.matrices import Masks
from valkyrie.types import Array

KINDS = ('whole', 'important', 'rounded')
_SHOWN = 20  # sites in a message
Numbers = Mapping[str, Collection[int]]  # {name of a site: numbers of its components}


class Masking(NamedTuple):
  """The masks of a pass: for each component, a factor times 1, g, or 1 where g > threshold.

  kind: 'whole' for 1, 'important' for g, or 'rounded'.
  factors: {name of a site: float32 [C]}; 1 for the sites that are not named.
  others: the factor of the components of sites that are not named.
  delta: the share of what V U lacks of each matrix.
  """

  kind: str
  factors: Mapping[str, np.ndarray]
  others: float = 1.0
  delta: float = 0.0

  def masks(self, factor: Array, g: Array, threshold: float) -> Masks:
    """The masks of a site, from its factors [L, C] and importances g [L, B, T, C]."""
    of_kind = {
      'whole': jnp.ones_like,
      'important': lambda g: g,
      'rounded': lambda g: (g > threshold).astype(g.dtype),
    }
    components = of_kind[self.kind](g) * factor[:, None, None]
    one = jnp.ones(g.shape[:-1], g.dtype)
    return Masks(components, self.delta * one, jnp.ones(g.shape[:-1], bool))


UNMASKED = Masking('whole', {})  # V U in the place of each matrix
IMPORTANT = Masking('important', {})
ROUNDED = Masking('rounded', {})


def ablated(numbers: Numbers, sizes: Mapping[str, int]) -> Masking:
  """The model without these components; the rest is unchanged."""
  factors = {}
  for name, of_site in numbers.items():
    factors[name] = np.ones(_size(name, sizes), np.float32)
    factors[name][check_numbers(name, of_site, sizes)] = 0
  return Masking('whole', factors, delta=1.0)


def kept(numbers: Numbers, sizes: Mapping[str, int], kind: str = 'whole') -> Masking:
  """Only these components of all sites."""
  check_choice('kind', kind, KINDS)
  factors = {}
  for name, of_site in numbers.items():
    factors[name] = np.zeros(_size(name, sizes), np.float32)
    factors[name][check_numbers(name, of_site, sizes)] = 1
  return Masking(kind, factors, others=0.0)


def scaled(factors: Mapping[str, Mapping[int, float]], sizes: Mapping[str, int]) -> Masking:
  """The model with these factors of components, {name of a site: {number: factor}}."""
  by_site = {}
  for name, of_site in factors.items():
    by_site[name] = np.ones(_size(name, sizes), np.float32)
    values = [*of_site.values()]
    if values:
      check(f'scaled: a factor of {name}', values, FiniteFloat)
    by_site[name][check_numbers(name, of_site, sizes)] = values
  return Masking('whole', by_site, delta=1.0)


def check_site(name: str, sizes: Mapping[str, int]) -> None:
  """Raises a UsageError if there is no such site."""
  if name not in sizes:
    shown = ', '.join(first_of([*sizes], _SHOWN))
    raise UsageError(f'There is no site {name!r}. Name one of these: {shown}.')


def _size(name: str, sizes: Mapping[str, int]) -> int:
  check_site(name, sizes)
  return sizes[name]


def check_numbers(name: str, numbers: Collection[int], sizes: Mapping[str, int]) -> list[int]:
  """The numbers of components of a site; raises a UsageError if it lacks one."""
  size = _size(name, sizes)
  listed: list[int] = [*numbers] if isinstance(numbers, Iterable) else [numbers]
  for number in listed:
    is_integer = isinstance(number, int | np.integer) and not isinstance(number, bool)
    if not is_integer or not 0 <= number < size:
      raise UsageError(f'{name} has no component {number!r}. Use numbers from 0 to {size - 1}.')
  return listed
