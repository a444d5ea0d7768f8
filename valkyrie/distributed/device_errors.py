"""Errors of devices and their runtime, after which a new process may succeed."""

import re
import sys

from valkyrie.errors import DeviceError

# A library of the runtime reports by these that it failed, not that the program is wrong.
_STATUSES = ('INTERNAL', 'UNKNOWN', 'UNAVAILABLE', 'ABORTED', 'CANCELLED', 'DATA_LOSS',
             'DEADLINE_EXCEEDED')  # fmt: skip
# A smaller program is needed, or Python code that the program calls has raised an error.
_NOT_OF_A_DEVICE = re.compile(
  'RESOURCE_EXHAUSTED|out.of.memory|callback|Traceback \\(most recent call', re.IGNORECASE
)
_LONGEST = 300  # characters


def device_error(error: BaseException) -> DeviceError | None:
  """The error to end with if a device or its runtime failed; None for other errors.

  Other errors are a lack of memory, and what code of the user's, or a program of XLA, did wrong.
  """
  jax = sys.modules.get('jax')
  if jax is None or not isinstance(error, jax.errors.JaxRuntimeError):
    return None
  text = str(error)
  status = re.match('([A-Z_]+): ', text)
  is_of_device = status is not None and status[1] in _STATUSES
  if not is_of_device or _NOT_OF_A_DEVICE.search(text):
    return None
  first = text.splitlines()[0][:_LONGEST]
  return DeviceError(
    f'A device or its runtime failed: {first}\nRun the same command again: it continues from the '
    'newest checkpoint. valkyrie-supervise does so itself. If the error names CUDA graphs or comes '
    'again, try XLA_FLAGS=--xla_gpu_enable_command_buffer= (without a value), which turns CUDA '
    'graphs off.'
  )
