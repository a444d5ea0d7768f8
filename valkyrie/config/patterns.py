"""Regular expressions of settings that choose names: each has to choose some."""

from collections.abc import Collection, Sequence
import itertools
import re

from valkyrie.config.suggest import did_you_mean
from valkyrie.errors import ConfigurationError

_WORD = re.compile(r'[^\W\d]\w*')


def check_all_choose(
  setting: str,
  patterns: Sequence[str],
  names: Collection[str],
  kind: str,
  optional: Collection[str] = (),
) -> None:
  """Raises a ConfigurationError for a pattern that chooses no name, but for the optional ones.

  A name belongs to the first pattern that is found in it. `kind` says what the names are.
  """
  taken: set[str] = set()
  for pattern in patterns:
    found = {name for name in names if re.search(pattern, name)}
    if not found and pattern not in optional:
      message = found_nowhere(setting, pattern, names, kind)
      raise ConfigurationError(f'{message} Correct it, or leave it out.')
    if found <= taken and pattern not in optional:
      raise ConfigurationError(
        f'{setting} has {pattern!r}, but earlier ones choose all {len(found)} {kind} in which it '
        'is found. Name it before them, or leave it out.'
      )
    taken |= found


def found_nowhere(setting: str, pattern: str, names: Collection[str], kind: str) -> str:
  """What is wrong with a setting whose pattern is found in none of these names."""
  few = ', '.join([*names][:3])
  return (
    f'{setting} has {pattern!r}, which is found in none of the {len(names)} {kind}, such as {few}.'
    f'{near_words(pattern, names)}'
  )


def near_words(pattern: str, names: Collection[str]) -> str:
  """' Did you mean X?' for the first word of a pattern that is in no name; '' if none is near."""
  known = set()
  for word in itertools.chain.from_iterable(map(_WORD.findall, names)):
    known.update([word, *word.split('_')])
  without_classes = re.sub(r'\\.|\[[^]]*\]', ' ', pattern)
  for word in _WORD.findall(without_classes):
    if not any(word in name for name in names):
      return did_you_mean(word, known)
  return ''
