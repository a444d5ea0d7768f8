"""All shipped gin files load strictly and build their shapes, without allocating arrays."""

import contextlib
import math
import pathlib
import re

import gin
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
import numpy as np
import pytest
import tiny

from valkyrie import main
from valkyrie.config import check
from valkyrie.config.load import check_call, load_gin
from valkyrie.models import language_model
from valkyrie.models.language_model import LanguageModel
from valkyrie.run import train
from valkyrie.sharding import target
from valkyrie.sharding.partitioner import Partitioner
from valkyrie.training.setup import Setup, StepSettings
from valkyrie.types import Batch

FOLDER = pathlib.Path(__file__).parents[1] / 'gin'
RUNS = sorted(file for file in FOLDER.glob('**/*.gin') if "'gin/run.gin'" in file.read_text())
MODELS = [file for file in sorted(FOLDER.glob('models/*.gin')) if file.stem != 'hybrid']
PARTITIONS = [file for file in sorted(FOLDER.glob('partition/*.gin'))]


def name(file):
  return str(file.relative_to(FOLDER.parent))


def load(*files, flags=()):
  load_gin([name(file) for file in files], flags, modules=main.CONFIGURABLE_MODULES)


@pytest.fixture
def enough_devices():
  """A function that makes the devices of the mesh out of one device, for shapes alone."""
  with contextlib.ExitStack() as within:

    def repeat_device():
      wanted = math.prod(size for _, size in gin.query_parameter('Partitioner.mesh'))
      if wanted > 0:
        within.enter_context(target.target_devices(jax.devices()[:1] * wanted))

    yield repeat_device


def count(tree):
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def shape(leaf):
  return leaf.shape, leaf.dtype


def test_the_gin_files_are_found():
  assert RUNS and MODELS and PARTITIONS


@pytest.mark.parametrize('file', RUNS, ids=name)
def test_a_run_has_its_command_hardware_and_result_in_its_head(file):
  comment = re.match(r'(#.*\n)+', file.read_text())
  assert comment
  lines = [line.lstrip('# ') for line in comment[0].splitlines()]
  assert f'--gin_file={name(file)}' in comment[0]
  assert any(line.startswith('python -m valkyrie.main') for line in lines)
  assert any(line.startswith('For:') for line in lines)
  assert any(line.startswith('Expect') for line in lines)
  # The macros come first, in one place.
  macros = re.split(r'^include ', file.read_text(), flags=re.M)[0]
  assert set(re.findall(r'^(\w+) = ', macros, re.M)) >= check.RUN_MACROS


@pytest.mark.parametrize('file', RUNS, ids=name)
def test_a_run_builds_its_shapes(file, enough_devices):
  load(file)
  enough_devices()
  check_call(train.train, 'model_dir')
  setup = Setup(StepSettings())
  state = setup.state
  assert {type(leaf.sharding) for leaf in jax.tree.leaves(state)} == {NamedSharding}
  assert count(state.params) > 0 and not setup.undeclared_parameters()
  assert count(state.optimizer_state) >= count(state.params)
  for phase in set(setup.curriculum.phases):
    rectangle = (setup.settings.batch_size, phase.tokens_per_row)
    integers, floats = (jax.ShapeDtypeStruct(rectangle, t) for t in (jnp.int32, jnp.float32))
    step = setup.partitioner.jit(setup.train_step(phase))
    after, _ = jax.eval_shape(step, state, Batch(integers, integers, floats, integers, integers))
    assert jax.tree.map(shape, after) == jax.tree.map(shape, state)


@pytest.mark.parametrize('file', MODELS, ids=name)
def test_a_model_builds_and_every_parameter_declares_its_axes(file):
  load(file)
  model = language_model.transform(LanguageModel)
  params, carry = jax.eval_shape(lambda: model.init(jax.random.key(0), 8))
  assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float32)}
  chunk = jax.ShapeDtypeStruct((8, 32), jnp.int32)
  features, after = jax.eval_shape(model.apply, params, carry, chunk, chunk, chunk)
  assert features.hidden.shape == (8, 32, gin.query_parameter('LanguageModel.d_model'))
  assert jax.tree.map(shape, after) == jax.tree.map(shape, carry)
  for partition in PARTITIONS:
    gin.clear_config()
    load(file, partition)
    tiny.shardings(Partitioner(), model, params, carry)
  declared = [p.axes for group in model.parameters().values() for p in group.values()]
  assert None not in declared


def test_valkyrie_1b_has_1_27_billion_parameters():
  load(FOLDER / 'models' / 'valkyrie_1b.gin')
  params, _ = jax.eval_shape(
    lambda: language_model.transform(LanguageModel).init(jax.random.key(0), 1)
  )
  assert 1.26e9 < count(params) < 1.28e9
  assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float32)}
