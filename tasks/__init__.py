"""Seqio tasks. Each module registers its tasks when it is imported."""
