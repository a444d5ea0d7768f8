"""Fingerprints of compiled programs, and their comparison on resume."""

import json
import types
from typing import Any

import gin
import jax
import jax.numpy as jnp
import pytest
import tiny_run

from valkyrie import main
from valkyrie.checkpoint import manifest, steps
from valkyrie.distributed import consistency
from valkyrie.errors import ConfigurationError
from valkyrie.run import resume, trainer
from valkyrie.training.curriculum import Phase

WHOLE = 'def f(x):\n  return jnp.tanh(x @ x).sum() + {}'
DIVIDED = '\ndef g(x):\n  return jnp.tanh(x @ x).sum()\n\ndef f(x):\n  return g(x) + {}'


def compiled(constant, source=WHOLE):
  names: dict[str, Any] = {'jnp': jnp}
  exec(compile(source.format(constant), 'some_file.py', 'exec'), names)
  return jax.jit(names['f']).lower(jnp.ones((8, 8))).compile()


@pytest.fixture
def lines_in_key():
  """The suite keeps compiled programs; without this, one with other source lines is the same."""
  option = 'jax_compilation_cache_include_metadata_in_key'
  jax.config.update(option, True)
  yield
  jax.config.update(option, False)


@pytest.mark.usefixtures('lines_in_key')
def test_the_fingerprint_depends_on_the_computation_and_not_on_source_lines():
  first, moved, other = compiled(1.0), compiled(1.0, DIVIDED), compiled(2.0)
  assert first.as_text() != moved.as_text()
  assert consistency.fingerprint(first) == consistency.fingerprint(moved)
  assert consistency.fingerprint(first) != consistency.fingerprint(other)


def test_another_program_for_the_same_phase_is_refused_by_name():
  phase = Phase(chunk_size=8, chunks=2, backprop_chunks=2)
  settings: Any = types.SimpleNamespace(hunt_nan=False, grad_norm_by_layer=False)

  def programs(constant, train_steps=6):
    name = trainer._program_name(phase, train_steps, settings)
    return consistency.fingerprints({name: compiled(constant)})

  saved = {'executable': programs(1.0)}
  resume.check(saved, {'executable': programs(1.0)}, (), 'here')
  # The number of steps may always change.
  resume.check(saved, {'executable': programs(2.0, train_steps=7)}, (), 'here')
  resume.check({}, {'executable': programs(2.0)}, (), 'here')
  (line,) = resume.check(saved, {'executable': programs(2.0)}, ('executable',), 'here')
  assert line.startswith('executable: 2 x 8 tokens per row')
  with pytest.raises(ConfigurationError, match='executable: 2 x 8 tokens per row') as error:
    resume.check(saved, {'executable': programs(2.0)}, (), 'here')
  assert '--allow_changed=executable' in str(error.value)


def test_programs_of_a_compiler_that_times_kernels_may_change(tmp_path, capsys, monkeypatch):
  tiny_run.write_stores(tmp_path / 'data', 'letters', 'abc')
  (tmp_path / 'run.gin').write_text(tiny_run.gin_text(tmp_path / 'data'))

  def start(*flags):
    gin.clear_config(clear_constants=True)
    capsys.readouterr()
    flags = ('--gin.train_steps=4', '--gin.eval_every=1', '--gin.learning_rate=1e-30', *flags)
    files = (f'--gin_file={tmp_path / "run.gin"}', f'--model_dir={tmp_path / "run"}')
    return main.main([*files, *flags]), capsys.readouterr().err

  code, said = start('--gin.train.patience=1')
  assert code == 0 and 'stopped early' in said
  step = max((tmp_path / 'run' / 'checkpoints').iterdir(), key=lambda place: int(place.name))
  record = json.loads((step / 'record.json').read_text())
  record['executable'] = dict.fromkeys(record['executable'], 'another program')
  (step / 'record.json').write_text(json.dumps(record))
  (step / manifest.name(manifest.SHA256)).unlink()
  steps.write_manifest(step, int(step.name))
  code, said = start()
  assert code == ConfigurationError.exit_code and 'executable: 2 x 16 tokens per row' in said
  monkeypatch.setattr(consistency, 'is_autotuned', lambda devices: True)  # as on a GPU
  code, said = start()
  assert code == 0 and 'step 4/4' in said
  assert 'changed since the checkpoint: executable: 2 x 16 tokens per row' in said
  assert 'XLA has timed its kernels again' in said


def test_only_gpus_time_their_kernels():
  assert not consistency.is_autotuned(jax.devices())
