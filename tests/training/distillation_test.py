"""Distillation against its definition, of whole rows at once, in float64."""

import functools
import re

import gin
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file
import tiny
import tiny_run

import valkyrie
from valkyrie import main
from valkyrie.checkpoint.manager import open_to_read
from valkyrie.config.load import load_gin
from valkyrie.errors import ConfigurationError
from valkyrie.models import language_model
from valkyrie.models.attention.longformer import LongformerAttention
from valkyrie.models.block import Block
from valkyrie.models.language_model import LanguageModel
from valkyrie.training import losses, tbptt
from valkyrie.training.curriculum import Curriculum, Phase
from valkyrie.training.distillation import Distillation
from valkyrie.training.objective import Prediction
from valkyrie.training.optimizers import Optimizer
from valkyrie.training.setup import Setup, StepSettings
from valkyrie.training.train_state import initial_state
from valkyrie.training.train_step import make_train_step
from valkyrie.weights import named_tensors
from valkyrie.weights.initial import open_source

BATCH = tiny.batch([7, 5])
PHASE = Phase(chunk_size=4, chunks=3, backprop_chunks=3)


def make_teacher(mixer=tiny.attention, layers=1, **options):
  block = functools.partial(Block, mixers=(mixer,), mlp_width=8)
  sizes = {'vocabulary_size': tiny.VOCABULARY, 'd_model': 16, 'layers': layers, 'pattern': (block,)}
  return functools.partial(LanguageModel, **{**sizes, 'compute_dtype': 'float64', **options})


def distillation(make=None, **options):
  return Distillation(make or make_teacher(), lambda: None, **options)


def student(**options):
  return tiny.model(mixers=(tiny.s5,), layers=1, remat_policy=None, **options)


def wide(tree):
  return jax.tree.map(
    lambda x: jnp.asarray(x, jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
  )


@pytest.fixture(scope='module')
def begun():
  """(term, extended model, params, carry) in float64, with layers compared."""
  with jax.enable_x64(True):
    term = distillation(
      weight=0.7, temperature=2.0, top_k=5, match=(('stream', 0, 0),), match_weight=0.3
    )
    model = term.extended(student(compute_dtype='float64'))
    params, carry = wide(tiny.init(model, 2))
    yield term, model, params, carry


def by_definition(model, params, carry, batch):
  """The loss of a whole row at once, with the probabilities of numpy's textbook formulas."""
  where = batch.inputs, batch.positions, batch.segment_ids
  seen = ('stream',)
  own, _ = model.apply(params, {'model': carry['model']}, *where, activations=seen)
  theirs = {m.removeprefix('teacher/'): p for m, p in params.items() if m.startswith('teacher/')}
  term = distillation()
  other, _ = term._teacher.apply(theirs, {'model': carry['teacher']}, *where, activations=seen)

  def probabilities(features):
    logits = features.hidden @ features.unembedding[: tiny.VOCABULARY].T
    exp = jnp.exp(logits / 2.0)
    return exp / exp.sum(-1, keepdims=True)

  p, q = probabilities(other), probabilities(own)
  order = jnp.argsort(-p, axis=-1)[..., :5]
  p, q = (jnp.take_along_axis(x, order, axis=-1) for x in (p, q))
  p, q = (jnp.concatenate([x, 1 - x.sum(-1, keepdims=True)], -1) for x in (p, q))
  divergence = jnp.sum(p * jnp.log(p / q), axis=-1)
  difference = jnp.mean((own.activations['stream'][0] - other.activations['stream'][0]) ** 2, -1)
  return jnp.sum(batch.weights * (0.7 * 4.0 * divergence + 0.3 * difference)) / batch.weights.sum()


def test_loss_gradient_and_carry_are_as_of_whole_rows(begun):
  term, model, params, carry = begun
  with jax.enable_x64(True):
    whole, expected = jax.jit(
      jax.value_and_grad(lambda params: by_definition(model, params, carry, BATCH))
    )(params)
    in_chunks = functools.partial(
      tbptt.gradients, model, chunk_size=4, backprop_chunks=3, remat_chunks=True, terms=(term,)
    )
    found, after, sums = jax.jit(in_chunks)(params, carry, BATCH, BATCH.weights.sum())
    for module, group in found.items():
      for name, gradient in group.items():
        if module.startswith('teacher/'):
          assert not np.any(gradient)
        else:
          np.testing.assert_allclose(gradient, expected[module][name], atol=1e-12, rtol=1e-9)
    loss = 0.7 * 4.0 * sums.terms['divergence'] + 0.3 * sums.terms['layers']
    np.testing.assert_allclose([loss, sums.objective], whole * BATCH.weights.sum(), rtol=1e-12)
    where = BATCH.inputs, BATCH.positions, BATCH.segment_ids
    own = {m.removeprefix('teacher/'): p for m, p in params.items() if m.startswith('teacher/')}
    read = term._teacher.apply(own, {'model': carry['teacher']}, *where)[1]
    for a, b in zip(*map(jax.tree.leaves, (after['teacher'], read['model'])), strict=True):
      np.testing.assert_allclose(a, b, atol=1e-12)


def test_all_tokens_apart_are_the_divergence_of_the_distributions():
  random = np.random.default_rng(0)
  features, target = (
    losses.Features(*map(jnp.asarray, (random.normal(size=(2, 3, 8)), random.normal(size=(11, 8)))))
    for _ in range(2)
  )
  found = losses.divergences(target, features, 11)
  np.testing.assert_allclose(losses.divergences(target, features, 11, 1.0, 11), found)
  fewer = [losses.divergences(target, features, 11, 1.0, k) for k in (1, 4, 10)]
  assert np.all(np.diff([*fewer, found], axis=0) > -1e-6) and np.all(fewer[0] >= 0)


def test_the_teacher_is_frozen_and_a_restored_state_continues_bit_for_bit():
  terms = Prediction(weight=0.5), distillation(make_teacher(compute_dtype='float32'))
  model = terms[1].extended(student())
  optimizer = Optimizer(learning_rate=0.01, warmup_steps=1, train_steps=9).preceded_by(
    terms[1].groups
  )
  state = initial_state(model, optimizer, 0, 2)
  moments = sum(leaf.size for leaf in jax.tree.leaves(state.optimizer_state) if leaf.ndim)
  of = {True: 0, False: 0}
  for module, group in state.params.items():
    of[module.startswith('teacher/')] += sum(leaf.size for leaf in group.values())
  assert of[True] and moments == 2 * of[False]

  step = jax.jit(
    make_train_step(
      model, optimizer, Curriculum([PHASE]), PHASE, seed=0, remat_chunks=True, terms=terms
    )
  )
  first, metrics = step(state, BATCH)
  for module, group in first.params.items():
    same = [np.array_equal(leaf, state.params[module][name]) for name, leaf in group.items()]
    assert all(same) if module.startswith('teacher/') else not any(same), module
  assert {*metrics.sums.terms} == {'divergence'}
  assert metrics.sums.loss > metrics.sums.weight  # nats of the true tokens, whatever the weight
  restored = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), first)
  after = step(first, BATCH)[0], step(restored, BATCH)[0]
  jax.tree.map(np.testing.assert_array_equal, *after)
  assert any(map(np.any, jax.tree.leaves(after[0].carry['teacher'])))
  broken, _ = step(first, BATCH._replace(weights=BATCH.weights * np.nan))
  assert not any(map(np.any, jax.tree.leaves(broken.carry['teacher'])))


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'make': make_teacher(vocabulary_size=60)}, 'The teacher has 60 tokens and the student 50'),
    ({'match': (('stream', 1, 0),)}, 'layer 1 of the student, whose layers are 0 to 0'),
    ({'match': (('mlp', 0, -1),)}, 'layer -1 of the teacher'),
    ({'match': (('rivers', 0, 0),)}, 'Distillation.match'),
    ({'match': (('stream', 0),)}, r"Use triples such as \('stream', 5, 5\)"),
    ({'make': make_teacher(d_model=24), 'match': (('mlp', 0, 0),)}, '16 numbers with outputs'),
    ({'temperature': 0.0}, 'Use a number above 0'),
    ({'top_k': 0}, 'Distillation.top_k = 0 is out of range'),
    (
      {'make': make_teacher(mixer=functools.partial(tiny.attention, kernels='require'))},
      "LongformerAttention.kernels = 'require', but a teacher",
    ),
  ],
)
def test_what_does_not_fit_is_named(options, message):
  with pytest.raises(ConfigurationError, match=message):
    distillation(**options).extended(student())


TEACHER = """
StepSettings.objective = (@Prediction, @Distillation)
Distillation.teacher = @teacher/LanguageModel
Distillation.source = @teacher/InitialWeights
teacher/InitialWeights.source = '{source}'
teacher/Block.mixers = (@LongformerAttention,)
teacher/RMSNorm.epsilon = 0.5
"""


@pytest.fixture
def run(tmp_path):
  """(gin file of a run with a teacher, the teacher's tensors, its Distillation)."""
  tiny_run.write_stores(tmp_path / 'data', 'letters', 'ab')
  file = tmp_path / 'run.gin'
  more = TEACHER.format(source=tmp_path / 'teacher.safetensors')
  file.write_text(tiny_run.gin_text(tmp_path / 'data', more=more))
  gin.clear_config(clear_constants=True)
  load_gin([str(file)], modules=main.CONFIGURABLE_MODULES)
  term = Setup(StepSettings()).terms[1]
  params = term._teacher.init(jax.random.key(7), 1)[0]
  tensors = named_tensors.of_params(params)
  return file, {name: t.read((slice(None),) * len(t.shape)) for name, t in tensors.items()}, term


def test_a_scope_reaches_all_parts_of_its_model(run):
  teacher = run[2]._teacher
  params, carry = teacher.init(jax.random.key(0), 1)
  where = np.ones((1, 3), np.int32), np.arange(3)[None], np.ones((1, 3), np.int32)
  found = teacher.apply(params, carry, *where)[0].hidden
  plain = language_model.transform(
    functools.partial(LanguageModel, pattern=(functools.partial(Block, (LongformerAttention,)),))
  )
  with gin.config_scope('teacher'):
    expected = plain.apply(params, carry, *where)[0].hidden
  np.testing.assert_array_equal(found, expected)
  assert np.abs(found - plain.apply(params, carry, *where)[0].hidden).max() > 0.01


def test_a_run_keeps_its_teacher_and_is_used_without_it(run, tmp_path, capsys):
  (file, tensors, _), source = run, tmp_path / 'teacher.safetensors'

  def start(steps, *flags):
    gin.clear_config(clear_constants=True)
    flags = f'--gin.train_steps={steps}', '--gin.checkpoint_every=1', *flags
    code = main.main([f'--gin_file={file}', f'--model_dir={tmp_path / "run"}', *flags])
    said = capsys.readouterr()
    return code, said.out + said.err

  code, said = start(1)
  assert code == 78 and f'The weights {source} are not there' in said
  save_file(dict([*tensors.items()][1:]), source)
  code, said = start(1, '--gin.InitialWeights.partial=True')
  assert code == 78 and 'The teacher cannot be loaded' in said and 'are new' in said
  save_file(tensors, source)
  code, said = start(1)
  assert code == 0 and f'loaded {len(tensors)} of the {len(tensors)} tensors' in said
  assert re.search(r'[\d,]+ more parameters of the objective: teacher\n', said)
  source.unlink()  # the checkpoint has it
  code, said = start(1)
  assert code == 0 and 'nothing to do' in said
  assert 'terms/divergence' in tiny_run.metrics(tmp_path / 'run')[1]
  with open_to_read(tmp_path / 'run') as directory:
    kept = directory._files.read_to_host(directory._place_of_state(), 'params')
  teacher = {m.removeprefix('teacher/'): of for m, of in kept.items() if m.startswith('teacher/')}
  for name, tensor in named_tensors.of_params(teacher).items():
    np.testing.assert_array_equal(tensor.read((slice(None),) * len(tensor.shape)), tensors[name])

  opened = valkyrie.load(tmp_path / 'run')
  assert {*opened.params} == {*kept} - {f'teacher/{module}' for module in teacher}
  assert np.all(np.isfinite(opened.logits('abba')))
  assert {*open_source(str(tmp_path / 'run')).tensors} == {*named_tensors.of_params(opened.params)}
  head = (tmp_path / 'run' / 'model_info.txt').read_text()
  size = sum(leaf.size for group in teacher.values() for leaf in group.values())
  assert f'{size - 125 * 16:,} of the objective' in head.partition('\n')[0]  # 384 - 259 of padding
