"""The validation of scripts/learn: the same bytes for all models, however each reads them.

Scored are the bytes at position CONTEXT or later in their document, in documents that are cut at
LONGEST bytes. Ours read each document from its start, and carry their memory. The peers read
windows of WINDOW bytes inside the document, and score the second half of each, so that every scored
byte has CONTEXT to WINDOW - 1 bytes before it. EOS is not read and not scored.
"""

from collections.abc import Callable, Iterator, Sequence
import math
from typing import Any, NamedTuple

import numpy as np

from valkyrie.data import store_location
from valkyrie.data.token_store import Selection, TokenStore
from valkyrie.data.vocabularies import ByteVocabulary

CONTEXT = 512
WINDOW = 1024
LONGEST = 16384
VOCABULARY = ByteVocabulary()


class Window(NamedTuple):
  """The targets [first, end) of a document, predicted from the bytes that start at `begin`."""

  begin: int
  first: int
  end: int


def open_store(split: str) -> TokenStore:
  """The bytes of python_stdlib, the task of gin/data/python_stdlib.gin, built if missing."""
  return store_location.open_store(Selection('python_stdlib', split, VOCABULARY))


def sample(store: TokenStore, scored: int) -> list[np.ndarray]:
  """The first documents of the store with `scored` bytes to score, int32 [bytes] each."""
  documents, left = [], scored
  for number, tokens in enumerate(store.lengths.tolist()):
    length = min(tokens - 1, LONGEST, CONTEXT + left)  # without EOS
    if length > CONTEXT:
      documents.append(store.read(*np.array([[number], [0], [length]])))
      left -= length - CONTEXT
    if not left:
      break
  return documents


def windows(length: int) -> Iterator[Window]:
  """The windows of a document. Together they score the targets 1 to length - 1, each once."""
  stride = WINDOW - CONTEXT
  for begin in range(0, max(length - CONTEXT, 1), stride):
    yield Window(begin, begin + CONTEXT if begin else 1, min(begin + WINDOW, length))


def read_windows(
  documents: Sequence[np.ndarray], rows: int, nats_of: Callable[[np.ndarray], np.ndarray]
) -> list[np.ndarray]:
  """Nats of the targets of each document, as `summary` takes them.

  Args:
    documents: int32 [bytes] each.
    rows: windows that are read at a time.
    nats_of: int32 [rows, WINDOW] -> the nats of the targets 1 to WINDOW - 1, [rows, WINDOW - 1].
  """
  nats = [np.empty(len(document) - 1) for document in documents]
  pending = [(n, w) for n, document in enumerate(documents) for w in windows(len(document))]
  for at in range(0, len(pending), rows):
    now = pending[at : at + rows]
    tokens = np.zeros((len(now), WINDOW), np.int32)  # padding after the end changes nothing
    for row, (number, (begin, _, end)) in zip(tokens, now, strict=True):
      row[: end - begin] = documents[number][begin:end]
    for row, (number, (begin, first, end)) in zip(nats_of(tokens), now, strict=True):
      nats[number][first - 1 : end - 1] = row[first - begin - 1 : end - begin - 1]
  return nats


def summary(nats: Sequence[np.ndarray]) -> dict[str, Any]:
  """The result of a reading.

  Args:
    nats: float [length - 1] for each document, of its targets 1 to length - 1.

  Returns:
    bits_per_byte of the scored bytes, their number `scored`; and for each of the documents `bytes`,
    its length, and `by_position`, the sums of nats over the positions 2^k to 2^(k+1) - 1.
  """
  targets = np.concatenate([of_document[CONTEXT - 1 :] for of_document in nats])
  documents = []
  for of_document in nats:
    edges = 2 ** np.arange((len(of_document) + 1).bit_length()) - 1  # index 0 is position 1
    sums = np.add.reduceat(of_document, edges[edges < len(of_document)])
    documents.append({'bytes': len(of_document) + 1, 'by_position': sums.tolist()})
  return {
    'bits_per_byte': float(np.mean(targets, dtype=float)) / math.log(2),
    'scored': len(targets),
    'documents': documents,
  }
