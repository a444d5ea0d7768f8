"""Fingerprints of compiled programs, and their comparison on resume."""

import jax
import jax.numpy as jnp
import pytest

from valkyrie.checkpoint import compatibility
from valkyrie.distributed import program_fingerprint
from valkyrie.errors import ConfigurationError
from valkyrie.run import trainer
from valkyrie.training.curriculum import Phase

WHOLE = 'def f(x):\n  return jnp.tanh(x @ x).sum() + {}'
DIVIDED = '\ndef g(x):\n  return jnp.tanh(x @ x).sum()\n\ndef f(x):\n  return g(x) + {}'


def compiled(constant, source=WHOLE):
  names = {'jnp': jnp}
  exec(compile(source.format(constant), 'some_file.py', 'exec'), names)
  return jax.jit(names['f']).lower(jnp.ones((8, 8))).compile()


def test_the_fingerprint_depends_on_the_computation_and_not_on_source_lines():
  first, moved, other = compiled(1.0), compiled(1.0, DIVIDED), compiled(2.0)
  assert first.as_text() != moved.as_text()
  assert program_fingerprint.fingerprint(first) == program_fingerprint.fingerprint(moved)
  assert program_fingerprint.fingerprint(first) != program_fingerprint.fingerprint(other)


def test_another_program_for_the_same_phase_is_refused_by_name():
  phase = Phase(chunk_size=8, chunks=2, backprop_chunks=2)

  def programs(constant, train_steps=6):
    name = trainer._program_name(phase, train_steps, hunt_nan=False)
    return program_fingerprint.fingerprints({name: compiled(constant)})

  saved = {'executable': programs(1.0)}
  compatibility.check_executable(saved, programs(1.0), (), 'here')
  # The number of steps may always change.
  compatibility.check_executable(saved, programs(2.0, train_steps=7), (), 'here')
  compatibility.check_executable({}, programs(2.0), (), 'here')
  compatibility.check_executable(saved, programs(2.0), ('executable',), 'here')
  with pytest.raises(ConfigurationError, match='executable: 2 x 8 tokens per row') as error:
    compatibility.check_executable(saved, programs(2.0), (), 'here')
  assert '--allow_changed=executable' in str(error.value)
