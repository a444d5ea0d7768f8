"""What a resumed run must share with the one that saved: else it is another run, and says so."""

from collections.abc import Collection, Mapping
from importlib import metadata
import json
import platform
from typing import Any

from valkyrie.errors import ConfigurationError

# What --allow_changed may name.
KINDS = ('configuration', 'position', 'store', 'vocabulary', 'mesh', 'versions', 'executable')

_PACKAGES = ('jax', 'jaxlib', 'dm-haiku', 'optax', 'orbax-checkpoint', 'numpy')
_SHOWN = 10


def versions() -> dict[str, str]:
  """Of Python and of the packages that decide what a step computes."""
  return {
    'python': platform.python_version(),
    **{package: metadata.version(package) for package in _PACKAGES},
  }


def check(
  found: Mapping[str, Any], expected: Mapping[str, Any], allowed: Collection[str], place: str
) -> list[str]:
  """Compares a saved record with that of the run which is to go on from it.

  Args:
    found: the record of the checkpoint.
    expected: of this run, by KINDS; each a value, or a dict of named ones.
    allowed: the KINDS that may differ.
    place: of the checkpoint.

  Returns:
    What differs and is allowed to, a line each.

  Raises:
    ConfigurationError: naming everything that differs and is not.
  """
  differences = {
    kind: _compare(found.get(kind), value)
    for kind, value in expected.items()
    if kind != 'executable' or value  # known only when all is compiled, see `check_executable`
  }
  refused = [kind for kind in differences if differences[kind] and kind not in allowed]
  if refused:
    lines = [f'  {kind}: {line}' for kind in refused for line in differences[kind]]
    if len(lines) > _SHOWN:
      lines[_SHOWN:] = [f'  and {len(lines) - _SHOWN} more']
    raise ConfigurationError(
      f'{place} is of a run that differs from this one:\n' + '\n'.join(lines) + '\n'
      'Nothing was changed. Go back to what it was trained with, name another --model_dir, or go '
      f'on all the same with --allow_changed={",".join(refused)}.'
    )
  return [f'{kind}: {line}' for kind in differences for line in differences[kind]]


def check_executable(
  found: Mapping[str, Any], programs: Mapping[str, str], allowed: Collection[str], place: str
) -> None:
  """Compares the programs of this run with those of the record `found`, where both have one.

  All else agrees then, but for what no record holds: the compiler's flags, or the machine.

  Raises:
    ConfigurationError: as `check` does.
  """
  known = found.get('executable', {})
  both = {name: programs[name] for name in programs if name in known}
  check({'executable': {name: known[name] for name in both}}, {'executable': both}, allowed, place)


def _compare(found: Any, expected: Any) -> list[str]:
  expected = json.loads(json.dumps(expected))  # as it comes back: tuples are lists
  if not isinstance(found, dict) or not isinstance(expected, dict):
    return [] if found == expected else [f'was {found!r}, is {expected!r}']
  nothing = object()
  return [
    f'{name} was {_text(found, name)}, is {_text(expected, name)}'
    for name in sorted({*found, *expected})
    if found.get(name, nothing) != expected.get(name, nothing)
  ]


def _text(values: Mapping[str, Any], name: str) -> str:
  return repr(values[name]) if name in values else 'not set'
