"""Checkpoints on disk: atomic saves, verification and restores."""
