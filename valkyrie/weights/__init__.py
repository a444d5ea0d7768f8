"""Weights of other runs and other programs, by the names of their tensors."""
