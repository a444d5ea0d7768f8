"""Removal of passwords, keys and access tokens from gin texts."""

import re

REDACTED = '(redacted)'

_SECRET_NAME = re.compile(
  r'(?i:passw(or)?d|secret|credential|(api|access|private|signing)_?key|(access|auth|hf|api)_?token)'
)
# A statement of gin's own output, whose later lines are indented or close a bracket.
_STATEMENT = re.compile(r'^([\w./]+)( = )(.*(?:\n(?:[ \t]+|[\])}]).*)*)', re.MULTILINE)
_PIECE = r"""('([^'\\\n]|\\.)*'|"([^"\\\n]|\\.)*")"""
_STRING = re.compile(rf'{_PIECE}(\s+{_PIECE})*')  # gin splits long strings
_SECRET_IN_VALUE = re.compile(
  r"(?<=://)[^/@\s'\"]+(?=@)"  # user:password of a URL
  r"|(?<=[?&])[\w-]*(?:signature|sig|token|key)=[^&\s'\"]+"  # of a signed URL
  r'|\b(?:hf_|ghp_|sk-|AKIA)[A-Za-z0-9_-]{16,}',  # tokens with a known prefix
  re.IGNORECASE,
)


def redact(text: str) -> str:
  """Replaces strings that are secrets by their own form, or by the name that they are bound to."""

  def statement(match: re.Match) -> str:
    name, equals, value = match.groups()
    if _SECRET_NAME.search(name):
      value = _STRING.sub(repr(REDACTED), value)
    return name + equals + value

  return _SECRET_IN_VALUE.sub(REDACTED, _STATEMENT.sub(statement, text))
