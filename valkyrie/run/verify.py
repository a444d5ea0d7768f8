"""The run mode `verify`: whether a model computes the same in all forms that should be the same.

    python -m valkyrie.main --gin_file=gin/tiny_cpu.gin --run_mode=verify

Random documents are read in the run's form, with its chunks, layout and devices, in a few rows.
Loss, gradient and carry are compared with those of other cuts, layouts, neighbors and lengths, and
of one token after the other. Rounding explains a difference if it is not much larger than the
difference of two runs of one form whose parameters differ in the last digit, so that all roundings
fall differently (a random arithmetic, as Vignes 1993 has it). It explains little in float32, and in
float64 where the devices have it: these show what the run's own precision hides.
"""

from collections.abc import Callable, Generator, Iterator, Mapping
import dataclasses
import functools
import json
import pathlib
import shutil
from typing import Any, NamedTuple

import gin
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from valkyrie.checkpoint.manager import Checkpoints
from valkyrie.config import paths
from valkyrie.config.computation import may_change_on_resume
from valkyrie.config.load import override_gin
from valkyrie.errors import ConfigurationError, Disagreement, StorageError, message_of
from valkyrie.models import language_model
from valkyrie.models.features import Description
from valkyrie.models.layers import wide
from valkyrie.models.model import Model
from valkyrie.models.ngrams import mixed
from valkyrie.monitoring import memory
from valkyrie.sharding.partitioner import Partitioner
from valkyrie.storage import whole_file
from valkyrie.training import rounding, tbptt
from valkyrie.training.data_parallel import shard_map_step
from valkyrie.training.setup import Setup, StepSettings
from valkyrie.types import Array, Batch, Params, leaves_by_path

_CHUNKS = 4  # that are read of each row
_SINGLY = 256  # tokens at most that are read one by one
_MOVED = 0.02  # the deviation of what is added to parameters: a zero would hide what it multiplies
_EXPLAINED = 8.0  # times the effect of other roundings
_SKETCH = 16  # at most 16 random projections that stand for an array


_RUN = 'the run'


class Form(NamedTuple):
  """A way to compute what the run computes.

  batch: [B, T] on the host; chunk_size: C, dividing T.
  recomputes: as the run does, else all activations are saved.
  learns: whether there are gradients.
  carry: whether the carry after the last token should be the same.
  """

  name: str
  batch: Batch
  chunk_size: int
  layout: Partitioner
  recomputes: bool = True
  learns: bool = True
  carry: bool = True


Numbers = Mapping[str, np.ndarray]  # by path: the loss, and sketches of gradients and carries


class Finding(NamedTuple):
  """The difference of two forms that is the largest in terms of what rounding explains.

  Both are relative to the size of the array at the path `where`.
  """

  check: str
  precision: str
  where: str
  deviation: float
  rounding: float

  @property
  def agrees(self) -> bool:
    """Whether rounding explains it; a NaN does not agree."""
    return self.deviation <= _EXPLAINED * self.rounding


@gin.configurable
@may_change_on_resume()
def verify(model_dir: str, *, settings: Callable[[], StepSettings]) -> None:
  """Prints a line for each comparison, and writes all of them to model_dir/verify.json.

  Raises a Disagreement if rounding does not explain a difference.
  """
  setup, findings = Setup(settings()), []
  layouts, refused = _layouts(settings, setup.partitioner)
  for found in _findings(setup, layouts, pathlib.Path(model_dir), refused):
    findings.append(found)
    print(
      f'{found.check:24} {found.precision:9} {found.deviation:8.1e}   rounding explains '
      f'{_EXPLAINED * found.rounding:8.1e}   {found.where}{"" if found.agrees else "   DIFFERS"}',
      flush=True,
    )
  path = pathlib.Path(model_dir) / 'verify.json'
  rows = [found._asdict() | {'agrees': found.agrees} for found in findings]
  text = json.dumps({'findings': rows, 'not_possible': refused}, indent=2)
  whole_file.write(path, text + '\n', 'Pass another --model_dir.')
  if wrong := [found for found in findings if not found.agrees]:
    first = wrong[0]
    raise Disagreement(
      f'{len(wrong)} of {len(findings)} comparisons differ by more than rounding explains. The '
      f'first: {first.check}, in {first.precision}, {first.where} by {first.deviation:.1e} of its '
      f'size. {path} has all of them.'
    )
  print(f'all {len(findings)} comparisons agree')


def _layouts(
  settings: Callable[[], StepSettings], own: Partitioner
) -> tuple[dict[str, Partitioner], dict[str, str]]:
  """The other layouts of gin/partition for these devices, and why the rest is not possible."""

  def key(layout: Partitioner) -> Any:
    rules = {name: layout.axes_of(name) for name in layout.axis_rules}
    one = layout.mesh.size == 1
    return one or (dict(layout.mesh.shape), rules, layout.manual, layout.gather_layers)

  found, refused = {}, {}
  if jax.device_count() == 1:
    return found, refused
  for path in sorted((paths.GIN / 'partition').glob('*.gin')):
    try:
      with override_gin([f'gin/partition/{path.name}'], []):
        other = Setup(settings()).partitioner
    except ConfigurationError as error:
      _refuse(refused, f'layout {path.stem}', error)
      continue
    if key(other) not in map(key, (own, *found.values())):
      found[path.stem] = other
  return found, refused


def _refuse(refused: dict[str, str], name: str, error: ConfigurationError) -> None:
  refused[name] = message_of(error).partition('\n')[0]
  print(f'{name} is not possible: {refused[name]}', flush=True)


def _findings(
  setup: Setup, layouts: Mapping[str, Partitioner], model_dir: pathlib.Path, refused: dict[str, str]
) -> Iterator[Finding]:
  own = str(setup.model.about.compute_dtype)
  others = ['float32'] if jax.devices()[0].platform == 'tpu' else ['float32', 'float64']
  runs = []
  for precision in [own, *(other for other in others if other != own)]:
    run = yield from comparisons(setup, layouts, precision, refused)
    runs += [run] if run else []
  (found, spread), (expected, _) = runs[0], runs[-1]
  if len(runs) > 1:
    yield _largest('beside the widest', own, found, expected, (spread,))
  yield _restored(setup, model_dir / 'verify.unfinished')


def comparisons(
  setup: Setup, layouts: Mapping[str, Partitioner], precision: str, refused: dict[str, str]
) -> Generator[Finding, None, tuple[Numbers, Numbers] | None]:
  """All that is compared in one precision; returns the numbers of the run, and their spread.

  `refused` receives the forms for which the memory is too small, and the reasons. In the run's own
  precision the run itself has to fit, or a ConfigurationError is raised.
  """
  # A platform's own rounding of the factors of float32 products breaks no rule.
  with jax.enable_x64(precision == 'float64'), jax.default_matmul_precision('highest'):
    compute = _Computation(setup, precision, refused)
    of_run = None
    for first, *forms in _forms(setup, layouts):
      expected = compute(first)
      of_run = expected if first.name == _RUN else of_run
      for form in forms:
        if expected and (found := compute(form)):
          yield _largest(form.name, precision, found[0], expected[0], (expected[1], found[1]))
  return of_run


# Forms.


def _forms(setup: Setup, layouts: Mapping[str, Partitioner]) -> Iterator[list[Form]]:
  """Lists of forms that should be the same as their first."""
  about, layout = setup.language_model.about, setup.partitioner
  size = setup.curriculum.phases[0].chunk_size
  time = _CHUNKS * size
  rows = min(setup.settings.batch_size, 2 * jax.device_count())
  longer = _documents(rows, 2 * time, about)
  batch = jax.tree.map(lambda x: x[:, :time], longer)
  run = Form(_RUN, batch, size, layout)
  same = [run]
  if about.remat_policy is not None or setup.settings.remat_chunks:
    same.append(run._replace(name='activations saved', recomputes=False))
  same += [run._replace(name=f'layout {name}', layout=other) for name, other in layouts.items()]
  unit = (about.plan_interval or 1) * layout.parts_of('time')
  if about.carried:
    cuts = [time] if size // 2 % unit or size == 1 else [size // 2, time]
    same += [run._replace(name=f'chunks of {cut:,}', chunk_size=cut) for cut in cuts]
    # What follows has no weight, and should change nothing.
    masked = longer._replace(weights=longer.weights * (np.arange(2 * time) < time))
    same.append(run._replace(name='twice the length', batch=masked, carry=False))
  yield same
  packed, alone = _apart(batch)
  yield [
    run._replace(name='packed', batch=packed, carry=False),
    run._replace(name='a document alone', batch=alone, carry=False),
  ]
  if about.carried and unit == 1:
    few = min(size, _SINGLY)
    begun = jax.tree.map(lambda x: x[:, :few], batch)
    at_once = run._replace(name='at once', batch=begun, chunk_size=few, learns=False)
    yield [at_once, at_once._replace(name='token by token', chunk_size=1)]


def _documents(rows: int, time: int, about: Description) -> Batch:
  """Random tokens of documents of all lengths, which begin anywhere."""
  random = np.random.default_rng(0)
  longest = min(about.max_context or time, time // 2)
  positions = np.zeros((rows, time), np.int32)
  for row in positions:
    begin = 0
    while begin < time:
      length = min(int(longest ** random.random()) + 1, longest, time - begin)
      row[begin : begin + length] = np.arange(length)
      begin += length
  tokens = random.integers(about.vocabulary_size, size=(rows, time + 1), dtype=np.int32)
  segments = np.cumsum(positions == 0, axis=1, dtype=np.int32)
  same = np.diff(segments, axis=1, append=segments[:, -1:]) == 0
  return Batch(tokens[:, :-1], tokens[:, 1:], same.astype(np.float32), positions, segments)


def _apart(batch: Batch) -> tuple[Batch, Batch]:
  """The batch with weights in one document of each row, and this document at the row's start."""
  weights = np.zeros_like(batch.weights)
  alone = jax.tree.map(np.zeros_like, batch)
  for row in range(len(weights)):
    lengths = np.bincount(batch.segment_ids[row])
    lengths[1] = min(lengths[1], 1)  # the first has no neighbor before it
    chosen = np.flatnonzero(batch.segment_ids[row] == np.argmax(lengths))
    weights[row, chosen] = batch.weights[row, chosen]
    for whole, part in zip(batch, alone, strict=True):
      part[row, : len(chosen)] = whole[row, chosen]
  return batch._replace(weights=weights), alone


# Numbers.


class _Computation:
  """The numbers of forms in one precision; forms of one shape share a program."""

  def __init__(self, setup: Setup, dtype: str, refused: dict[str, str]):
    self._settings, self._dtype, self._programs = setup.settings, dtype, {}
    self._own, self._refused = setup.partitioner, refused
    self._required = dtype == str(setup.model.about.compute_dtype)

  def __call__(self, form: Form) -> tuple[Numbers, Numbers] | None:
    """(the numbers, their largest changes if the parameters change in the last digit).

    None if the memory is too small.
    """
    try:
      with memory.explained(lambda: form.name):
        return self._numbers(form)
    except ConfigurationError as error:
      if self._required and form.name == _RUN:
        raise
      _refuse(self._refused, f'{form.name} in {self._dtype}', error)
      return None

  def _numbers(self, form: Form) -> tuple[Numbers, Numbers]:
    model, layout = self._model(form), form.layout
    make = self._program('parameters', self._own, self._parameters(model, self._own))
    axes = model.parameter_axes(layout.parameter_axes)
    key = form.batch.inputs.shape, form.chunk_size, form.recomputes, form.learns, id(layout)
    read = self._program(key, layout, functools.partial(self._read, form, model))
    batch = form.batch._replace(weights=form.batch.weights.astype(wide(self._dtype)))
    batch = layout.place_batch(batch)

    def numbers(seed):
      params = make(seed)
      if layout is not self._own:  # whose program would round the initial values its own way
        params = jax.device_put(params, layout.shardings(params, axes))
      found = jax.device_get(read(params, batch))
      found = found if form.carry else found | {'carry': ()}
      return {path: np.asarray(leaf, np.float64) for path, leaf in leaves_by_path(found).items()}

    found, *others = (numbers(seed) for seed in (0, 1, 2))
    return found, {
      name: np.max([np.abs(other[name] - value) for other in others], axis=0)
      for name, value in found.items()
    }

  def _program(self, key: Any, layout: Partitioner, function: Callable) -> Callable:
    return self._programs.setdefault(key, layout.jit(function, compiler_options=_options()))

  def _model(self, form: Form) -> Model:
    kept = {} if form.recomputes else {'remat_policy': None}
    model = self._settings.model
    return language_model.transform(
      functools.partial(
        model, compute_dtype=self._dtype, parameter_dtype='float32', unroll=1, **kept
      )
    )

  def _parameters(self, model: Model, layout: Partitioner) -> Callable[[Array], Params]:
    """The function of a seed that makes the parameters; with 0 their last digits are unchanged."""

    def make(seed):
      leaves, structure = jax.tree.flatten(rounding.wide(model.init(jax.random.key(0), 1)[0]))
      epsilon = jnp.where(seed == 0, 0.0, float(jnp.finfo(self._dtype).eps))
      for number, leaf in enumerate(leaves):
        own = jnp.promote_types(leaf.dtype, self._dtype)
        moved = leaf.astype(own) + _MOVED * _uniform(leaf.shape, 3 * number).astype(own)
        change = _uniform(leaf.shape, 3 * number + seed).astype(own)
        leaves[number] = moved * (1 + epsilon.astype(own) * change)
      params = structure.unflatten(leaves)
      axes = model.parameter_axes(layout.parameter_axes)
      return lax.with_sharding_constraint(params, layout.shardings(params, axes))

    return make

  def _read(self, form: Form, model: Model, params: Params, batch: Batch) -> dict[str, Any]:
    """The loss, gradients and carry of a form, traced."""
    rows, time = form.batch.inputs.shape

    def learns(module, name):
      return form.learns

    of_device = functools.partial(
      tbptt.gradients,
      model,
      backprop_chunks=time // form.chunk_size if form.learns else 1,
      remat_chunks=form.recomputes and self._settings.remat_chunks,
      keep_carries=self._settings.keep_carries,
      learns=learns,
    )
    carry = model.initial_carry(rows)
    gradient, carry, sums = shard_map_step(
      of_device, model, params, carry, batch, chunk_size=form.chunk_size, learns=learns
    )
    loss = sums.loss / jnp.maximum(sums.weight, 1)
    return {'loss': loss, 'gradient': _sketches(gradient), 'carry': _sketches(carry)}


def _options() -> dict[str, Any] | None:
  """Of the compiler: on CPU, LLVM's optimizations are most of the time that `verify` takes."""
  return {'xla_backend_optimization_level': 0} if jax.default_backend() == 'cpu' else None


def _sketches(tree: Any) -> Any:
  """Sums of each array with _SKETCH patterns of signs: their norm is about that of the array.

  So differences of arrays that no host could hold are seen in a few numbers (Johnson and
  Lindenstrauss 1984).
  """

  def of(leaf):
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
      return None
    shift = 16 + lax.broadcasted_iota(jnp.uint32, (_SKETCH, *leaf.shape), 0)
    bits = (_hashes(leaf.shape, 0)[None] >> shift) & 1
    values = leaf.astype(wide(leaf.dtype))[None]
    signed = jnp.where(bits == 1, values, -values)
    return jnp.sum(signed, axis=tuple(range(1, signed.ndim))) / _SKETCH**0.5

  return jax.tree.map(of, tree)


def _uniform(shape: tuple[int, ...], salt: int | Array) -> Array:
  """Numbers from -1 to 1."""
  return _hashes(shape, salt).astype(jnp.float32) / 2.0**31 - 1


def _hashes(shape: tuple[int, ...], salt: int | Array) -> Array:
  """32 random bits at each place, the same in every layout.

  jax.random has better numbers, and programs whose compilation takes much longer.
  """
  place = jnp.broadcast_to(jnp.asarray(salt).astype(jnp.uint32), shape)
  for dimension in range(len(shape)):
    place = place * jnp.uint32(shape[dimension])
    place += lax.broadcasted_iota(jnp.uint32, shape, dimension)
  return mixed(place)


def _largest(
  check: str, precision: str, found: Numbers, expected: Numbers, spreads: tuple[Numbers, ...]
) -> Finding:
  """The difference that is the largest of all arrays, in terms of what rounding explains."""
  sizes = {
    name: np.linalg.norm(value) + 1e-300 for name, value in expected.items() if name in found
  }
  spread = {
    name: max(np.linalg.norm(of[name]) for of in spreads if name in of) / size
    for name, size in sizes.items()
  }
  # The spread of a single number may be small by chance, but not much below those of all others.
  least = 0.1 * float(np.median([*spread.values()]))
  findings = [
    Finding(
      check,
      precision,
      name,
      float(np.linalg.norm(found[name] - expected[name]) / size),
      max(float(spread[name]), least),
    )
    for name, size in sizes.items()
  ]
  return max(findings, key=lambda f: np.nan_to_num(f.deviation / f.rounding, nan=np.inf))


def _restored(setup: Setup, place: pathlib.Path) -> Finding:
  """A step after the state was saved and restored, bit for bit."""
  phase = dataclasses.replace(
    setup.curriculum.phases[0].long, chunks=_CHUNKS, backprop_chunks=_CHUNKS, steps=None
  )
  rows, about = setup.settings.batch_size, setup.language_model.about
  batch = setup.partitioner.place_batch(_documents(rows, phase.tokens_per_row, about))
  step = setup.trace(phase).lower().compile(_options())
  state, _ = step(setup.initial_state(), batch)
  if jax.process_index() == 0 and place.exists():
    raise StorageError(f'{place} is there already, perhaps of a run that was killed. Delete it.')
  try:
    with Checkpoints().open(place) as directory:
      directory.save_now(1, state, {}, patiently=False)
      restored = directory.restore(setup.state)
  finally:
    if jax.process_index() == 0:
      shutil.rmtree(place, ignore_errors=True)
  # A step gives up the memory of its state.
  expected, _ = step(state, batch)
  found, _ = step(restored, batch)
  differs = jax.jit(lambda a, b: jax.tree.map(lambda x, y: jnp.any(x != y), a, b))(found, expected)
  wrong = [path for path, one in leaves_by_path(differs).items() if bool(one)]
  where = wrong[0] if wrong else 'all arrays'
  return Finding('saved and restored', 'bit for bit', where, float(len(wrong)), 0.0)
