"""How the peers of learn.py read the store of a run: its training and its validation split."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from valkyrie.data.token_store import TokenStore
from valkyrie.monitoring.metrics import Metrics, position_metrics, text_metrics


class Window(NamedTuple):
  """The targets [first, end) of a document, predicted from the tokens that start at `begin`."""

  begin: int
  first: int
  end: int


def windows(length: int, size: int) -> Iterator[Window]:
  """The windows of a document. Together they score the targets 1 to length - 1, each once.

  A target at position size / 2 or later has size / 2 to size - 1 tokens before it.
  """
  half = size // 2
  for begin in range(0, max(length - half, 1), half):
    yield Window(begin, begin + half if begin else 1, min(begin + size, length))


def training_rows(store: TokenStore, rows: int, size: int, seed: int) -> Iterator[np.ndarray]:
  """Endless batches int64 [rows, size + 1]: inputs, and targets one token later.

  Rows are cut from the shuffled documents, and shuffled themselves.
  """
  random = np.random.default_rng(seed)
  while True:
    documents = random.permutation(len(store.lengths))
    lengths = store.lengths[documents]
    tokens = store.read(documents, np.zeros_like(lengths), lengths).astype(np.int64)
    starts = random.permutation((len(tokens) - 1) // size) * size
    for first in range(0, len(starts) - rows + 1, rows):
      yield np.stack([tokens[s : s + size + 1] for s in starts[first : first + rows]])


def validation(
  store: TokenStore, rows: int, size: int, nats_of: Callable[[np.ndarray], np.ndarray]
) -> Metrics:
  """The metrics of the split that `valkyrie.run.evaluator` has, too.

  Args:
    store: of the split.
    rows: windows that are read at a time.
    size: tokens of a window, even.
    nats_of: int64 [rows, size] -> the nats of the targets 1 to size - 1, [rows, size - 1].
  """
  losses, weights = np.zeros((2, 31))
  lengths = store.lengths.tolist()
  pending = [(n, window) for n, length in enumerate(lengths) for window in windows(length, size)]
  for at in range(0, len(pending), rows):
    now = pending[at : at + rows]
    tokens = np.zeros((len(now), size), np.int64)  # padding after the end changes nothing
    for row, (number, (begin, _, end)) in zip(tokens, now, strict=True):
      row[: end - begin] = store.read(*np.array([[number], [begin], [end - begin]]))
    for row, (_, (begin, first, end)) in zip(nats_of(tokens), now, strict=True):
      bins = np.log2(np.arange(first, end)).astype(int)
      np.add.at(losses, bins, row[first - begin - 1 : end - begin - 1])
      np.add.at(weights, bins, 1)
  return {
    **text_metrics(losses.sum(), weights.sum(), store.tokens_per_byte),
    **position_metrics(losses, weights),
  }
