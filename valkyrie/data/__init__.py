"""Tokenized documents on disk, and batches of them by position."""
