"""The modules of this package that define configurables."""

import pathlib

_PACKAGE = pathlib.Path(__file__).parents[1]

# The modules that define configurables. They are imported before gin is locked, since none can be
# registered later; their files are searched, since no room imports one above it.
CONFIGURABLE_MODULES = tuple(
  '.'.join(('valkyrie', *file.relative_to(_PACKAGE).with_suffix('').parts))
  for file in sorted(_PACKAGE.rglob('*.py'))
  if b'\n@gin.configurable' in file.read_bytes()
)
