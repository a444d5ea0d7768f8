"""The file or flag that set each macro and binding of a configuration, and those that it replaced.

`--run_mode=explain` prints a line for each, macros first, and starts nothing else.
"""

from collections.abc import Sequence

from valkyrie.config import check
from valkyrie.config.parse import Statement
from valkyrie.config.redact import redact


def explained(statements: Sequence[Statement]) -> str:
  """Lines `NAME = VALUE  # WHERE`, without secrets.

  Args:
    statements: of all files and flags, in order: the last one of a name is in force.
  """
  setters: dict[tuple[str, str, str], list[Statement]] = {}
  for statement in statements:
    for key in check.effective_bindings([statement]):
      setters.setdefault(key, []).append(statement)
  ordered = sorted(setters.values(), key=_order)
  values = redact('\n'.join(_value(chain[-1]) for chain in ordered)).splitlines()
  width = min(max(map(len, values), default=0), 60)
  lines = [
    f'{value:{width}}  # {_where(chain)}' for value, chain in zip(values, ordered, strict=True)
  ]
  return '\n'.join(lines)


def _order(chain: Sequence[Statement]) -> tuple[bool, str]:
  """Macros first, then the alphabet."""
  last = chain[-1]
  return not last.is_macro, last.name


def _value(statement: Statement) -> str:
  return f'{statement.name} = {statement.parsed.value!r}'


def _where(chain: Sequence[Statement]) -> str:
  """The place of the last statement, and those that it replaced, the latest first."""
  last, *replaced = [_place(statement) for statement in reversed(chain)]
  return f'{last}, replaces {", ".join(replaced)}' if replaced else last


def _place(statement: Statement) -> str:
  """A file with its line, or a flag without its value, which the line has already."""
  return statement.where.partition('=')[0] if statement.is_flag else statement.where
