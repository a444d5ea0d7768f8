"""The command line of EleutherAI's lm-evaluation-harness, with the model `valkyrie`.

    python -m valkyrie.inference.harness run --model valkyrie --model_args model_dir=RUN --tasks ...

takes the arguments of `lm_eval`, and needs the package lm-eval.
"""

import importlib
import sys
from typing import Any

from valkyrie import packages
from valkyrie.distributed import console
from valkyrie.errors import ConfigurationError


@console.lasting_streams()
@console.program
def main() -> int | None:
  """Runs the harness's own command line, with the model `valkyrie`."""
  try:
    command: Any = importlib.import_module('lm_eval.__main__')
    importlib.import_module('valkyrie.inference.harness_model')
  except ModuleNotFoundError as error:
    raise ConfigurationError(
      f'The package {error.name} is missing. Install it: {packages.install("lm-eval")}'
    ) from None
  return command.cli_evaluate()


if __name__ == '__main__':
  sys.exit(main())
