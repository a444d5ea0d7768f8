"""Attention patterns of the last tokens of a text: of the model, and of the model under masks."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np

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


def of_text(
  passes: Passes,
  params: Params,
  tokens: np.ndarray,
  masks: Masking,
  queries: int,
) -> dict[str, LayerPatterns]:
  """{name of a layer of attention: its patterns}, from the first layer to the last.

  Raises a ConfigurationError if the model cannot read so many tokens.
  """
  reader = passes.reader
  reader.check_length(len(tokens))
  factors = passes.factors(masks)
  carries = passes.fresh()
  first = max(0, len(tokens) - queries)
  for chunk, lengths in reader.chunks(carries.clean, [tokens[:first]]):
    _, _, carries = passes.read(params, carries, chunk, lengths, *factors)
  names = layers_of(reader.model.parameters())
  parts: dict[str, list[LayerPatterns]] = {}
  begin = first
  for chunk, lengths in reader.chunks(carries.clean, [tokens[first:]]):
    kinds = (Patterns(chunk.shape[1]),)
    *both, carries = passes.read(params, carries, chunk, lengths, *factors, kinds)
    count = int(lengths[0])
    clean, masked = (jax.device_get(dict(features.patterns or {})) for features in both)
    for path, of_clean in clean.items():
      for layer, name in enumerate(names[path]):
        pair = [_of_layer(of, layer, begin, count) for of in (of_clean, masked[path])]
        parts.setdefault(name, []).append(LayerPatterns(*pair))
    begin += count
  return _joined(parts, len(tokens))


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


def _joined(parts: Mapping[str, list[LayerPatterns]], tokens: int) -> dict[str, LayerPatterns]:
  """The chunks of each layer, in the order of the layers."""

  def whole(chunks):
    columns = [np.pad(x, ((0, 0), (0, 0), (0, 1 + tokens - x.shape[-1]))) for x in chunks]
    return np.concatenate(columns, axis=1)

  found = {}
  for name in sorted(parts, key=_number):
    clean, masked = zip(*parts[name], strict=True)
    found[name] = LayerPatterns(whole(clean), whole(masked))
  return found


def _number(name: str) -> tuple[int, str]:
  """The number of a layer, such as 1 of 'layers.1.attention', and its name."""
  _, number, *_ = name.split('.')
  return int(number), name
