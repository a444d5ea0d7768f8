"""Haiku modules, and the pure functions of arrays that they are made of."""
