"""The command line of EleutherAI's lm-evaluation-harness, with the model `valkyrie`.

    python -m valkyrie.inference.harness run --model valkyrie --model_args model_dir=RUN --tasks ...

takes the arguments of `lm_eval`, and needs the package lm-eval.
"""

import importlib
import sys
from typing import Any

from valkyrie import packages
from valkyrie.distributed import console
from valkyrie.errors import ConfigurationError, ValkyrieError, message_of


@console.lasting_streams()
def main() -> int | None:
  """Runs the harness's own command line, with the model `valkyrie`."""
  try:
    command: Any = importlib.import_module('lm_eval.__main__')
    importlib.import_module('valkyrie.inference.harness_model')
  except ModuleNotFoundError as error:
    advice = packages.install('lm-eval')
    print(f'valkyrie: The package {error.name} is missing. Install it: {advice}', file=sys.stderr)
    return ConfigurationError.exit_code
  try:
    return command.cli_evaluate()
  except ValkyrieError as error:
    print(f'valkyrie: {message_of(error)}', file=sys.stderr)
    return error.exit_code


if __name__ == '__main__':
  sys.exit(main())
