"""Seqio tasks. The import of a module registers its tasks."""
