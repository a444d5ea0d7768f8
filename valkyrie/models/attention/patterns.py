"""Attention patterns: how much some queries of a chunk read of each key, by the definition.

A pattern is what a softmax gives to the values: of a window, of a whole document, with registers
and document starts, see `longformer` and `full`. The mixers never form it; here each query is
scored with each key, in memory that grows with queries x keys. So few queries are asked for.
"""

from collections.abc import Iterable, Iterator
import contextlib
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from valkyrie.models.attention.document_cache import angles_at
from valkyrie.models.attention.kv_cache import KVCache
from valkyrie.models.attention.rotary import rotate
from valkyrie.models.attention.softmax import MASKED, same_document
from valkyrie.models.attention.windows import Queries, Windows
from valkyrie.models.precision import wide
from valkyrie.sharding import sequence_parallel
from valkyrie.types import Array

PATTERNS = 'patterns'  # the name of patterns among what a model returns


class Patterns(NamedTuple):
  """Asks for the patterns of so many queries of a chunk, evenly spaced, or of all if it has fewer.

  The last one is the last token of the chunk. Devices that share a chunk share the queries.
  """

  queries: int

  def at(self, time: int) -> np.ndarray:
    """The numbers of the queries among the tokens of a device's piece of a chunk, int [S]."""
    devices = sequence_parallel.size() if sequence_parallel.axes() else 1
    of_device = -(-self.queries // devices)
    count = min(of_device, time)
    ends = np.arange(1, count + 1) * time // max(count, 1)
    return ends - 1


class AttentionPattern(NamedTuple):
  """The logarithms of the weights of S queries, [B, S, H, N], by where the N keys are.

  The weights of all four add up to 1. The logarithm is about `MASKED` where a key is not visible.
  The queries of padding have finite, meaningless weights.

  registers: the learned keys; starts: the first tokens of the query's document, where they are in
    the carry and outside the window; before: the last tokens before the chunk, the oldest first;
    chunk: its tokens. Of a chunk that devices share, a window has this device's piece as `chunk`.
  """

  registers: Array
  starts: Array
  before: Array
  chunk: Array


class Sources(NamedTuple):
  """What the queries of a chunk may read, as in `AttentionPattern`; all keys are unrotated.

  registers: [R, J, K]. Where starts has g slots, slot i is token i of the document, and the tokens
    of the chunk with positions [B, T] below g are document starts, too.
  """

  registers: Array
  starts: KVCache
  before: KVCache
  chunk: KVCache
  positions: Array

  def of_heads(self, heads: slice) -> 'Sources':
    """What the queries of some key-value heads may read."""
    return Sources(
      self.registers[:, heads],
      self.starts.of_heads(heads),
      self.before.of_heads(heads),
      self.chunk.of_heads(heads),
      self.positions,
    )


def attention_pattern(
  queries: Queries,
  places: Array | np.ndarray,
  sources: Sources,
  windows: tuple[Windows, ...],
) -> AttentionPattern:
  """The pattern of queries q [B, S, H, K], unrotated, whose tokens are the `places` of the chunk.

  Args:
    queries: with their positions and documents.
    places: int [S].
    sources: what they read.
    windows: of all heads.
  """
  parts = []
  for seen in windows:
    of_heads = queries._replace(q=queries.q[:, :, seen.query_heads])
    parts.append(_of_heads(of_heads, places, sources.of_heads(seen.heads), seen))
  return jax.tree.map(lambda *x: jnp.concatenate(x, axis=2), *parts)


@contextlib.contextmanager
def noted(kinds: Iterable[Any], prefix: str) -> Iterator[dict[str, Any]]:
  """Yields {PATTERNS: {path: pattern}}, which the mixers that are called inside fill.

  It is empty unless `Patterns` are among the kinds. A path is the prefix with a module's name.
  """
  asked = [kind for kind in kinds if isinstance(kind, Patterns) and kind.queries]
  if not asked:
    yield {}
    return
  patterns = {}
  most = max(asked)

  def note(call, args, kwargs, context):
    mixer = context.module
    if context.method_name == '__call__' and hasattr(mixer, 'attention_pattern'):
      x, *_ = args
      at = most.at(x.shape[1])
      patterns[f'{prefix}{mixer.module_name}'] = mixer.attention_pattern(at, *args, **kwargs)
    return call(*args, **kwargs)

  with hk.intercept_methods(note):
    yield {PATTERNS: patterns}


def _of_heads(
  queries: Queries,
  places: Array | np.ndarray,
  sources: Sources,
  seen: Windows,
) -> AttentionPattern:
  """The pattern of heads that share a dilation."""
  rows, _, _, width = queries.q.shape
  registers = jnp.broadcast_to(sources.registers, (rows, *sources.registers.shape))
  slots = sources.starts.keys.shape[1]
  old = sources.before.keys.shape[1]
  time = sources.chunk.keys.shape[1]
  keys = jnp.concatenate([sources.before.keys.astype(queries.q.dtype), sources.chunk.keys], axis=1)
  documents = jnp.concatenate([sources.before.segment_ids, sources.chunk.segment_ids], axis=1)

  # Near keys, at their true distances; the oldest carried one is at place 0.
  query_places = old + jnp.asarray(places)[None]
  key_places = jnp.arange(old + time)[None]
  distance = query_places[:, :, None] - key_places[:, None]
  near = _is_near(distance, seen)
  most = old + time
  q = queries.q * width**-0.5
  turned_q = rotate(q, *angles_at(seen.rotary, most, width, q.dtype, query_places))
  turned_k = rotate(keys, *angles_at(seen.rotary, most, width, q.dtype, key_places))
  same = same_document(queries.segment_ids, documents)
  logits = _masked(_scores(turned_q, turned_k), near & same)
  logits_before, logits_chunk = jnp.split(logits, [old], axis=3)

  # Registers and document starts outside the window, at its edge.
  reach = seen.width * seen.dilation
  edge = jnp.full((1, 1), reach)
  edge_q = rotate(q, *angles_at(seen.rotary, reach + 1, width, q.dtype, edge))
  logits_registers = _scores(edge_q, registers.astype(q.dtype))
  start_distance = queries.positions[:, :, None] - np.arange(slots)[None, None]
  outside = (start_distance > 0) & ~_is_near(start_distance, seen)
  own = same_document(queries.segment_ids, sources.starts.segment_ids)
  starts = sources.starts.keys.astype(q.dtype)
  logits_starts = _masked(_scores(edge_q, starts), outside & own)
  if slots:
    is_start = (sources.positions < slots)[:, None]
    behind = ((distance > 0) & ~near)[:, :, old:]
    far = behind & is_start & same[:, :, old:]
    at_edge = _scores(edge_q, sources.chunk.keys)
    logits_chunk = jnp.where(far[:, :, None], at_edge, logits_chunk)

  parts = [logits_registers, logits_starts, logits_before, logits_chunk]
  log_weights = jax.nn.log_softmax(jnp.concatenate(parts, axis=3), axis=3)
  ends = np.cumsum([part.shape[3] for part in parts])
  return AttentionPattern(*jnp.split(log_weights, ends[:-1], axis=3))


def _is_near(distance: Array, seen: Windows) -> Array:
  """Whether keys so many tokens before a query are in its window."""
  inside = (distance >= 0) & (distance <= seen.width * seen.dilation)
  return inside & (distance % seen.dilation == 0)


def _masked(scores: Array, visible: Array) -> Array:
  """The scores [B, S, H, N] of what is visible, bool [B, S, N]."""
  return jnp.where(visible[:, :, None], scores, MASKED)


def _scores(q: Array, k: Array) -> Array:
  """q [B, S, H, K] with k [B, N, J, K] -> [B, S, H, N] in the wide dtype."""
  rows, count, heads, width = q.shape
  kv_heads = k.shape[2]
  by_group = q.reshape(rows, count, kv_heads, heads // kv_heads, width)
  dtype = wide(q.dtype)
  scores = jnp.einsum('bsjgk,bnjk->bsjgn', by_group, k, preferred_element_type=dtype)
  return scores.reshape(rows, count, heads, k.shape[1])
