"""Certificates of a tiny run, changes that reduce its memory, and names of TPU slices."""

from importlib import metadata
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
from unittest import mock

import gin
import jax
import pytest
import tiny_run

from valkyrie import main
from valkyrie.config.load import load_gin, override_gin
from valkyrie.errors import ConfigurationError
from valkyrie.lab.certificates import certificate, precompile, topologies
from valkyrie.sharding import ambient
from valkyrie.sharding.partitioner import Partitioner
from valkyrie.training.curriculum import Curriculum, Phase

ROOT = pathlib.Path(__file__).parents[2]
NO_LIBTPU = importlib.util.find_spec('libtpu') is None
needs_libtpu = pytest.mark.skipif(NO_LIBTPU, reason="needs libtpu: pip install '.[tpu]'")
QUICK = (
  '--gin.LanguageModel.remat_policy=None',
  '--gin.LongformerAttention.document_start=0',
  '--gin.Block.mixers=(@S5,)',
  '--gin.LanguageModel.vocabulary_size=384',  # without padding, which would add products
)


def ask(model_dir, *flags, topology=None, **options):
  """The certificates of a gin file whose data do not exist."""
  gin.clear_config(clear_constants=True)
  file = model_dir.with_suffix('.gin')
  file.write_text(
    tiny_run.gin_text(model_dir / 'no data', mixers=tiny_run.BOTH, quick='', **options)
  )
  load_gin([str(file)], (*QUICK, *flags), modules=main.CONFIGURABLE_MODULES)
  precompile.precompile(str(model_dir), topology)
  return json.loads((model_dir / 'precompile.json').read_text())


@pytest.fixture(scope='module')
def certificates(tmp_path_factory):
  path = tmp_path_factory.mktemp('precompile') / 'run'
  return ask(path, partition='zero1', curriculum='short_then_long')


def test_every_phase_has_all_fields(certificates):
  assert [c['phase'] for c in certificates] == [0, 1]
  for c in certificates:
    assert {
      'topology',
      'compiler',
      'chips',
      'parameters',
      'argument_bytes',
      'temporary_bytes',
      'total_bytes',
      'hbm_bytes',
      'compile_seconds',
      'flops_per_token',
      'collective_bytes',
      'layout',
      'rows',
      'fits',
      'executed_flops',
      'hbm_traffic_bytes',
      'largest_collective_in_loops',
      'instructions',
      'code_bytes',
    } <= c.keys()
    assert (c['chips'], c['rows'], c['topology'], c['fits']) == (8, 8, None, None)
    assert c['compiler'] == f'jaxlib {metadata.version("jaxlib")}'
    assert c['activations'] == {'batch': ['data'], 'time': [], 'activation': []}
    parts = c['argument_bytes'] + c['temporary_bytes'] + c['output_bytes'] - c['alias_bytes']
    assert c['total_bytes'] == parts


def test_the_text_names_what_is_sent_between_nodes(certificates):
  inside = certificate.text(certificates[0])
  between = certificate.text({**certificates[0], 'dcn_bytes': 2_000_000})
  assert 'between nodes' not in inside
  assert ', 0.002 GB of it between nodes or slices' in between


def test_zero1_sends_weights_and_gradients_once_per_step(certificates):
  """A device gathers the 7/8 of each parameter that it lacks. No loop sends as much."""
  for c in certificates:
    sent, parameters = c['collective_bytes'], 4 * c['parameters']
    assert 0.7 * parameters <= sent['all-gather'] <= parameters
    reduced = sent.get('reduce-scatter', 0) + sent.get('all-reduce', 0)
    assert 0.7 * parameters <= reduced <= 2 * parameters
    assert (c['largest_collective_in_loops'] or {'bytes': 0})['bytes'] < parameters / 100


def test_a_program_executes_the_products_of_the_model(tmp_path):
  """Those of the forward pass, and twice as many backwards, where nothing is computed again."""
  (c,) = ask(
    tmp_path / 'run',
    '--gin.LanguageModel.remat_policy=None',
    '--gin.StepSettings.remat_chunks=False',
    partition='zero1',
  )
  assert c['useful_flops'] == c['flops_per_token'] * c['tokens_per_step'] / c['chips']
  assert c['executed_flops'] == pytest.approx(c['useful_flops'], rel=0.1)


def test_a_step_that_does_not_fit_ends_with_78_and_a_recommendation(tmp_path, capsys):
  with pytest.raises(ConfigurationError) as caught:
    ask(
      tmp_path / 'run',
      '--gin.precompile.hbm_bytes=1000',
      '--gin.precompile.layouts=("gin/partition/data.gin", "gin/partition/zero1.gin")',
      '--gin.Partitioner.mesh=(("data", 8),)',  # data.gin has -1, which is the same
      '--gin.LanguageModel.layers=1',
      '--gin.chunk_size=6',
      '--gin.chunks=1',
      '--gin.backprop_chunks=1',
      '--gin.StepSettings.remat_chunks=False',
      partition='data',
    )
  message = str(caught.value)
  assert caught.value.exit_code == 78
  assert 'per device. A device has 0.00 GiB' in message
  assert '--gin.chunk_size=3 --gin.chunks=2 --gin.backprop_chunks=2: ' in message
  assert '--gin.StepSettings.remat_chunks=True: ' in message
  assert '--gin.batch_size=4: not possible: batch_size=4 does not divide' in message
  assert 'gin/partition/zero1.gin: ' in message and 'gin/partition/data.gin' not in message
  assert 'No single change is enough. Recommended: add ' in message
  (found,) = json.loads((tmp_path / 'run' / 'precompile.json').read_text())
  assert found['fits'] is False
  assert 'DOES NOT FIT' in capsys.readouterr().out


def test_a_gpu_names_the_memory_that_a_program_may_use(tmp_path, monkeypatch):
  gpu = mock.Mock(memory_stats=lambda: {'bytes_limit': 2**28})
  monkeypatch.setattr(jax, 'local_devices', lambda: [gpu])
  (found,) = ask(tmp_path / 'run', partition='zero1')
  assert found['hbm_bytes'] == 2**28 and found['fits']
  gpu.memory_stats = lambda: {}  # a GPU without a pool
  (found,) = ask(tmp_path / 'run', partition='zero1')
  assert found['hbm_bytes'] is None and found['fits'] is None


def test_memory_that_a_compiler_refuses_has_the_arguments_added(tmp_path, monkeypatch):
  """libtpu's message names only the temporaries."""
  words = 'the total memory required for HLO temporaries (16.50G) exceeds available HBM (15.75G).'
  error = jax.errors.JaxRuntimeError(f'RESOURCE_EXHAUSTED: Ran out of memory on HBM, {words}')
  (c,) = ask(tmp_path / 'fits', partition='zero1')
  monkeypatch.setattr(jax.stages.Lowered, 'compile', mock.Mock(side_effect=error))
  with pytest.raises(ConfigurationError, match=r'Phase 0 needs 16\.50 GiB per device'):
    ask(tmp_path / 'refused', '--gin.precompile.layouts=()', partition='zero1')
  (refused,) = json.loads((tmp_path / 'refused' / 'precompile.json').read_text())
  assert refused['refused'] == str(error) and not refused['fits']
  batch = 5 * 4 * c['rows'] * c['chunks'] * c['chunk_size'] // c['chips']
  assert refused['total_bytes'] == int(16.5 * 2**30) + c['argument_bytes'] - batch


def test_chunks_are_shortened_until_the_step_fits(tmp_path):
  file = tmp_path / 'run.gin'
  file.write_text(tiny_run.gin_text(tmp_path, mixers=tiny_run.BOTH, quick=''))
  load_gin([str(file)], modules=main.CONFIGURABLE_MODULES)

  def one_byte_per_token():
    size = gin.query_parameter('%chunk_size')
    assert size * gin.query_parameter('%chunks') == size * gin.query_parameter('%backprop_chunks')
    return {'fits': size <= 4, 'total_bytes': size}

  worst = {'phase': 0, 'total_bytes': 16, 'hbm_bytes': 4, 'rows': 1}
  worst |= {'chunk_size': 16, 'chunks': 2, 'backprop_chunks': 2}
  same = ['gin/partition/data.gin']  # the same layout on one device
  with ambient.within(devices=jax.devices()[:1]):
    said = precompile.advice(worst, same, one_byte_per_token, Partitioner).splitlines()
  fits = '--gin.chunk_size=4 --gin.chunks=8 --gin.backprop_chunks=8'
  assert [line.strip().partition(':')[0] for line in said[1:-2]] == [
    '--gin.chunk_size=8 --gin.chunks=4 --gin.backprop_chunks=4', fits,
  ]  # fmt: skip
  assert said[-1] == f'Recommended: add {fits}'


def test_the_fastest_change_that_fits_is_recommended():
  before = {'total_bytes': 100}
  slow = (
    ('slow',),
    {'fits': True, 'total_bytes': 5, 'estimated_tokens_per_second_per_chip': [1.0, 0.4]},
  )
  fast = (
    ('fast',),
    {'fits': True, 'total_bytes': 9, 'estimated_tokens_per_second_per_chip': [2.0, 0.3]},
  )
  less = (('less',), {'fits': False, 'total_bytes': 50})
  more = (('more',), {'fits': False, 'total_bytes': 150})
  refused = (('refused',), {'fits': False, 'total_bytes': None})
  assert precompile.best([slow, fast, less], before).endswith('add fast')
  assert 'add less, ' in precompile.best([refused, more, less], before)
  assert 'No change reduces it' in precompile.best([refused, more], before)


def test_override_gin_restores_the_configuration(tmp_path):
  file = tmp_path / 'run.gin'
  file.write_text(tiny_run.gin_text(tmp_path))
  load_gin([str(file)], modules=main.CONFIGURABLE_MODULES)
  before = gin.config_str()
  with override_gin(['gin/partition/data.gin'], ['--gin.chunk_size=8']):
    assert gin.query_parameter('%chunk_size') == 8
    assert gin.query_parameter('Partitioner.mesh') == (('data', -1),)
  assert gin.config_str() == before
  with (
    pytest.raises(ConfigurationError, match='no gin file of this run defines %chunk_sise'),
    override_gin([], ['--gin.chunk_sise=8']),
  ):
    pass


@pytest.mark.parametrize(
  'name, message',
  [
    ('v9:4x4', "chip 'v9' is unknown. Use one of v4, v5e, v5p, v6e"),
    ('V4:4x4x2', "chip 'V4' is unknown.*Did you mean v4"),
    ('v4', 'the sides of the slice are missing or invalid. Write them as in v4:'),
    ('v4:4x4x2x2', 'the sides of the slice are missing or invalid'),
    ('v4-64', r'named by its sides here. Use one of v4:4x4x2 \(32 chips\)'),
    ('2xv6e-16', r'named by its sides here. Use one of v6e:4x4 \(16 chips\)'),
    ('v4:3x3x3', r'one of the nearest: .*v4:4x4x2 \(32 chips\)'),
    ('v5e:6x6', r'one of the nearest: .*v5e:8x4 \(32 chips\)'),
    ('v6e:2x2x2', 'v6e has no slice of this shape'),
    ('v4:16x16x16', r'one of the nearest: .*v4:8x8x8 \(512 chips\)'),
    ('0xv4:4x4x2', "chip '0xv4' is unknown"),
    ('2x', "chip '' is unknown"),
    ('2xv4:3x3x3', 'v4 has no slice of this shape'),
  ],
)
def test_slices_that_do_not_exist_are_refused(name, message):
  with pytest.raises(ConfigurationError, match=message) as caught:
    topologies.parse(name)
  assert caught.value.exit_code == 78


@pytest.mark.parametrize(
  'name, parsed',
  [
    ('v4:4x4x2', (1, 'v4', (4, 4, 2))),
    ('v4:2x2x1', (1, 'v4', (2, 2, 1))),
    ('4xv5p:8x8x8', (4, 'v5p', (8, 8, 8))),
    ('12xv6e:16x16', (12, 'v6e', (16, 16))),
  ],
)
def test_names_of_slices_are_parsed(name, parsed):
  assert topologies.parse(name) == parsed


def child(code):
  """Runs code in a Python process that has not loaded libtpu."""
  environment = {name: value for name, value in os.environ.items() if name != 'TPU_LIBRARY_PATH'}
  return subprocess.run(
    [sys.executable, '-c', code],
    cwd=ROOT,
    env=environment,
    capture_output=True,
    text=True,
    check=False,
  )


def test_a_missing_libtpu_is_reported_with_its_installation():
  done = child(
    'import sys\n'
    "sys.modules['libtpu'] = None\n"
    'from valkyrie.lab.certificates import topologies\n'
    'from valkyrie.errors import ConfigurationError\n'
    'try:\n'
    "  topologies.devices('v4:2x2x1')\n"
    'except ConfigurationError as error:\n'
    '  print(error)\n'
  )
  assert f"{sys.executable} -m pip install 'jax[tpu]'" in done.stdout, done.stderr


@needs_libtpu
def test_the_certificate_of_a_tpu_slice(tmp_path):
  """The TPU compiler, on a small slice, gives all that the estimates need."""
  done = child(
    'import sys; sys.path[:0] = ["tests/lab", "tests/support"]\n'
    'import pathlib, precompile_test\n'
    f'path = pathlib.Path({str(tmp_path / "run")!r})\n'
    "precompile_test.ask(path, '--gin.LanguageModel.layers=1', '--gin.chunks=1', "
    "'--gin.backprop_chunks=1', partition='zero1', topology='v4:2x2x1')\n"
  )
  assert done.returncode == 0, done.stderr
  (c,) = json.loads((tmp_path / 'run' / 'precompile.json').read_text())
  assert (c['device_kind'], c['chips'], c['hbm_bytes']) == ('TPU v4', 4, int(30.75 * 2**30))
  assert c['fits'] and c['collective_bytes']['all-gather'] > 0
  assert c['compiler'] == f'libtpu {metadata.version("libtpu")}'
  parts = c['estimated_seconds_by_part']
  assert {'products', 'scan', 'memory', 'communication'} == set(parts)
  both = [sum(seconds) for seconds in zip(*parts.values(), strict=True)]
  assert both == pytest.approx([c['estimated_instruction_seconds'], c['estimated_cycles_seconds']])
  longest = max(c['estimated_compute_seconds'], c['estimated_memory_seconds'])
  assert longest < both[0] < both[1]
  assert c['executed_instructions'] > 100
  assert 0 < c['estimated_share_of_peak'][1] < c['estimated_share_of_peak'][0] < 1


def test_how_long_a_run_takes_by_the_estimates_of_its_phases():
  curriculum = Curriculum([Phase(8, 1, 1, steps=100), Phase(16, 1, 1)])
  found = [
    {'estimated_instruction_seconds': 36.0, 'estimated_cycles_seconds': 72.0},
    {'estimated_instruction_seconds': 3.6, 'estimated_cycles_seconds': 3.6},
  ]
  said = precompile.duration(curriculum, 1100, found)
  assert said is not None and said.startswith('1,100 steps take 2.0 to 3.0 hours by')
  assert precompile.duration(curriculum, 1100, [found[0], {}]) is None
