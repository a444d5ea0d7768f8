"""Removal of passwords, keys and access tokens from gin texts."""

import re

REDACTED = '(redacted)'

_NAME = (
  r'(?i:passw(?:or)?d|pwd|secret|credential|authorization|bearer'
  r'|(?:api|access|private|signing|account|wandb)_?key|(?:access|auth|hf|api|bot)_?token'
  r'|(?<![a-z])auth(?![a-z_])|(?<![a-z_])token(?![a-z_]))'  # not author, not eos_token
)
_SECRET_NAME = re.compile(_NAME)
# A statement of gin's own output, whose later lines are indented or close a bracket.
_STATEMENT = re.compile(r'^([\w./]+)( = )(.*(?:\n(?:[ \t]+|[\])}]).*)*)', re.MULTILINE)
_PIECE = r"""(?:'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*")"""
_STRING = re.compile(rf'{_PIECE}(?:\s+{_PIECE})*')  # gin splits long strings
# A key of a dict, and its value: strings, a macro, or brackets of these.
_ITEM = re.compile(
  rf"""((?P<quote>['"])[^'"\n]*{_NAME}[^'"\n]*(?P=quote)\s*:\s*)"""
  rf'({_STRING.pattern}|%[\w.]+|\([^()]*\)|\[[^\[\]]*\]|\{{[^{{}}]*\}})'
)
_MACRO = re.compile(r'%([\w.]+)')
_SECRET_IN_VALUE = re.compile(
  r"(?<=://)[^/@\s'\"]+(?=@)"  # user:password of a URL
  r"|(?<=[?&])[\w-]*(?:signature|sig|token|key)=[^&\s'\"]+"  # of a signed URL
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
    return name + equals + _ITEM.sub(lambda item: item[1] + hidden(item[3]), value)

  known = -1
  while known < len(macros):  # a macro may stand above the binding that reads it
    known = len(macros)
    text = _STATEMENT.sub(redacted, text)
  return in_value(text)


def in_value(text: str) -> str:
  """Replaces only strings that look like secrets: passwords in URLs, tokens with a known prefix."""
  return _SECRET_IN_VALUE.sub(REDACTED, text)
