"""Decomposition of a trained model's matrices into components whose importance is learned."""
