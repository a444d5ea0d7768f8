"""The gated delta rule by the kernels of a library, deltanet-tpu, for TPUs.

They read slices of 128 tokens as `gated_delta` does, and keep the state in a core's memory from one
slice to the next (github.com/maelie-labs/deltanet-tpu, Apache 2.0). They differ in the decays
between two tokens, which are differences of sums over a slice, here without other documents.
"""

import importlib.util

import jax
import jax.numpy as jnp

from valkyrie.models.kernel_choice import Limits
from valkyrie.sharding import sequence_parallel
from valkyrie.sharding.mesh import platform
from valkyrie.types import Array

_SLICE = 128  # tokens
_WIDTH = 128  # of the keys, and of the values, of a head
# Of log α. After it nothing of a state is left, and the digits of weaker decays beside it are.
_STRONGEST = -50.0


def limits(key_width: int, value_width: int, *, learned_carry: bool) -> Limits:
  """Where the kernels run for heads of these widths."""
  return Limits(('tpu',), _SLICE, _misfit(key_width, value_width, learned_carry))


def _misfit(key_width: int, value_width: int, learned_carry: bool) -> str | None:
  if (key_width, value_width) != (_WIDTH, _WIDTH):
    return f'a head has {key_width} keys and {value_width} values, and needs {_WIDTH} of both'
  if learned_carry:
    return 'the kernels begin documents with zero, and LanguageModel.learned_carry = True'
  if sequence_parallel.axes():
    return 'the kernels read whole chunks, and devices share each chunk'
  if importlib.util.find_spec('deltanet_tpu') is None:
    return 'the package deltanet-tpu is missing; docs/performance.md makes an environment with it'
  if platform() == 'tpu' and jax.default_backend() != 'tpu':
    return 'the library compiles its kernels only where a TPU is'
  return None


def gated_delta_rule(
  q: Array,
  k: Array,
  v: Array,
  log_decay: Array,
  beta: Array,
  initial: Array,
  reset: Array,
) -> tuple[Array, Array]:
  """As `gated_delta.gated_delta_rule`, without a first state and over whole chunks."""
  from deltanet_tpu.gdn2 import chunk_gdn2  # noqa: PLC0415  (an extra)  # pyright: ignore

  # The library finds starts where the number of a document changes, so not at the first token.
  begins = reset[:, 0]
  initial = jnp.where(begins[:, None, None, None], 0, initial)
  document = jnp.cumsum(reset, axis=1, dtype=jnp.int32)
  log_decay = jnp.maximum(log_decay, _STRONGEST)
  log_decay = jnp.where(reset[..., None], 0, log_decay)  # no decay crosses a start
  return chunk_gdn2(
    q,
    k,
    v.astype(q.dtype),
    log_decay,
    beta,
    beta,
    scale=1.0,
    initial_state=initial,
    output_final_state=True,
    segment_ids=document,
    mask_lambda_by_doc=True,
  )
