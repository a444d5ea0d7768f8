"""Every gin file that is shipped parses strictly and builds its shapes, with nothing allocated."""

import contextlib
import math
import pathlib
import re

import gin
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from valkyrie import main
from valkyrie.config import check
from valkyrie.config.load import check_call, load_gin
from valkyrie.models import language_model
from valkyrie.models.language_model import LanguageModel
from valkyrie.run import train
from valkyrie.sharding import mesh
from valkyrie.sharding.partitioner import Partitioner
from valkyrie.training.train_step import initial_state, make_train_step
from valkyrie.types import Batch

FOLDER = pathlib.Path(__file__).parents[1] / 'gin'
RUNS = sorted(file for file in FOLDER.glob('**/*.gin') if "'gin/run.gin'" in file.read_text())
MODELS = [file for file in sorted(FOLDER.glob('models/*.gin')) if file.stem != 'hybrid']
PARTITIONS = [file for file in sorted(FOLDER.glob('partition/*.gin')) if file.stem != 'axes']


def name(file):
  return str(file.relative_to(FOLDER.parent))


def load(*files, flags=()):
  load_gin([name(file) for file in files], flags, modules=main.CONFIGURABLE_MODULES)


@pytest.fixture
def as_many_devices():
  """Call it: there are as many devices as the mesh is for, since only shapes are asked."""
  with contextlib.ExitStack() as within:

    def pretend():
      wanted = math.prod(size for _, size in gin.query_parameter('Partitioner.mesh'))
      if wanted > 0:
        within.enter_context(mesh.on_devices(jax.devices()[:1] * wanted))

    yield pretend


def count(tree):
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def shape(leaf):
  return leaf.shape, leaf.dtype


def test_there_is_a_run():
  assert RUNS and MODELS and PARTITIONS


@pytest.mark.parametrize('file', RUNS, ids=name)
def test_a_run_says_how_where_and_what(file):
  comment = re.match(r'(#.*\n)+', file.read_text())
  assert comment
  lines = [line.lstrip('# ') for line in comment[0].splitlines()]
  assert f'--gin_file={name(file)}' in comment[0]
  assert any(line.startswith('python -m valkyrie.main') for line in lines)
  assert any(line.startswith('For:') for line in lines)
  assert any(line.startswith('Expect') for line in lines)
  # Every macro first, so that what can be set is read in one place.
  macros = re.split(r'^include ', file.read_text(), flags=re.M)[0]
  assert set(re.findall(r'^(\w+) = ', macros, re.M)) >= check.RUN_MACROS


@pytest.mark.parametrize('file', RUNS, ids=name)
def test_a_run_builds_its_shapes(file, as_many_devices):
  load(file)
  as_many_devices()
  check_call(train.train, 'model_dir')
  parts = gin.get_bindings(train.train)
  model = language_model.transform(parts['model'])
  optimizer, layout = parts['optimizer'](), parts['partitioner']()
  batch_size = parts['batch_size']
  phases = parts['curriculum']().phases
  layout.check_batch(batch_size, *(phase.chunk_size for phase in phases))
  state = jax.eval_shape(lambda: initial_state(model, optimizer, parts['seed'], batch_size))
  shardings = layout.state_shardings(state)
  assert jax.tree.structure(shardings) == jax.tree.structure(state)
  assert count(state.params) > 0
  assert count(state.optimizer_state) >= count(state.params)
  curriculum = parts['curriculum']()
  for phase in set(curriculum.phases):
    rectangle = (batch_size, phase.tokens_per_row)
    integers, floats = (jax.ShapeDtypeStruct(rectangle, t) for t in (jnp.int32, jnp.float32))
    step = layout.partition(
      make_train_step(model, optimizer, curriculum, phase, seed=0, remat=True)
    )
    after, _ = jax.eval_shape(step, state, Batch(integers, integers, floats, integers, integers))
    assert jax.tree.map(shape, after) == jax.tree.map(shape, state)


@pytest.mark.parametrize('file', MODELS, ids=name)
def test_a_model_builds_and_every_layout_has_a_rule_for_each_parameter(file):
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
    Partitioner().state_shardings({'params': params, 'carry': carry})


def test_valkyrie_1b_has_1_27_billion_parameters():
  load(FOLDER / 'models' / 'valkyrie_1b.gin')
  params, _ = jax.eval_shape(
    lambda: language_model.transform(LanguageModel).init(jax.random.key(0), 1)
  )
  assert 1.26e9 < count(params) < 1.28e9
  assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float32)}
