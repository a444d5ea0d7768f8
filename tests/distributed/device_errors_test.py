"""Errors of devices are told from those of programs, of their memory and of a user's code."""

import jax
import jax.numpy as jnp
import pytest

from valkyrie.distributed import supervisor
from valkyrie.distributed.device_errors import device_error


@pytest.mark.parametrize(
  'text',
  [
    'INTERNAL: CUDA error: Failed to end stream capture: CUDA_ERROR_STREAM_CAPTURE_INVALIDATED',
    'INTERNAL: NCCL operation ncclGroupEnd() failed: unhandled system error',
    'UNAVAILABLE: a TPU does not answer',
    'DATA_LOSS: uncorrectable error of the memory\nwith a stack',
  ],
)
def test_a_failure_of_a_device_can_be_restarted(text):
  found = device_error(jax.errors.JaxRuntimeError(text))
  assert found is not None and text.splitlines()[0] in str(found)
  assert found.exit_code in supervisor.RETRYABLE


@pytest.mark.parametrize(
  'error',
  [
    jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: Out of memory allocating 5 bytes'),
    jax.errors.JaxRuntimeError('INTERNAL: cuGraphInstantiate: CUDA_ERROR_OUT_OF_MEMORY'),
    jax.errors.JaxRuntimeError('INVALID_ARGUMENT: Executable expected parameter 0 of size 4'),
    jax.errors.JaxRuntimeError('no status'),
    RuntimeError('INTERNAL: of another library'),
  ],
)
def test_other_errors_stay_what_they_are(error):
  assert device_error(error) is None


def test_an_error_of_a_callback_is_one_of_its_user():
  def fail(x):
    raise ValueError('a bug')

  def call(x):
    return jax.pure_callback(fail, jax.ShapeDtypeStruct((), jnp.float32), x)

  with pytest.raises(jax.errors.JaxRuntimeError, match='INTERNAL') as raised:
    jax.block_until_ready(jax.jit(call)(1.0))
  assert device_error(raised.value) is None
