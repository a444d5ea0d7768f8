"""Advice for a split with too few documents."""

from valkyrie.data.selection import Selection

ELSEWHERE = 'name other files that validate: --gin.held_out=\'"/data/validation"\''
_WITH_MACROS = ('text', 'prompts', 'conversations')  # gin/data has a file with `held_out` for them


def more_documents(selection: Selection, cut: int = 2048) -> str:
  """Ways to get more documents; if texts are cut at `cut` bytes, there are enough."""
  is_fineweb = selection.task.startswith('fineweb')
  has_options = is_fineweb or selection.task in _WITH_MACROS
  if selection.source is None or not has_options:
    return 'use another task, or another source of it'
  ways: list[str] = []
  flags: list[str] = []  # of a run
  options: dict[str, float | int] = {}  # of the task
  share = _larger_share(selection.options.get('held_out'))
  is_held_out = selection.split == 'validation'
  if is_held_out and share is not None:
    ways.append('hold out a larger share')
    flags.append(f'--gin.held_out={share}')
    options['held_out'] = share
  if selection.task == 'text' or is_fineweb:
    size = _smaller_cut(selection.options.get('cut', ''), cut)
    ways.append('cut documents that are texts')
    flags.append(f'--gin.text_cut={size}')
    options['cut'] = size
  listed_ways = ' and '.join(ways)
  if is_fineweb:
    return f'{listed_ways}: add {options} to TaskFeed.options'
  if not options:
    return ELSEWHERE
  run_flags = ' '.join(flags)
  option_flags = [f'--option={name}={value}' for name, value in options.items()]
  build_flags = ' '.join(option_flags)
  return (
    f'{listed_ways}: {run_flags}, with gin/data/mixture.gin '
    f"'options': {options} of a source, or {build_flags} of build_store; or {ELSEWHERE}"
  )


def _smaller_cut(configured: str, cut: int) -> int:
  """At most `cut` bytes, and at most half of the bytes at which documents are cut now."""
  if not configured.isdecimal():
    return cut
  half = int(configured) // 2 or 1
  return min(cut, half)


def _larger_share(held_out: str | None) -> float | None:
  """A larger share to hold out than the one that is set; None for files, or from a half on."""
  try:
    share = float(held_out or 0)
  except ValueError:
    return None
  if not share < 0.5:
    return None
  larger = min(0.5, 2 * share)
  return max(0.2, round(larger, 3))
