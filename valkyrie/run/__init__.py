"""Training and evaluation: the run modes, and what they consist of."""
