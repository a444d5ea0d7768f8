"""All shipped gin files load strictly and build their shapes, without allocating arrays."""

import contextlib
import functools
import math
import pathlib
import re
import types

import gin
import haiku as hk
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
import numpy as np
import pytest
import s5_reference
import tiny

from valkyrie import main
from valkyrie.config import check, parse
from valkyrie.config.load import check_call, load_gin
from valkyrie.models import language_model
from valkyrie.models.language_model import LanguageModel
from valkyrie.models.s5.layer import S5
from valkyrie.run import train
from valkyrie.sharding import ambient
from valkyrie.sharding.partitioner import Partitioner
from valkyrie.training import sizes
from valkyrie.training.setup import Setup, StepSettings
from valkyrie.types import Batch
from valkyrie.weights import huggingface

FOLDER = pathlib.Path(__file__).parents[2] / 'gin'
TEXTS = {file: file.read_text() for file in sorted(FOLDER.glob('**/*.gin'))}
COMMAND = '# python -m valkyrie.main'  # of runs that include another run
RUNS = [f for f, text in TEXTS.items() if text.startswith(COMMAND) or "'gin/run.gin'" in text]
PARTS = 'defaults', 'hybrid', 'delta_hybrid'  # of models
MODELS = [file for file in sorted(FOLDER.glob('models/*.gin')) if file.stem not in PARTS]
DELTA = [file for file in MODELS if file.stem.startswith('delta_')]
LADDER = [file for file in MODELS if 'valkyrie.training.sizes' in file.read_text()]
DATA = [file for file in sorted(FOLDER.glob('data/*.gin'))]
PARTITIONS = [file for file in sorted(FOLDER.glob('partition/*.gin'))]


def name(file):
  inside = file.is_relative_to(FOLDER.parent)
  return str(file.relative_to(FOLDER.parent) if inside else file)


def load(*files, flags=()):
  """Replaces what is bound."""
  gin.clear_config()
  load_gin([name(file) for file in files], flags, modules=main.CONFIGURABLE_MODULES)


@pytest.fixture
def enough_devices():
  """A function that makes the devices of the mesh out of one device, for shapes alone."""
  with contextlib.ExitStack() as within:

    def repeat_device():
      wanted = math.prod(size for _, size in gin.query_parameter('Partitioner.mesh'))
      if wanted > 0:
        within.enter_context(ambient.within(devices=jax.devices()[:1] * wanted))

    yield repeat_device


def count(tree):
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def real(params):
  """The count, without the rows that pad the tables to a multiple of 128."""
  tables = [leaf for name, leaf in params['model'].items() if name.endswith('embedding')]
  padding = -language_model.transform(LanguageModel).about.vocabulary_size % 128
  return count(params) - sum(padding * table.shape[1] for table in tables)


def shape(leaf):
  return leaf.shape, leaf.dtype


def test_the_gin_files_are_found():
  assert RUNS and MODELS and PARTITIONS and len(LADDER) == 7 and len(DELTA) == 4


@pytest.mark.parametrize('file', RUNS, ids=name)
def test_a_run_has_its_command_hardware_and_result_in_its_head(file):
  comment = re.match(r'(#.*\n)+', file.read_text())
  assert comment
  lines = [line.lstrip('# ') for line in comment[0].splitlines()]
  assert f'--gin_file={name(file)}' in comment[0]
  assert any(line.startswith('python -m valkyrie.main') for line in lines)
  assert any(line.startswith('For:') for line in lines)
  assert any(line.startswith('Expect') for line in lines)
  # The macros come first, in one place, unless all are those of another run.
  macros, *parts = re.split(r'^include ', file.read_text(), flags=re.M)
  of_another = parts[0].partition('\n')[0].strip("'") in map(name, RUNS)
  assert of_another or set(re.findall(r'^(\w+) = ', macros, re.M)) >= check.RUN_MACROS


@pytest.mark.parametrize('file', RUNS, ids=name)
def test_a_run_builds_its_shapes(file, enough_devices):
  load(file)
  enough_devices()
  check_call(train.train, 'model_dir')
  setup = Setup(StepSettings())
  state = setup.state
  assert {type(leaf.sharding) for leaf in jax.tree.leaves(state)} == {NamedSharding}
  assert count(state.params) > 0 and not setup.undeclared_parameters()
  assert setup.short_horizon() is None
  moments = count(state.optimizer_state)
  assert moments == 0 if 'sgd' in file.stem else moments >= count(state.params)
  for phase in set(setup.curriculum.phases):
    step = setup.partitioner.jit(setup.train_step(phase))
    after, _ = jax.eval_shape(step, state, batch(setup, phase))
    assert jax.tree.map(shape, after) == jax.tree.map(shape, state)


def batch(setup, phase):
  """The shapes of a batch."""
  rectangle = (setup.settings.batch_size, phase.tokens_per_row)
  integers, floats = (jax.ShapeDtypeStruct(rectangle, t) for t in (jnp.int32, jnp.float32))
  return Batch(integers, integers, floats, integers, integers)


def bound(selectors, *files):
  """What a run and these files bind of the selectors."""
  names = [name(f) for f in (FOLDER / 'run.gin', *files)]
  bindings = [statement.parsed for statement in parse.read_statements(names)]
  chosen = [found for found in bindings if found.selector in selectors]
  return {(found.scope, found.selector, found.arg_name): repr(found.value) for found in chosen}


@pytest.mark.parametrize('file', [f for f in DATA if f.stem != 'feeds'], ids=name)
def test_a_file_of_data_takes_the_place_of_any_other_one(file):
  selectors = 'TaskFeed', 'train', 'train_vocabulary', 'Evaluator'
  alone = bound(selectors, file)
  assert {selector for _, selector, _ in alone} == {*selectors}
  for other in DATA:
    assert bound(selectors, other, file) == alone, other


@pytest.mark.parametrize('file', PARTITIONS, ids=name)
def test_a_layout_takes_the_place_of_any_other_one(file):
  alone = bound(['Partitioner'], file)
  assert alone
  for other in PARTITIONS:
    assert bound(['Partitioner'], other, file) == alone, other


def test_the_step_for_a_gpu_is_lowered_without_one():
  """With the forms of a GPU: no loop goes over the tokens of a chunk, as a CPU's does."""
  load(FOLDER / 'h200.gin')
  setup = Setup(StepSettings())
  (phase,) = setup.curriculum.forms
  with ambient.within(devices=[types.SimpleNamespace(platform='gpu')]):
    step = setup.partitioner.jit(setup.train_step(phase), donate_argnums=0)
    layouts = jax.export.DisabledSafetyCheck.custom_call('LayoutConstraint')
    export = jax.export.export(step, platforms=['cuda'], disabled_checks=[layouts])
    exported = export(setup.state, batch(setup, phase))
  assert exported.platforms == ('cuda',)
  loops = set()
  for function in exported.mlir_module().split('func.func')[1:]:
    numbers = dict(re.findall(r'(%\w+) = stablehlo.constant dense<(\d+)> :', function))
    bounds = re.findall(r'cond \{\s+%\w+ = stablehlo.compare LT, %\w+, (%\w+)', function)
    loops |= {int(numbers[bound]) for bound in bounds}
  assert loops and max(loops) < phase.chunk_size
  # Nothing is added to the embedding in the order of threads: it would change from run to run.
  table = 'x'.join(map(str, setup.state.params['model']['embedding'].shape))
  pattern = r'"stablehlo.scatter".*?\(\{(.*?)\}\) : \(tensor<([\dx]+)x'
  scatters = re.findall(pattern, exported.mlir_module(), re.DOTALL)
  bodies = [body for body, shape in scatters if shape == table]
  assert bodies and not any('stablehlo.add' in body for body in bodies)


def test_a_run_says_how_many_parameters_learn():
  load(FOLDER / 'tiny_cpu.gin', FOLDER / 'optimizers' / 'lora.gin')
  setup = Setup(StepSettings())
  sizes, said = setup.remarks()
  learned, total = re.fullmatch(r'([\d,]+) of ([\d,]+) parameters learn; groups .*', said).groups()
  adapters = {
    f'{module}/{name}': leaf.size
    for module, group in setup.state.params.items()
    for name, leaf in group.items()
    if name.endswith(('_lora_a', '_lora_b'))
  }
  assert adapters and int(learned.replace(',', '')) == sum(adapters.values())
  assert int(total.replace(',', '')) == real(setup.state.params)
  assert sizes.startswith(f'{total} parameters (')


def test_a_run_says_its_sizes_dtypes_and_mesh():
  load(FOLDER / 'tiny_cpu.gin')
  setup = Setup(StepSettings())
  (said,) = setup.remarks()
  total, parts, kinds = re.fullmatch(r'([\d,]+) parameters \((.*)\) in (.*)', said).groups()
  assert total == f'{real(setup.state.params):,}'
  assert kinds == 'float32, computed in float32; mesh data=1'
  sizes = {
    name: int(size.replace(',', '')) for name, size in re.findall(r'(\w+) ([\d,]*\d)', parts)
  }
  assert sum(sizes.values()) == real(setup.state.params)
  assert sizes['embedding'] == 259 * setup.state.params['model']['embedding'].shape[1]
  names = ['embedding', 'gated_recurrence', 'longformer_attention', 'mlp', 'norms']
  assert sorted(sizes) == names and [*sizes.values()] == sorted(sizes.values(), reverse=True)


def test_a_horizon_shorter_than_the_rows_is_told():
  load(FOLDER / 'tiny_cpu.gin', flags=['--gin.S5.horizon=50', '--gin.chunks=2'])
  assert re.fullmatch(
    r'a step reads 128 tokens of each row, but .* above 50 tokens .* S5\.horizon\) to 128 or more',
    Setup(StepSettings()).short_horizon(),
  )


def test_a_model_without_recurrence_has_no_horizon():
  load(FOLDER / 'tiny_cpu.gin', flags=['--gin.recurrent/Block.mixers=(@LongformerAttention,)'])
  assert Setup(StepSettings()).short_horizon() is None


def test_a_fresh_flagship_remembers_beyond_65536_tokens():
  """At least 1% of the energy of S5's impulse response, each of its states by itself.

  The products of different states turn against each other, and their sums vanish.
  """
  load(FOLDER / 'models' / 'deep_1b.gin')
  width = gin.query_parameter('GatedRecurrence.width')

  def layer(x):
    mixer, one = S5(), jnp.ones((1, 1), int)
    return mixer(x, mixer.initial_carry(1, x.dtype), positions=one, segment_ids=one)

  params = hk.transform(layer).init(jax.random.key(0), jnp.zeros((1, 1, width)))['s5']
  system, tokens = s5_reference.system_of(params), 65536
  step = np.exp(system['log_step'])
  _, gain = s5_reference.discretized(system['eigenvalues'], step, 'normalized')
  rate = -2 * system['eigenvalues'].real * step  # the squared response decays by exp(-rate)
  reads = np.sum(np.abs(system['b']) ** 2, axis=1) * np.sum(np.abs(system['c']) ** 2, axis=0)
  energy = reads * np.abs(gain) ** 2 / -np.expm1(-rate)
  assert gin.query_parameter('S5.discretization') == 'normalized'
  assert np.sum(energy * np.exp(-rate * tokens)) > 0.01 * np.sum(energy)


@pytest.mark.parametrize('file', MODELS, ids=name)
def test_a_model_builds_and_every_parameter_declares_its_axes(file):
  model, (params, carry, features, after), _ = built(file)
  load(file)
  assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float32)}
  table = (FOLDER.parent / 'docs' / 'models.md').read_text()
  assert f'| `{file.stem}` | {real(params):,} |' in table
  assert features.hidden.shape == (8, 32, gin.query_parameter('LanguageModel.d_model'))
  assert jax.tree.map(shape, after) == jax.tree.map(shape, carry)
  for partition in PARTITIONS:
    load(file, partition)
    tiny.shardings(Partitioner(), model, params, carry)
  declared = [p.axes for group in model.parameters().values() for p in group.values()]
  assert None not in declared


@functools.cache
def built(*files):
  """(a model of these files, the shapes that `trace` gives, its `used_values`)."""
  load(*files)
  model = language_model.transform(LanguageModel)
  shapes = trace(model)
  used = dict(gin.config._OPERATIVE_CONFIG)
  assert any(selector.endswith('.LanguageModel') for _, selector in used)
  return model, shapes, used


def trace(model):
  """The shapes of the parameters, and of the carry, features and next carry of 8 rows."""
  params, carry = jax.eval_shape(lambda: model.init(jax.random.key(0), 8))
  chunk = jax.ShapeDtypeStruct((8, 32), jnp.int32)
  features, after = jax.eval_shape(model.apply, params, carry, chunk, chunk, chunk)
  return params, carry, features, after


def used_values(*files):
  """{(scope, configurable): values} with which a model of these files is built and applied.

  Another configuration that gives all these parameters the same values builds the same model.
  """
  _, _, used = built(*files)
  return used


def parameters_of(file):
  """The shapes of the parameters of a model."""
  _, (params, *_), _ = built(file)
  return params


def values_of(used, *files):
  """What these files bind the used parameters to, macros among them; the rest keeps its default."""
  load(*files)
  values = {}
  for (scope, selector), defaults in used.items():
    with gin.config_scope(scope or None):
      bound_values = gin.get_bindings(selector, resolve_references=False)
    for parameter in defaults.keys() - BOUND_BY_RUNS:
      value = bound_values.get(parameter, defaults[parameter])
      values[scope, selector, parameter] = repr(value)
  assert values
  return values


BOUND_BY_RUNS = {'remat_policy', 'compute_dtype'}  # for their memory


@pytest.mark.parametrize('file', MODELS, ids=name)
def test_a_model_takes_the_place_of_any_other_one(file):
  used = used_values(file)
  alone = values_of(used, file)
  assert values_of(used, *MODELS, file) == alone
  assert values_of(used, *reversed(MODELS), file) == alone


@pytest.mark.parametrize(
  ('run', 'folder'), [('tiny', 'mixers'), ('recall', 'recall'), ('state_tracking', 'recall')]
)
def test_a_recurrence_takes_the_place_of_any_other_one(run, folder):
  base = FOLDER / f'{run}_cpu.gin'
  files = sorted(FOLDER.glob(f'models/{folder}/*.gin'))
  for file in files:
    used = used_values(base, file)
    alone = values_of(used, base, file)
    assert values_of(used, base, *files, file) == alone
    assert values_of(used, base, *reversed(files), file) == alone


@pytest.mark.parametrize('file', LADDER, ids=name)
def test_a_size_of_the_ladder_is_what_its_command_prints(file, capsys):
  text = file.read_text()
  command = re.search(r'python -m valkyrie\.training\.sizes (.*)', text)
  assert command and sizes.main(command[1].split()) == 0
  assert capsys.readouterr().out == text
  params = parameters_of(file)
  load(file)
  asked = float(command[1].split()[0])
  assert real(params) == int(text[2:].split()[0].replace(',', ''))
  assert real(params) == pytest.approx(asked, rel=0.02)
  unit, letter = (1e6, 'm') if asked < 1e9 else (1e9, 'b')
  assert file.stem == f'valkyrie_{asked // unit:.0f}{letter}'


@pytest.mark.parametrize('file', DELTA, ids=name)
def test_a_delta_hybrid_has_the_parameters_of_its_name(file):
  said = int(file.read_text()[2:].split()[0].replace(',', ''))
  number, unit = re.fullmatch(r'delta_(\d+)([mb])', file.stem).groups()
  params = parameters_of(file)
  load(file)
  assert real(params) == said
  assert said == pytest.approx(int(number) * {'m': 1e6, 'b': 1e9}[unit], rel=0.025)


def test_the_rule_covers_the_sizes_between():
  asked = [2e7 * 10 ** (n / 40) for n in range(161)]
  found = [sizes.gin_file(n, 8192) for n in asked]
  widths, layers, inner, mlp, counts = (
    [int(re.search(rf'^{name} ([\d,]+)', text, re.M)[1].replace(',', '')) for text in found]
    for name in (
      'LanguageModel.d_model =', 'LanguageModel.layers =', 'GatedRecurrence.width =',
      'Block.mlp_width =', '#',
    )
  )  # fmt: skip
  np.testing.assert_allclose(counts, asked, rtol=0.025)
  assert widths == sorted(widths) and len(set(widths)) > 20
  for d, depth, f, m in zip(widths, layers, inner, mlp, strict=True):
    assert depth % 3 == 0 and 1 / 3 < depth / (d**0.5 / 2) < 3 / 2
    assert 4 / 3 <= f / d <= 3 / 2 and 2 <= m / d <= 4
    assert f % 64 == m % 64 == 0 and (d < 512 or d % 128 == f % 128 == m % 128 == 0)


def test_a_model_that_is_mostly_vocabulary_is_refused(capsys):
  assert sizes.main(['5e6']) == 78
  assert 'Use fewer tokens or more parameters' in capsys.readouterr().err
  assert sizes.main(['5e6', '--vocabulary_size=8192']) == sizes.main(['50e6']) == 0
  with pytest.raises(SystemExit, match='2'):
    sizes.main(['50'])


def test_a_file_that_cannot_be_written_is_an_error(capsys):
  with open('/dev/full', 'w') as full, contextlib.redirect_stdout(full):
    assert sizes.main(['50e6']) == 74
  assert 'name another file after >' in capsys.readouterr().err


@pytest.mark.parametrize(
  ('model', 'least', 'most'),
  [
    ('deep_1b', 1.24e9, 1.26e9),
    ('wide_24b', 24.1e9, 24.2e9),
    ('llama3_8b_hybrid', 8.4e9, 8.6e9),
    ('llama3_8b', 8_030_261_248, 8_030_261_248),
    ('decoder_1b', 1_104_218_112, 1_104_218_112),
  ],
)
def test_large_models_have_their_parameters(model, least, most):
  params = parameters_of(FOLDER / 'models' / f'{model}.gin')
  assert least <= count(params) <= most
  assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float32)}


def test_the_large_llama_is_that_of_its_configuration(tmp_path):
  config = {
    'model_type': 'llama', 'vocab_size': 128256, 'hidden_size': 4096, 'num_hidden_layers': 32,
    'intermediate_size': 14336, 'num_attention_heads': 32, 'num_key_value_heads': 8,
    'max_position_embeddings': 131072, 'rms_norm_eps': 1e-5, 'rope_theta': 500000.0,
    'tie_word_embeddings': False,
    'rope_scaling': {
      'rope_type': 'llama3', 'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0,
      'original_max_position_embeddings': 8192,
    },
  }  # fmt: skip
  load(FOLDER / 'models' / 'llama3_8b.gin')
  for binding, value in huggingface.bindings(config).items():
    if not binding.endswith(('_turns', 'max_context', '_norm')):  # defaults, and a choice
      assert gin.query_parameter(binding) == value, binding
  # The file that is printed for it takes the place of any model, too.
  printed = tmp_path / 'llama.gin'
  printed.write_text(huggingface.gin_text(config))
  used = used_values(printed)
  assert values_of(used, *MODELS, printed) == values_of(used, printed)
