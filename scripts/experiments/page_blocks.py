"""Blocks of Markdown pages that commands write, between two comments of HTML."""


def with_block(page: str, begin: str, end: str, text: str) -> str:
  """The page with this text between the lines `begin` and `end`, the only ones that are so.

  Raises a ValueError unless the page has `begin` once, and `end` below it.
  """
  before, *rest = page.split(begin)
  if len(rest) != 1 or end not in rest[0]:
    raise ValueError(f'expected a page with {begin} once, and {end} below it. Add these lines.')
  _, _, behind = rest[0].partition(end)
  return f'{before}{begin}\n{text}\n{end}{behind}'
