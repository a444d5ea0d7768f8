"""Chunks of two rows in which documents end anywhere."""

import numpy as np
import tiny

ROWS = 2
CHUNKS = 3


def stream(size, pieces, seed):
  """Chunks [N, B, C] of two rows: documents that end anywhere, and padding of every extent.

  Returns (inputs, positions, segment_ids).
  """
  random = np.random.default_rng(seed)
  piece = size // pieces
  whole_chunks = iter(random.permutation([0, 0, 1, piece, size - 1, size]))
  positions, segment_ids = np.zeros((2, CHUNKS, ROWS, size), np.int32)
  for row in range(ROWS):
    position, segment = 10**7, 1
    left = int(random.integers(1, 2 * size))  # tokens until the document ends
    for chunk in range(CHUNKS):
      for t in range(size - next(whole_chunks)):
        if left == 0:
          position, segment = 0, segment + 1
          # Documents of one token, of one piece, and longer than a chunk.
          left = int(random.choice([1, 2, piece, size // 2, 2 * size]))
        positions[chunk, row, t], segment_ids[chunk, row, t] = position, segment
        position, left = position + 1, left - 1
  inputs = random.integers(0, tiny.VOCABULARY, positions.shape, np.int32)
  return inputs, positions, segment_ids
