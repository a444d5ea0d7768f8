"""JSON lines of the steps of a run, of which the last of each step counts."""

import json


def last_of_each_step(content: bytes) -> dict[int | bytes, bytes]:
  """{step: its last line, with its end}; what has no step is its own key, and stays."""
  return {_step(line): line for line in content.splitlines(keepends=True)}


def _step(line: bytes) -> int | bytes:
  try:
    return int(json.loads(line)['step'])
  except (ValueError, TypeError, KeyError):
    return line
