"""The context of MLIR in which jax lowers programs: one for many, instead of one for each.

To make one registers every dialect, which takes half of the time of lowering a small program.
"""

import functools

from jax._src.interpreters import mlir

_context = functools.cache(mlir.make_ir_context)


def share() -> None:
  """Lowers all later programs in one context, which keeps their types and constants."""
  mlir.make_ir_context = _context


def renew() -> None:
  """Leaves the context, and what it keeps, to the garbage collector."""
  _context.cache_clear()
