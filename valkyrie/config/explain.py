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
  values = [_value(chain[-1]) for chain in ordered]
  last_values = '\n'.join(values)
  values = redact(last_values).splitlines()
  longest = max(map(len, values), default=0)
  width = min(longest, 60)
  lines = []
  for value, chain in zip(values, ordered, strict=True):
    place = _where(chain)
    lines.append(f'{value:{width}}  # {place}')
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
  if not replaced:
    return last
  listed = ', '.join(replaced)
  return f'{last}, replaces {listed}'


def _place(statement: Statement) -> str:
  """A file with its line, or a flag without its value, which the line has already."""
  if not statement.is_flag:
    return statement.where
  name, _, _ = statement.where.partition('=')
  return name
