"""What must not be written beside a run: passwords, keys and access tokens in gin bindings."""

import re

REDACTED = '(redacted)'

_SECRET_NAME = re.compile(
  r'(?i:passw(or)?d|secret|credential|(api|access|private|signing)_?key|(access|auth|hf|api)_?token)'
)
# A statement of gin's own output: later lines of it are indented or close a bracket.
_STATEMENT = re.compile(r'^([\w./]+)( = )(.*(?:\n(?:[ \t]+|[\])}]).*)*)', re.MULTILINE)
_PIECE = r"""('([^'\\\n]|\\.)*'|"([^"\\\n]|\\.)*")"""
_STRING = re.compile(rf'{_PIECE}(\s+{_PIECE})*')  # gin writes long ones in pieces
_SECRET_IN_VALUE = re.compile(
  r"(?<=://)[^/@\s'\"]+(?=@)"  # user:password of an address
  r"|(?<=[?&])[\w-]*(?:signature|sig|token|key)=[^&\s'\"]+"  # of a signed address
  r'|\b(?:hf_|ghp_|sk-|AKIA)[A-Za-z0-9_-]{16,}',  # tokens that say whose they are
  re.IGNORECASE,
)


def redact(text: str) -> str:
  """A gin text without the strings that its names, or they themselves, tell to be secrets."""

  def statement(match: re.Match) -> str:
    name, equals, value = match.groups()
    if _SECRET_NAME.search(name):
      value = _STRING.sub(repr(REDACTED), value)
    return name + equals + value

  return _SECRET_IN_VALUE.sub(REDACTED, _STATEMENT.sub(statement, text))
