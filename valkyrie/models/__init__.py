"""Haiku modules, and the pure functions of arrays below them."""
