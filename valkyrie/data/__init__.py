"""Tokenized documents on disk, and batches read from them by position."""
