"""Sites of a decomposition: matrices that multiply, each beside the factors of its components.

A site is a matrix W [d_in, d_out] with C components, the rank-one matrices V[:, c] U[c, :] of
V [d_in, C] and U [C, d_out]. Without masks it computes x W, bit for bit. With masks it computes

    y = where(route, ((x V) ∘ m) U + d (x W - (x V) U), x W)

(Bushnaq, Braun & Sharkey 2025, arXiv 2506.20790, section 3). `matrices.Decomposed` computes it.
"""

from collections.abc import Callable, Container, Mapping, Sequence
import dataclasses
import functools
import itertools
import re
from typing import Any, NamedTuple

import gin
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from valkyrie.errors import ConfigurationError, regular_expression
from valkyrie.models.declarations import Declared, Parameters
from valkyrie.models.layers import parameter
from valkyrie.models.matrices import Decomposed, Masks, component_axis
from valkyrie.models.stacks import place_of
from valkyrie.types import Array, Axes, Params

V = '_v'  # the ends of the names of the factors
U = '_u'
_LAYERS = re.compile(r'\d+(-\d+)?(,\d+(-\d+)?)*')


@gin.configurable
@dataclasses.dataclass(frozen=True)
class Sites:
  """The sites of a model, and the number of components of each.

  Attributes:
    components: (pattern, C) or (pattern, C, layers): a matrix has the C of the first entry whose
      regular expression is found in its path, as in model_info.txt, and whose layers it is in, such
      as '18' or '0,20-31'; others are no sites. Without layers, an entry is for all of them.
  """

  components: Sequence[tuple[str, int] | tuple[str, int, str]]

  def __post_init__(self):
    for entry in self.components:
      _checked(entry)

  @functools.cached_property
  def entries(self) -> tuple['Entry', ...]:
    """The entries of `components`."""
    return tuple(_checked(entry) for entry in self.components)

  def cuts(self, layers: int, period: int) -> list[int]:
    """The repeats of a pattern of `period` blocks whose layers are sites where those below are not.

    Raises a ConfigurationError if an entry names a layer that the model lacks.
    """
    for entry in self.entries:
      outside = [layer for layer in entry.layers or () if layer >= layers]
      if outside:
        raise ConfigurationError(
          f'Sites.components names layer {outside[0]} for {entry.pattern!r}, but the model has the '
          f'layers 0 to {layers - 1}. Name some of these.'
        )
    cuts = []
    below = self._entries_of_repeat(0, period)
    for repeat in range(1, layers // period):
      entries = self._entries_of_repeat(repeat, period)
      if entries != below:
        cuts.append(repeat)
      below = entries
    return cuts

  def _entries_of_repeat(self, repeat: int, period: int) -> list[list[bool]]:
    """Which entries are for each layer of a repeat."""
    first = repeat * period
    by_layer = []
    for layer in range(first, first + period):
      has_layer = [entry.has(layer) for entry in self.entries]
      by_layer.append(has_layer)
    return by_layer

  def getter(
    self,
    layer: int,
    prefix: str,
    masks: Mapping[str, Masks],
    inputs: dict[str, Array],
  ) -> Callable:
    """A Haiku getter of the sites among the matrices; `inputs` gets what they multiply.

    Args:
      layer: the number of the layer, or of the first one of a stack of equal layers.
      prefix: the beginning of the paths in this stack.
      masks: masks by path, of this layer.
      inputs: gets what each site multiplies, by path.
    """

    def get(following, whole: Array, context: hk.GetterContext) -> Any:
      whole = following(whole)
      declared = context.original_init
      path = prefix + context.full_name
      if not isinstance(declared, Declared) or declared.matrix is None:
        return whole
      entry = entry_of(self.entries, path, layer)
      if entry is None:
        return whole
      count = entry.count
      matrix = jax.eval_shape(declared.matrix, whole)
      d_in, d_out = matrix.shape
      axis_in, axis_out = declared.axes if whole.ndim == 2 else (None, None)

      def factor(end, shape, axes):
        fan_in, _ = shape
        normal = hk.initializers.RandomNormal(fan_in**-0.5)
        name = context.name + end
        return parameter(name, shape, normal, axes=axes, cast=declared.cast)

      v_axes = (axis_in, component_axis(axis_in))
      u_axes = (component_axis(axis_out), axis_out)
      v = factor(V, (d_in, count), v_axes)
      u = factor(U, (count, d_out), u_axes)

      site_masks = masks.get(path)

      def note(x):
        inputs[path] = x
        if site_masks is not None:
          *tokens, _ = x.shape
          _check_masks(path, site_masks, tuple(tokens), count)

      return Decomposed(whole, v, u, site_masks, note)

    return get


class Entry(NamedTuple):
  """An entry of `Sites.components`; `layers` is None for all."""

  pattern: str
  count: int
  layers: frozenset[int] | None

  def has(self, layer: int) -> bool:
    """Whether the entry is for this layer."""
    return self.layers is None or layer in self.layers


def entry_of(entries: Sequence[Entry], path: str, layer: int) -> Entry | None:
  """The entry that makes the matrix with this path in this layer a site; None if none does."""
  for entry in entries:
    if entry.has(layer) and re.search(entry.pattern, path):
      return entry
  return None


def _checked(entry: Any) -> Entry:
  """An entry of `Sites.components`; raises a ConfigurationError if it has another form."""
  match entry:
    case (str(pattern), int(count), *layers) if count > 0 and count is not True:
      regular_expression('Sites.components', pattern)
      match layers:
        case []:
          return Entry(pattern, count, None)
        case [str(text)] if _LAYERS.fullmatch(text) and all(map(len, _ranges(text))):
          return Entry(pattern, count, frozenset(itertools.chain(*_ranges(text))))
  raise ConfigurationError(
    f'Sites.components contains {entry!r}. Use pairs of a regular expression and a number of '
    "components of at least 1, such as ('mlp/', 64), or triples with the layers, such as ('mlp/', "
    "64, '18') or ('mlp/', 64, '0,20-31')."
  )


def _ranges(layers: str) -> list[range]:
  """The numbers of layers in a text such as '0,20-31'."""
  ranges = []
  for part in layers.split(','):
    first, _, last = part.partition('-')
    ranges.append(range(int(first), int(last or first) + 1))
  return ranges


def _check_masks(path: str, masks: Masks, tokens: tuple[int, ...], count: int) -> None:
  """Raises a ConfigurationError unless the masks of a site have the shapes of its inputs."""
  shapes = tuple(map(jnp.shape, masks))
  expected = (*tokens, count), tokens, tokens
  if shapes != expected:
    raise ConfigurationError(
      f'The masks, deltas and routes of {path} have the shapes {shapes}, but its {count} '
      f'components of {tokens} tokens need {expected}. Give each layer masks of these shapes.'
    )


def is_factor(name: str, names: Container[str]) -> bool:
  """Whether this name of a parameter is of the V or the U of another one."""
  matrix_name = name[: -len(V)]
  return name.endswith((V, U)) and matrix_name in names


class Site(NamedTuple):
  """A stacked site: its module and name, its layers L, and the shapes of its matrix and factors.

  first: the number of its first repeat of the pattern.
  axes: the logical axes of d_in and d_out.
  """

  module: str
  name: str
  first: int
  layers: int
  d_in: int
  d_out: int
  components: int
  matrix: Callable[[Array], Array]
  axes: Axes

  def target(self, params: Params) -> Array:
    """The matrices W [L, d_in, d_out]."""
    stored = params[self.module][self.name]
    return jax.vmap(self.matrix)(stored)

  def factors(self, params: Params) -> tuple[Array, Array]:
    """V [L, d_in, C] and U [L, C, d_out]."""
    group = params[self.module]
    v = group[self.name + V]
    u = group[self.name + U]
    return v, u


def sites_of(parameters: Parameters) -> dict[str, Site]:
  """The sites of a model by path, from the declarations of its parameters, in their order."""
  sites = {}
  for module, group in sorted(parameters.items()):
    for name in sorted(group):
      matrix = group[name].matrix
      if matrix is None or name + V not in group:
        continue
      v = group[name + V]
      u = group[name + U]
      layers, d_in, components = v.shape.shape
      d_out = u.shape.shape[-1]
      assert v.axes and u.axes, 'the getter declares the axes of factors'
      axes = v.axes[1], u.axes[2]
      path = f'{module}/{name}'
      place = place_of(module)
      first = place.first if place is not None else 0
      sites[path] = Site(module, name, first, layers, d_in, d_out, components, matrix, axes)
  return sites


def ordered(sites: Mapping[str, Site]) -> list[tuple[str, int]]:
  """The sites (path, layer) from the first layer to the last, and by path."""
  by_layer = []
  for path, site in sites.items():
    by_layer += [(site.first + layer, path, layer) for layer in range(site.layers)]
  return [(path, layer) for _, path, layer in sorted(by_layer)]


def by_name(
  values: Mapping[str, Array],
  sites: Mapping[str, Site],
  names: Mapping[str, Sequence[str]],
) -> dict[str, np.ndarray]:
  """{name of a site: its values} of values [L, ...] by path, from the first layer to the last.

  names: of the layers of each path, see `weights.named_tensors.names_of`.
  """
  fetched = jax.device_get(dict(values))
  return {names[path][layer]: fetched[path][layer] for path, layer in ordered(sites)}
