"""Removal of passwords, keys and access tokens from gin texts."""

import re

REDACTED = '(redacted)'
NAMED = re.compile(r'env:[A-Za-z_]\w*')  # a secret of the environment
RECORDED = re.compile(rf'.*{re.escape(REDACTED)}.*|{NAMED.pattern}', re.DOTALL)  # for a secret

_NAME = (
  r'(?i:pass(?:w(?:or)?d|phrase)|pwd|secret|credential|authorization|bearer|cookie|web[-_]?hook'
  r'|(?:api|access|private|signing|account|wandb)[-_]?key|(?:access|auth|hf|api|bot)[-_]?token'
  r'|(?<![a-z])auth(?![a-z_])|(?<![a-z_])token(?![a-z_]))'  # not author, not eos_token
)
_SECRET_NAME = re.compile(_NAME)
# A statement of gin's own output, whose later lines are indented or close a bracket.
_STATEMENT = re.compile(r'^([\w./]+)( = )(.*(?:\n(?:[ \t]+|[\])}]).*)*)', re.MULTILINE)
_PIECE = r"""(?:'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*")"""
_STRING = re.compile(rf'{_PIECE}(?:\s+{_PIECE})*')  # gin splits long strings
# A key of a dict, or a flag in a list, before its value.
_KEY = re.compile(
  rf"""(?P<quote>['"])(?:[^'"\n]*{_NAME}[^'"\n]*(?P=quote)\s*:"""
  rf"""|--[^'"\n=]*{_NAME}[^'"\n=]*(?P=quote)\s*,)\s*"""
)
_TOKEN = re.compile(rf"""{_STRING.pattern}|[^'"]""")
_MACRO = re.compile(r'%([\w.]+)')
_SECRET_IN_VALUE = re.compile(
  # user:password of a URL, whose password may have a slash or an @; no port.
  r"(?<=://)(?:[^/@\s'\":]*:(?!\d+(?:/|$))[^\s'\"]+|[^/@\s'\"]+)(?=@)"
  # A signature or key in a URL, or in an argument of a program.
  r'|(?:(?<=[?&])|(?<=--))[\w-]*(?:signature|sig|token|key|passw(?:or)?d|passphrase|pwd|secret)'
  r"=[^&\s'\"]+"
  r'|\bbearer\s+[\w.~+/=-]{6,}'
  r"|(?:(?<=hooks\.slack\.com/services/)|(?<=/api/webhooks/))[^\s'\"]+"
  # Tokens with a known prefix.
  r'|\b(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[abprs]-|AKIA|AIza)[A-Za-z0-9_-]{16,}',
  re.IGNORECASE,
)


def redact(text: str) -> str:
  """Replaces strings that look like secrets, or are bound to a name of a secret.

  The name may be a binding, a macro, a key of a dict, or a binding that reads a macro.
  """
  macros: set[str] = set()

  def hidden(value: str) -> str:
    macros.update(_MACRO.findall(value))
    return _STRING.sub(repr(REDACTED), value)

  def redacted(match: re.Match) -> str:
    name, equals, value = match.groups()
    if _SECRET_NAME.search(name) or name in macros:
      return name + equals + hidden(value)
    shown = ''
    place = 0
    for key in _KEY.finditer(value):
      begin = key.end()
      if begin > place:  # otherwise it is in a value that is hidden already
        end = _end(value, begin)
        shown += value[place:begin]
        shown += hidden(value[begin:end])
        place = end
    return name + equals + shown + value[place:]

  known = -1
  while known < len(macros):  # a macro may come before the binding that reads it
    known = len(macros)
    text = _STATEMENT.sub(redacted, text)
  return in_value(text)


def _end(text: str, begin: int) -> int:
  """The end of a value that begins there: a comma or a bracket that does not belong to it."""
  depth = 0
  for token in _TOKEN.finditer(text, begin):
    if token[0] in '([{':
      depth += 1
    elif token[0] in ')]}':
      depth -= 1
    if depth < 0 or (not depth and token[0] == ','):
      return token.start()
  return len(text)


def in_value(text: str) -> str:
  """Replaces only strings that look like secrets: passwords in URLs, tokens with a known prefix."""
  return _SECRET_IN_VALUE.sub(REDACTED, text)
