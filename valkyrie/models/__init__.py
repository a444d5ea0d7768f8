"""Haiku modules, and the functions of arrays below them; a wrong option is a ConfigurationError."""

import sys

from valkyrie.errors import ConfigurationError

if sys.flags.optimize:
  raise ConfigurationError(
    'Python runs with -O or PYTHONOPTIMIZE, which removes assert statements. Haiku keeps its state '
    'in some of them, and no model can be built. Unset PYTHONOPTIMIZE, and leave -O out.'
  )
