"""From a seqio task to batches: tokenised once into a store, then read by position."""
