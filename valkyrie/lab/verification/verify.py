"""The run mode `verify`: whether a model computes the same in all forms that should be the same.

    python -m valkyrie.main --gin_file=gin/tiny_cpu.gin --run_mode=verify

Random documents are read in the run's form, with its chunks, layout and devices, in a few rows.
Loss, gradient and carry are compared with other cuts, layouts, neighbors and lengths, and with
reading one token after the other. Rounding explains a difference if it is not much larger than the
difference of two runs of one form whose parameters differ in the last digit, so that all roundings
fall differently (a random arithmetic, as Vignes 1993 has it). It explains little in float32, and in
float64 where the devices have it: these show what the run's own precision hides.
"""

from collections.abc import Callable, Generator, Iterator, Mapping
import contextlib
import dataclasses
import json
import pathlib
from typing import NamedTuple

import gin
import jax
import jax.numpy as jnp
import numpy as np

from valkyrie.checkpoint.manager import Checkpoints
from valkyrie.config import paths
from valkyrie.config.computation import may_change_on_resume
from valkyrie.config.load import override_gin
from valkyrie.distributed import processes
from valkyrie.errors import ConfigurationError, Disagreement, message_of, storage_errors
from valkyrie.lab.verification import verify_forms
from valkyrie.lab.verification.verify_numbers import Computation, Numbers, compiler_options
from valkyrie.monitoring.waiting import doing
from valkyrie.sharding.partitioner import Partitioner
from valkyrie.storage import owned, whole_file
from valkyrie.training.setup import Setup, StepSettings
from valkyrie.types import leaves_by_path

_EXPLAINED = 8.0  # times the effect of other roundings


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
  """Prints a line for each comparison, and writes all comparisons to model_dir/verify.json.

  Raises a Disagreement if rounding does not explain a difference.
  """
  setup = Setup(settings())
  findings = []
  layouts, refused = _layouts(settings, setup.partitioner)
  failure: Exception | None = None
  try:
    for found in _findings(setup, layouts, pathlib.Path(model_dir), refused):
      findings.append(found)
      print(
        f'{found.check:24} {found.precision:9} {found.deviation:8.1e}   rounding explains '
        f'{_EXPLAINED * found.rounding:8.1e}   {found.where}{"" if found.agrees else "   DIFFERS"}',
        flush=True,
      )
  except Exception as error:  # what was found before it counts
    failure = error
  path = pathlib.Path(model_dir) / 'verify.json'
  rows = [found._asdict() | {'agrees': found.agrees} for found in findings]
  text = json.dumps({'findings': rows, 'not_possible': refused}, indent=2)
  if rows:
    whole_file.write_version(path, f'{text}\n'.encode())
  if wrong := [found for found in findings if not found.agrees]:
    first = wrong[0]
    raise Disagreement(
      f'{len(wrong)} of {len(findings)} comparisons differ by more than rounding explains. The '
      f'first: {first.check}, in {first.precision}, {first.where} by {first.deviation:.1e} of its '
      f'size. {path} has all comparisons.'
    ) from failure
  if failure is not None:
    raise failure
  print(f'all {len(findings)} comparisons agree')


def _layouts(
  settings: Callable[[], StepSettings], own: Partitioner
) -> tuple[dict[str, Partitioner], dict[str, str]]:
  """The other layouts of gin/partition for these devices, and why the rest is not possible."""
  found = {}
  refused = {}
  if jax.device_count() == 1:
    return found, refused
  for path in sorted((paths.GIN / 'partition').glob('*.gin')):
    try:
      with override_gin([f'gin/partition/{path.name}'], []):
        other = Setup(settings()).partitioner
    except ConfigurationError as error:
      verify_forms.refuse(refused, f'layout {path.stem}', message_of(error))
      continue
    if other.computation not in [layout.computation for layout in (own, *found.values())]:
      found[path.stem] = other
  return found, refused


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
  with doing('comparing what is saved and restored'):
    found = _restored(setup, model_dir / 'verify')
  yield found


def comparisons(
  setup: Setup, layouts: Mapping[str, Partitioner], precision: str, refused: dict[str, str]
) -> Generator[Finding, None, tuple[Numbers, Numbers] | None]:
  """All that is compared in one precision; returns the numbers of the run, and their spread.

  `refused` receives the forms for which the memory is too small, or which a mixer cannot compute in
  a precision that is not the run's, and the reasons. In the run's own precision the run itself has
  to fit, or a ConfigurationError is raised.
  """
  # A platform's own rounding of the factors of float32 products breaks no rule.
  with jax.enable_x64(precision == 'float64'), jax.default_matmul_precision('highest'):
    compute = Computation(setup, precision, refused)
    of_run = None
    for first, *forms in verify_forms.forms(setup, layouts):
      expected = compute(first)
      of_run = expected if first.name == verify_forms.RUN else of_run
      for form in forms:
        if expected and (found := compute(form)):
          yield _largest(form.name, precision, found[0], expected[0], (expected[1], found[1]))
  return of_run


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
  # The spread of a single number may be small by chance, but not much below all other spreads.
  least = 0.1 * float(np.median([*spread.values()]))

  def of(name):
    deviation = float(np.linalg.norm(found[name] - expected[name]) / sizes[name])
    return Finding(check, precision, name, deviation, max(float(spread[name]), least))

  return max(map(of, sizes), key=lambda f: np.nan_to_num(f.deviation / f.rounding, nan=np.inf))


def _restored(setup: Setup, place: pathlib.Path) -> Finding:
  """A step after the state was saved beside `place` and restored, bit for bit."""
  phase = dataclasses.replace(
    setup.curriculum.phases[0].long,
    chunks=verify_forms.CHUNKS,
    backprop_chunks=verify_forms.CHUNKS,
    steps=None,
  )
  rows = setup.settings.batch_size
  about = setup.language_model.about
  batch = setup.partitioner.place_batch(verify_forms.documents(rows, phase.tokens_per_row, about))
  step = setup.trace(phase).lower().compile(compiler_options())
  state, _ = step(setup.initial_state(), batch)
  with contextlib.ExitStack() as stack:
    made = None
    if jax.process_index() == 0:
      with storage_errors(f'{place.parent} cannot be written', 'Pass another --model_dir.'):
        made = stack.enter_context(owned.temporary_folder(place)).name
    first, *_ = processes.exchange('verify', made)
    with Checkpoints().open(place.with_name(first)) as directory:
      directory.save_now(1, state, {}, patiently=False)
      restored = directory.restore(setup.state)
  # A step gives up the memory of its state.
  expected, _ = step(state, batch)
  found, _ = step(restored, batch)
  differs = jax.jit(lambda a, b: jax.tree.map(lambda x, y: jnp.any(x != y), a, b))(found, expected)
  wrong = [path for path, one in leaves_by_path(differs).items() if bool(one)]
  where = wrong[0] if wrong else 'all arrays'
  return Finding('saved and restored', 'bit for bit', where, float(len(wrong)), 0.0)
