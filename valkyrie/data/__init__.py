"""Tokenized documents on disk, and batches by position."""
