"""A text under masks: importances of its tokens, and attention patterns of the last ones.

The patterns are of the model, and of the model under masks.
"""

from collections.abc import Iterator, Mapping, Sequence
import functools
from typing import NamedTuple

import jax
import numpy as np

from valkyrie.inference.reader import Reader
from valkyrie.lab.decomposition.activation_errors import layers_of
from valkyrie.lab.decomposition.masking import Masking
from valkyrie.lab.decomposition.passes import Passes
from valkyrie.models.attention.patterns import AttentionPattern, Patterns
from valkyrie.types import Params


class LayerPatterns(NamedTuple):
  """The weights of the last S tokens of a text of T tokens, float32 [H, S, 1 + T] each.

  The first column is of registers, the others are of the tokens. Each row adds up to 1.
  """

  clean: np.ndarray
  masked: np.ndarray


PatternsOfLayers = Mapping[str, LayerPatterns]  # by the names of the layers


class TextChunk(NamedTuple):
  """Importances g [T, C] of the T tokens of a chunk by the names of sites, and patterns of some."""

  importances: Mapping[str, np.ndarray]
  patterns: PatternsOfLayers


def of_text(
  passes: Passes,
  params: Params,
  tokens: np.ndarray,
  masks: Masking,
  queries: int,
) -> dict[str, LayerPatterns]:
  """{name of a layer of attention: its patterns}, from the first layer to the last.

  A model without attention has none, and the text is not read.

  Raises a ConfigurationError if the model cannot read so many tokens.
  """
  if not has_patterns(passes.reader, params):
    return {}
  chunks = read(passes, params, tokens, masks, queries)
  return joined([chunk.patterns for chunk in chunks], len(tokens))


def read(
  passes: Passes,
  params: Params,
  tokens: np.ndarray,
  masks: Masking,
  queries: int,
) -> Iterator[TextChunk]:
  """The chunks of a text, in which the last tokens have patterns; raises as `of_text`."""
  reader = passes.reader
  reader.check_length(len(tokens))
  factors = passes.factors(masks)
  carries = passes.fresh()
  first = max(0, len(tokens) - queries)
  for chunk, lengths in reader.chunks(carries.clean, [tokens[:first]]):
    found = passes.read(params, carries, chunk, lengths, *factors)
    carries = found.after
    yield TextChunk(passes.by_name(found.importances, int(lengths[0])), {})
  names = layers_of(reader.model.parameters())
  begin = first
  for chunk, lengths in reader.chunks(carries.clean, [tokens[first:]]):
    kinds = (Patterns(chunk.shape[1]),)
    found = passes.read(params, carries, chunk, lengths, *factors, kinds)
    carries = found.after
    count = int(lengths[0])
    clean, masked = (jax.device_get(dict(of.patterns or {})) for of in (found.clean, found.masked))
    patterns = {}
    for path, of_clean in clean.items():
      for layer, name in enumerate(names[path]):
        pair = [_of_layer(of, layer, begin, count) for of in (of_clean, masked[path])]
        patterns[name] = LayerPatterns(*pair)
    yield TextChunk(passes.by_name(found.importances, count), patterns)
    begin += count


def has_patterns(reader: Reader, params: Params) -> bool:
  """Whether a mixer of the model has attention patterns."""
  one = np.ones((1, 1), np.int32)
  ask = functools.partial(reader.apply, activations=(Patterns(1),))
  features, _ = jax.eval_shape(ask, params, reader.fresh(1), one, one[0])
  return bool(features.patterns)


def joined(chunks: Sequence[PatternsOfLayers], tokens: int) -> dict[str, LayerPatterns]:
  """The patterns of a text of so many tokens, in the order of the layers, from its chunks."""
  parts: dict[str, list[LayerPatterns]] = {}
  for patterns in chunks:
    for name, of_chunk in patterns.items():
      parts.setdefault(name, []).append(of_chunk)

  def whole(of_chunks):
    columns = [np.pad(x, ((0, 0), (0, 0), (0, 1 + tokens - x.shape[-1]))) for x in of_chunks]
    return np.concatenate(columns, axis=1)

  found = {}
  for name in sorted(parts, key=_number):
    clean, masked = zip(*parts[name], strict=True)
    found[name] = LayerPatterns(whole(clean), whole(masked))
  return found


def _of_layer(pattern: AttentionPattern, layer: int, begin: int, count: int) -> np.ndarray:
  """The weights [H, S, 1 + E] of the first `count` tokens of a chunk: of registers, and of tokens.

  The chunk begins at token `begin`, and ends at token E.
  """
  of_row = [np.exp(part[layer, 0, :count]) for part in pattern]
  registers, starts, before, chunk = of_row
  weights = np.zeros((*registers.shape[:2], 1 + begin + count), np.float32)
  weights[..., 0] = registers.sum(-1)
  of_tokens = weights[..., 1:]
  of_tokens[..., begin:] = chunk[..., :count]
  held = min(begin, before.shape[-1])
  of_tokens[..., begin - held : begin] += before[..., before.shape[-1] - held :]
  slots = min(begin, starts.shape[-1])
  of_tokens[..., :slots] += starts[..., :slots]
  return np.swapaxes(weights, 0, 1)


def _number(name: str) -> tuple[int, str]:
  """The number of a layer, such as 1 of 'layers.1.attention', and its name."""
  _, number, *_ = name.split('.')
  return int(number), name
