"""Checkpoints on disk: written whole, verified, restored."""
